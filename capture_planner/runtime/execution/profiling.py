"""Ranges for PyTorch's profiler: a trace shows which role ran, and which graph of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from capture_planner.records.batch import batch_text
from capture_planner.runtime.execution.inputs import ForwardStep

_NOTHING = nullcontext()


def profiled(step: ForwardStep) -> AbstractContextManager[object]:
    """Return the range of a replay, or of a forward without a graph; without a profiler it costs less than 1 us."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    graph = "eager" if step.entry is None else str(step.entry)
    return torch.profiler.record_function(f"{step.batch.role.value}: {graph} for {batch_text(step.batch)}")
