"""Settings that reach FlashInfer's five paths, and rigs of them on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capture_planner.modes import Role
from capture_planner.plugins.backend import Reservation
from capture_planner.records.backend import Attention
from capture_planner.records.spec import Limits
from capture_planner_flashinfer.selection import KernelFamily
from capture_planner_flashinfer.workspace import INT_WORKSPACE
from support import flashinfer_rig as checks
from support.flashinfer_standin import CPU, recorded

SMALL: dict[str, Any] = {"kv_heads": 2, "head_dim": 64}
SETTINGS = {
    KernelFamily.CUDA_CORE: checks.Setting(heads=4, **SMALL),
    KernelFamily.TENSOR_CORE: checks.Setting(heads=8, page_size=64, window=33, softcap=20.0, **SMALL),
    KernelFamily.PREFILL: checks.Setting(heads=4, query_len=4, softcap=5.0, **SMALL),
    KernelFamily.XQA: checks.Setting(heads=4, query_len=4, capability="9.0", **SMALL),
    KernelFamily.TRTLLM_GEN: checks.Setting(heads=4, query_len=2, window=33, capability="10.0", **SMALL),
}
each_family = pytest.mark.parametrize("family", SETTINGS, ids=lambda family: family.name)
WRAPPERS = [KernelFamily.CUDA_CORE, KernelFamily.TENSOR_CORE, KernelFamily.PREFILL]


def rig_of(setting: Any) -> Any:
    """Make a rig on the CPU."""
    return checks.Rig(setting, CPU, recorded)


def reservation_of(rig: Any, **changes: Any) -> Reservation:
    """Return what a rig reserves with, as far as it is asked for."""
    planned = checks.environment(rig.setting, CPU)
    attention = Attention(
        num_layers=1,
        num_heads=rig.setting.heads,
        num_kv_heads=rig.setting.kv_heads,
        head_dim=rig.setting.head_dim,
        max_model_len=checks.LENGTH,
        max_query_len=rig.setting.query_len,
    )
    given_ = {
        "role": Role.TARGET,
        "group": checks.GROUP,
        "attention": attention,
        "environment": planned,
        "entries": rig.entries,
        "limits": Limits(max_num_reqs=checks.REQS, max_num_tokens=checks.TOKENS),
        "caches": {checks.LAYER: rig.cache},
        "page_size": rig.setting.page_size,
        "fields": {name: b.tensor for name, b in rig.fields.by_group[checks.GROUP].items()},
        "workspace": rig.workspace,
        "pinned": torch.zeros(8 * INT_WORKSPACE, dtype=torch.uint8),
        "device": CPU,
    }
    return Reservation(**given_ | changes)
