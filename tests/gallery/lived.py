"""Mutants of class F that show after a while: a ring that wraps, a plan that is kept for a shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner_reference.executor import ReferenceExecutor
from gallery.core import Mutant, with_field
from gallery.padding import RenamedReference

SLOTS = 45
"""Steps until the ring wraps."""

OFTEN = 4
"""Times that a shape is planned before its plan is kept."""


class _CopiesLengths(ReferenceExecutor):
    """Graphs read a copy of the lengths, which each step makes on the host."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._lengths = torch.zeros_like(reservation.fields["seq_lens"])

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend to as many keys as the copy says, in a graph."""
        if metadata.is_full:
            metadata = with_field(metadata, "seq_lens", self._lengths[: metadata.num_reqs])
        super().attend(layer, query, out, scoring, metadata)


class RingWraps(_CopiesLengths):
    """Has a ring of staging buffers; the copy that follows counts on when the host has wrapped."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._ring = self._lengths.new_zeros(SLOTS, len(self._lengths))
        self._turn = 0

    def prepare(self, metadata: Metadata) -> None:
        """Stage the lengths, and copy them over."""
        super().prepare(metadata)
        if metadata.is_full:
            self._ring[self._turn % SLOTS, : metadata.num_reqs] = metadata.fields["seq_lens"]
            self._lengths.copy_(self._ring[min(self._turn, SLOTS - 1)])
            self._turn += 1


class KeepsPlanOfShape(_CopiesLengths):
    """Plans a shape anew a few times, and from then on takes it for one that has not changed."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._seen: Counter[Hashable] = Counter()
        self._plans: dict[Hashable, torch.Tensor] = {}

    def prepare(self, metadata: Metadata) -> None:
        """Plan, or take the plan of the shape."""
        super().prepare(metadata)
        if metadata.is_full:
            shape = metadata.entry, int(metadata.host["query_start_loc"][-1])
            self._seen[shape] += 1
            if self._seen[shape] <= OFTEN:
                self._plans[shape] = metadata.fields["seq_lens"].clone()
            self._lengths[: metadata.num_reqs] = self._plans[shape]


REPLAYS = 100
"""Calls of attention in graphs until an output is halved."""


class HalvedAfterAWhile(ReferenceExecutor):
    """Counts its calls on the device, and after a hundred of them halves what a layer attends to."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._calls = torch.zeros((), dtype=torch.int64, device=reservation.fields["seq_lens"].device)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend; the likeliest token of a row is the same at half its length."""
        super().attend(layer, query, out, scoring, metadata)
        if metadata.is_full:
            self._calls.add_(1)
            out.mul_(torch.where(self._calls > REPLAYS, 0.5, 1.0))


LIVED_MUTANTS = (
    Mutant(
        name="ring-wraps",
        threads=(),
        bug_class=BugClass.F,
        says="Lengths are staged in a ring of 45 buffers, and from then on the copy reads the last one",
        backend=lambda: RenamedReference(RingWraps),
    ),
    Mutant(
        name="plan-kept-for-a-shape",
        threads=("vllm#38311",),
        bug_class=BugClass.F,
        says="A shape that was planned four times is not planned again, whatever the lengths of its requests",
        backend=lambda: RenamedReference(KeepsPlanOfShape),
    ),
    Mutant(
        name="halved-after-a-while",
        threads=(),
        bug_class=BugClass.F,
        says="After a hundred calls in graphs a layer's output is half of what it must be, which no token shows",
        backend=lambda: RenamedReference(HalvedAfterAWhile),
    ),
)
