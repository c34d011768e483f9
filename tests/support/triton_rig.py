"""The Triton executor in this process, interpreted or compiled, and a small group to reserve it for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import capture_planner_triton
from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.backend import LayerCache, Reservation
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType
from capture_planner.records.spec import Limits
from support.files import module_at

triton = pytest.importorskip("triton", reason="the Triton kernels need triton, which is not installed")
tl = triton.language

_SOURCES = Path(capture_planner_triton.__file__).parent

STANDARD = {
    "cdiv": lambda x, y: (x + y - 1) // y,
    "max": lambda x, axis: tl.reduce(x, axis, tl.standard._elementwise_max),
    "sum": lambda x, axis: tl.reduce(x, axis, tl.standard._sum_combine),
    "zeros": lambda shape, dtype: tl.full(shape, 0, dtype),
}
"""Functions that Triton defines in its own language: compiled, as Triton was imported without the variable."""


def load_executor(*, interpreted: bool) -> Any:
    """Return a fresh executor module whose kernels are interpreted, or compiled for a GPU.

    Triton reads ``TRITON_INTERPRET`` when a kernel is defined.
    """
    with pytest.MonkeyPatch.context() as patch:
        if interpreted:
            patch.setenv("TRITON_INTERPRET", "1")
        else:
            patch.delenv("TRITON_INTERPRET", raising=False)
        kernels = module_at(_SOURCES / "kernels.py", f"kernels_{interpreted}")
        patch.setitem(sys.modules, "capture_planner_triton.kernels", kernels)
        return module_at(_SOURCES / "executor.py", f"executor_{interpreted}")


@contextmanager
def interpreting() -> Iterator[None]:
    """Replace Triton's own compiled functions while interpreted kernels run."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in STANDARD.items():
            patch.setattr(tl, name, function)
        yield


def small_reservation(**changes: Any) -> Reservation:
    """Return a group of one layer on a CPU, with a graph of one request whose keys are split."""
    attention = Attention(
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_model_len=256,
        max_query_len=1,
        dtype=DataType.FLOAT32,
        kv_dtype=DataType.FLOAT32,
    )
    gpu = Device(kind=DeviceKind.CUDA, name="g", capability="9.0", memory=1, multiprocessors=8)
    cache = torch.zeros(3, 16, 1, 8)
    entries = (Entry(mode=GraphMode.FULL, num_tokens=1, num_reqs=1, query_len=1),)
    return attrs.evolve(
        Reservation(
            role=Role.TARGET,
            group="all",
            attention=attention,
            environment=Environment(name="e", device=gpu),
            entries=entries,
            limits=Limits(max_num_reqs=1, max_num_tokens=1),
            caches={0: LayerCache(keys=cache, values=cache)},
            page_size=16,
            fields={},
            workspace=torch.zeros(4 * 1 * 2 * 9 * 4, dtype=torch.uint8),
            pinned=torch.empty(0, dtype=torch.uint8),
            device=torch.device("cpu"),
        ),
        **changes,
    )
