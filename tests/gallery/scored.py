"""Mutants of class F that score otherwise in a graph: soft caps, sinks, scales."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.plugins.backend import Executor, Metadata, Reservation, Scoring
from capture_planner_reference.executor import ReferenceExecutor
from gallery.core import Mutant
from gallery.padding import RenamedReference


class ScoringOfFirstLayer(ReferenceExecutor):
    """Its graphs are made with the scoring of the layer that attended first."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._scoring: Scoring | None = None

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend with what was asked for first, in a graph."""
        self._scoring = self._scoring or scoring
        super().attend(layer, query, out, self._scoring if metadata.is_full else scoring, metadata)


class ScoringInGraphs(RenamedReference):
    """Changes the scoring of graphs."""

    def __init__(self, change: Callable[[Scoring, int], Scoring]) -> None:
        super().__init__()
        self._change = change

    def reserve(self, reservation: Reservation) -> Executor:
        """Make the executor of one group."""
        return _ChangedScoring(reservation, self._change)


class _ChangedScoring(ReferenceExecutor):
    def __init__(self, reservation: Reservation, change: Callable[[Scoring, int], Scoring]) -> None:
        super().__init__(reservation)
        self._change = change

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend with another scoring, in a graph."""
        if metadata.is_full:
            scoring = self._change(scoring, query.shape[2])
        super().attend(layer, query, out, scoring, metadata)


class SinksOfCapture(ReferenceExecutor):
    """Keeps the sinks of each layer in a buffer of its own."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._sinks: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend with the copy, in a graph."""
        if metadata.is_full and scoring.sinks is not None:
            sinks = self._sinks.setdefault(layer, scoring.sinks.clone())
            scoring = attrs.evolve(scoring, sinks=sinks)
        super().attend(layer, query, out, scoring, metadata)


F = BugClass.F
SCORED_MUTANTS = (
    Mutant(
        name="scoring-of-first-layer",
        threads=(),
        bug_class=F,
        says="Graphs bake in the scoring of the layer that attended first, its sinks too",
        backend=lambda: RenamedReference(ScoringOfFirstLayer),
    ),
    Mutant(
        name="softcap-not-captured",
        threads=(),
        bug_class=F,
        says="Graphs are captured before the soft cap is set, and score without it",
        backend=lambda: ScoringInGraphs(lambda scoring, dim: attrs.evolve(scoring, softcap=None)),
    ),
    Mutant(
        name="sinks-copied-at-capture",
        threads=(),
        bug_class=F,
        says="Graphs read a copy of the sinks that was made at capture, also after weights are reloaded",
        backend=lambda: RenamedReference(SinksOfCapture),
    ),
    Mutant(
        name="scale-of-the-head-dimension",
        threads=(),
        bug_class=F,
        says="Graphs scale by the root of the head dimension, whatever scale a layer asks for",
        backend=lambda: ScoringInGraphs(lambda scoring, dim: attrs.evolve(scoring, scale=1 / math.sqrt(dim))),
    ),
)
