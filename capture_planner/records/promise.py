"""Promise: what a plan that measurements chose was expected to take when it was proposed.

It is a part of the plan (``Plan.promise``). An observation of an engine under the plan is checked against it
(``capture_planner_tuner.promises``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from capture_planner.errors import Problem
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import Count, Interval, Name, Share, Sum, field, record

MAX_PROMISED = 256
"""Most rows of one side of a promise: neighbours of one kind and mode are merged beyond it."""


@record
class PromisedSteps:
    """What the steps of some shapes were expected to take.

    Of the target, that is the time from the start of a step to the start of the next, drafting and the host's work
    included. Of a drafter, it is the time of its passes in a step.
    """

    role: Role = field("the role")
    query_len: Count | None = field("tokens of each request of a decode; None: mixed batches", default=None)
    first: Count = field("smallest extent: requests of a decode, tokens of a mixed batch")
    last: Count = field("largest extent")
    mode: GraphMode = field("FULL or PIECEWISE graphs; NONE: eager")
    milliseconds: Sum = field("mean time of a step")
    share: Share = field("share of the role's steps, in the traffic that the plan was judged on")

    def _problems(self) -> Iterator[Problem]:
        if self.last < self.first:
            yield Problem(path=("last",), message=f"must be at least first, {self.first}, got {self.last}")
        if self.mode not in (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL):
            yield Problem(path=("mode",), message=f"a pass runs PIECEWISE, FULL or NONE, not {self.mode.value}")


@record
class ExpectedSteps:
    """One side of a promise: what steps were expected to take."""

    mean_step_ms: Sum = field("mean time of a step until the next, in milliseconds")
    error_ms: Sum = field("standard error of that mean, from the costs, in milliseconds")
    rows: tuple[PromisedSteps, ...] = field("the same by role and shape", default=())

    def _problems(self) -> Iterator[Problem]:
        if len(self.rows) > MAX_PROMISED:
            yield Problem(path=("rows",), message=f"{len(self.rows)} rows, more than {MAX_PROMISED}")


@record
class Promise:
    """What a plan was expected to change, by costs that were measured on the engine itself."""

    costs: Name = field("program that the costs were measured on, with its version: vllm 0.33.0")
    steps: Annotated[int, Interval(1)] = field("steps that both sides were judged on")
    before: ExpectedSteps = field("the engine as it was observed")
    after: ExpectedSteps = field("the engine under the plan")

    @property
    def gain(self) -> float:
        """The share of the mean step that the plan was expected to save."""
        # Without steps the mean is 0.
        return 1 - self.after.mean_step_ms / self.before.mean_step_ms if self.before.mean_step_ms else 0.0
