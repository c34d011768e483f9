"""Class L: an operator couples the rows of a batch, and what padding holds reaches real rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.plugins.backend import Metadata, Scoring
from capture_planner_reference.executor import ReferenceExecutor
from capture_planner_runner.execution.attention import LayerCalls
from gallery.core import Mutant
from gallery.padding import RenamedReference
from gallery.patching import patched
from support.runner_conformance import models

_LEVELS = float(1 << 36)
"""Of a quantized query: so many that rounding is far below any tolerance, where the scale is right."""


def _all_real(original: object) -> property:
    return property(lambda calls: torch.ones_like(calls._slots, dtype=torch.bool))


def _padding_counted(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def coupled(hidden: torch.Tensor, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        # Padding is zero in the scale, as a cleared buffer has it, and a token in the load.
        clean = torch.where(real[:, None], hidden, 0)
        return original(clean, ids, torch.ones_like(real))

    return coupled


class QueriesScaledTogether(ReferenceExecutor):
    """Quantizes the queries of a step by the largest of all rows, padding included."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend with quantized queries."""
        scale = query.abs().amax().clamp(min=1e-30)
        super().attend(layer, (query / scale * _LEVELS).round() / _LEVELS * scale, out, scoring, metadata)


def _scaled_together() -> Any:
    return RenamedReference(QueriesScaledTogether)


COUPLED_RUNNERS: tuple[Mutant, ...] = (
    Mutant(
        name="padding-in-the-scale",
        threads=("vllm#37442", "vllm#57017"),
        bug_class=BugClass.L,
        says="Rows are scaled by the largest element of the batch, rows of padding included, which may hold NaN",
        patch=patched((LayerCalls, "real", _all_real)),
    ),
    Mutant(
        name="padding-in-the-load",
        threads=("vllm#46428", "sglang#25852"),
        bug_class=BugClass.L,
        says="Rows of padding are cleared, and the router counts them all the same, so that experts seem to have more "
        "load",
        patch=patched((models, "coupled", _padding_counted)),
    ),
)

COUPLED_BACKENDS: tuple[Mutant, ...] = (
    Mutant(
        name="queries-scaled-together",
        threads=("vllm#40047", "flashinfer#3057"),
        bug_class=BugClass.L,
        says="Queries are quantized by the largest of all rows, so that padding decides the scale of real rows",
        backend=_scaled_together,
    ),
)
