"""What FlashInfer's executor refuses, and with which reason."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import pytest
import torch

from capture_planner.errors import BackendError, RunError
from capture_planner.modes import GraphMode
from capture_planner.plugins.backend import LayerCache, Scoring
from capture_planner.records.batch import Entry
from capture_planner.records.model import DataType, Latent
from capture_planner_flashinfer import FlashInfer
from capture_planner_flashinfer.selection import KernelFamily
from support import flashinfer_rig as checks
from support.flashinfer_cases import SETTINGS, SMALL, WRAPPERS, each_family, reservation_of, rig_of

pytestmark = pytest.mark.usefixtures("one_thread", "library")


def test_attend_uses_the_scale_of_a_layer_and_the_softcap_of_the_group() -> None:
    """One plan serves layers of any scale, and refuses a second softcap."""
    rig = rig_of(SETTINGS[KernelFamily.CUDA_CORE])
    batch = rig.batch([40, 5], [1, 1], 3, 0.0)
    metadata = rig.stage(None, batch.values)
    out = torch.empty_like(batch.query)
    for scale in (0.01, 1.0):
        rig.executor.attend(checks.LAYER, batch.query, out, Scoring(scale=scale), metadata)
        rig.scoring = Scoring(scale=scale)
        checks.close(out, rig.batch([40, 5], [1, 1], 3, 0.0).expected)
    with pytest.raises(BackendError, match=r"layer 3: its softcap is 30\.0, and an earlier layer .* has None"):
        rig.executor.attend(checks.LAYER, batch.query, out, Scoring(scale=1.0, softcap=30.0), metadata)


@attrs.frozen(kw_only=True, eq=False)
class TreeScoring(Scoring):
    """Scoring that asks for a mask, as a tree of drafts would."""

    mask: torch.Tensor


@each_family
def test_attend_rejects_custom_masks(family: KernelFamily) -> None:
    """In a graph and in an eager step, before anything is launched: it is never left out in silence."""
    rig = rig_of(SETTINGS[family])
    query_len = rig.setting.query_len
    batch = rig.batch([40] * checks.REQS, [query_len] * checks.REQS, 3, 0.0)
    scoring = TreeScoring(scale=1.0, mask=torch.ones(query_len, query_len, dtype=torch.bool))
    for entry in (rig.entries[0], None):
        metadata = rig.stage(entry, batch.values)
        with pytest.raises(BackendError, match=r"layer 3: custom masks.*are not supported.*drafts as chains"):
            rig.executor.attend(checks.LAYER, batch.query, batch.query.clone(), scoring, metadata)


@pytest.mark.parametrize("family", WRAPPERS)
def test_no_wrapper_gets_a_mask_buffer(library: Any, family: KernelFamily) -> None:
    """A wrapper with one would go on reading it where a plan has no mask."""
    given_: list[dict[str, Any]] = []
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper
    library.BatchPrefillWithPagedKVCacheWrapper = lambda *args, **how: given_.append(how) or wrapper(*args, **how)
    rig_of(SETTINGS[family])
    assert given_
    assert not any("mask" in name for how in given_ for name in how)


@each_family
def test_attend_rejects_sinks(family: KernelFamily) -> None:
    """Sinks are refused where a layer has them, and before that where the plan says so."""
    rig = rig_of(SETTINGS[family])
    batch = rig.batch([40], [1], 3, 0.0)
    metadata = rig.stage(None, batch.values)
    scoring = Scoring(scale=1.0, sinks=torch.zeros(rig.setting.heads))
    with pytest.raises(BackendError, match="layer 3 have learned sinks"):
        rig.executor.attend(checks.LAYER, batch.query, batch.query.clone(), scoring, metadata)


@pytest.mark.parametrize("family", [KernelFamily.XQA, KernelFamily.TRTLLM_GEN])
def test_kernels_without_a_plan_reject_a_softcap(family: KernelFamily) -> None:
    """XQA and trtllm-gen have no softcap, which shows in the first warm-up."""
    setting = attrs.evolve(SETTINGS[family], softcap=30.0)
    with pytest.raises(BackendError, match=f"{family.value} has no softcap.* 30.0"):
        rig_of(setting)


def test_prepare_rejects_a_graph_that_was_not_reserved() -> None:
    """A wrapper's batch is fixed, so there is none for another shape."""
    rig = rig_of(SETTINGS[KernelFamily.CUDA_CORE])
    entry = Entry(mode=GraphMode.FULL, num_tokens=3, num_reqs=3, query_len=1)
    with pytest.raises(RunError, match="no wrapper was reserved for FULL 3 tokens, 3 requests of 1"):
        rig.stage(entry, rig.batch([4, 4], [1, 1], 1, 0.0).values)


LATENT = Latent(kv_lora_rank=512, rope_head_dim=64)
PIECEWISE = Entry(mode=GraphMode.PIECEWISE, num_tokens=64)


@pytest.mark.parametrize(
    ("setting", "attention", "changes", "says"),
    [
        ("9.0", {"head_dim": 80}, {}, "head dimension of 80.*64, 128 or 256"),
        ("9.0", {"causal": False}, {}, "not causal"),
        ("8.0", {"decode_context": 2}, {}, "decode context parallelism"),
        ("10.0", {"latent": LATENT}, {}, "latent attention"),
        ("9.0", {"latent": LATENT}, {}, "latent attention needs SM100"),
        ("8.0", {"kv_dtype": DataType.FP8}, {}, "KV cache of fp8 needs scales"),
        ("8.0", {"num_heads": 3}, {}, "2 KV heads do not divide 3"),
        ("9.0", {"sinks": True}, {}, "learned sinks"),
        ("9.0", {}, {"page_size": 8}, "XQA takes pages of 16, 32, 64 or 128 tokens, not 8"),
        ("10.0", {}, {"page_size": 128}, "trtllm-gen takes pages of 16, 32 or 64 tokens, not 128"),
        ("8.0", {}, {"page_size": 8}, r"layer 3: keys are .* expected .*num_pages, 8, 2, 64"),
        ("8.0", {}, {"entries": (attrs.evolve(PIECEWISE, mode=GraphMode.FULL, num_reqs=8),)}, "mixed"),
        ("8.0", {}, {"workspace": torch.zeros(64, dtype=torch.uint8)}, "64 bytes of workspace.*plan again"),
        ("8.0", {}, {"pinned": torch.zeros(64, dtype=torch.uint8)}, "64 bytes of pinned memory"),
    ],
)
def test_reserve_rejects_unsupported_groups(setting: str, attention: Any, changes: Any, says: str) -> None:
    """Each refusal names the role, the group, what is wrong, and what is supported."""
    rig = rig_of(checks.Setting(heads=4, capability=setting, **SMALL))
    asked = reservation_of(rig, **changes)
    asked = attrs.evolve(asked, attention=attrs.evolve(asked.attention, **attention))
    with pytest.raises(BackendError, match=f"flashinfer: target, group {checks.GROUP}.*{says}"):
        FlashInfer().reserve(asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_reserve_rejects_other_element_types(dtype: torch.dtype) -> None:
    """The kernels take half precision alone."""
    rig = rig_of(SETTINGS[KernelFamily.CUDA_CORE])
    keys = rig.cache.keys.to(dtype)
    with pytest.raises(BackendError, match=f"keys are {dtype}"):
        FlashInfer().reserve(reservation_of(rig, caches={0: LayerCache(keys=keys, values=keys)}))


def test_reserve_names_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FlashInfer there is a reason and a remedy, not an ImportError."""
    rig = rig_of(SETTINGS[KernelFamily.CUDA_CORE])
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BackendError, match=r"flashinfer-python.*install it"):
        FlashInfer().reserve(reservation_of(rig))
