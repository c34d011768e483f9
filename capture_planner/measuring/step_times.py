"""Steps as an observed engine served them: the time of each kind until the next step, the host's work included."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import attrs

from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import grouped
from capture_planner.records.batch_space import decode_families
from capture_planner.records.observation import BatchCount, Observation, ObservedRole


@attrs.frozen(kw_only=True)
class StepTime:
    """Times of the steps of one kind."""

    mode: GraphMode
    """Graphs of the target's pass; NONE: eager."""
    query_len: int | None
    """Tokens of each request of a decode on a graph of its own, or eager; None: other batches."""
    size: int | None
    """Padded tokens of the graph; None: eager, or of several graphs."""
    first: int
    """Fewest tokens of a batch, without padding."""
    last: int
    """Most tokens of a batch."""
    steps: int
    measured: int
    """Number of steps that were measured."""
    mean_ms: float
    """Mean of the steps that were measured, each shape with its steps."""
    error_ms: float
    """Standard error of the mean; infinite where one step alone was measured."""

    @property
    def kind(self) -> tuple[GraphMode, int | None]:
        """Mode and query length, as an ``Overhead`` has them."""
        return self.mode, self.query_len


@attrs.frozen(kw_only=True)
class StepTimes:
    """Times of the steps of an observation, the host's work included."""

    mean_ms: float
    """Mean over all steps; a step of an unmeasured shape counts as the mean of its kind."""
    error_ms: float
    """Standard error of that mean."""
    steps: int
    """Number of steps in the mean: those of measured kinds."""
    unmeasured: int
    """Steps of kinds of which none was measured."""
    kinds: tuple[StepTime, ...]
    """By mode and query length, those that took the most time first."""
    rows: tuple[StepTime, ...]
    """By mode, query length and graph; eager ones by powers of two of tokens. Those that took the most time first."""


def step_times(observation: Observation) -> StepTimes:
    """Return what the steps of the target took until the next; raises ``CapturePlannerError`` without intervals."""
    target = next((role for role in observation.roles if role.role is Role.TARGET), None)
    counts = () if target is None else [count for count in target.batches if count.num_tokens]
    if target is None or not any(count.interval for count in counts):
        raise CapturePlannerError(
            f"the observation of {observation.engine} has no times between steps; observe the engine while it serves, "
            "with this release of the plugin"
        )
    lengths = decode_lengths(observation)

    def kind(count: BatchCount) -> tuple[GraphMode, int | None]:
        return kind_of_step(target, count, lengths)

    def row(count: BatchCount) -> tuple[Any, ...]:
        size = None if count.graph is None else target.graphs[count.graph].entry.num_tokens
        return *kind(count), size, (count.num_tokens - 1).bit_length() if size is None else 0

    kinds = _grouped(target, counts, kind, lengths)
    steps = sum(each.steps for each in kinds)
    return StepTimes(
        mean_ms=sum(each.mean_ms * each.steps for each in kinds) / steps,
        # A kind of one step has no error, and would make that of all infinite.
        error_ms=math.hypot(*(each.error_ms * each.steps for each in kinds if math.isfinite(each.error_ms))) / steps,
        steps=steps,
        unmeasured=sum(count.steps for count in counts) - steps,
        kinds=kinds,
        rows=_grouped(target, counts, row, lengths),
    )


def decode_lengths(observation: Observation) -> frozenset[int]:
    """Return the query lengths of the target's decodes."""
    return frozenset(family.query_len for family in decode_families(Role.TARGET, observation))


def kind_of_step(target: ObservedRole, count: BatchCount, lengths: Collection[int]) -> tuple[GraphMode, int | None]:
    """Return how a batch of the target ran, as an ``Overhead`` has it: mode and query length.

    :param lengths: ``decode_lengths``; an eager batch of another length counts as a mixed one.
    """
    if count.graph is not None:
        entry = target.graphs[count.graph].entry
        return entry.mode, entry.query_len
    return GraphMode.NONE, count.query_len if count.past_prompt and count.query_len in lengths else None


def _grouped(
    target: ObservedRole, counts: Iterable[BatchCount], key: Callable[[BatchCount], Any], lengths: Collection[int]
) -> tuple[StepTime, ...]:
    found = []
    for alike in grouped(counts, key).values():
        timed = [count for count in alike if count.interval]
        if not timed:
            continue
        mode, query_len = kind_of_step(target, alike[0], lengths)
        sizes = {None if count.graph is None else target.graphs[count.graph].entry.num_tokens for count in alike}
        weight = sum(count.steps for count in timed)
        found.append(
            StepTime(
                mode=mode,
                query_len=query_len,
                size=sizes.pop() if len(sizes) == 1 else None,
                first=min(count.num_tokens for count in alike),
                last=max(count.num_tokens for count in alike),
                steps=sum(count.steps for count in alike),
                # Files without ``intervals`` have a median of samples in place of the mean.
                measured=sum(count.intervals or count.samples for count in timed),
                mean_ms=sum((count.interval or 0.0) * count.steps for count in timed) / weight,
                error_ms=_error(timed),
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.mean_ms * each.steps, str(each))))


def _error(timed: Sequence[BatchCount]) -> float:
    """Return the standard error of the mean of shapes, each with its steps."""
    known = [(max(count.intervals, 1), count.interval or 0.0, count.interval_error or 0.0) for count in timed]
    number = sum(steps for steps, _, _ in known)
    if number < 2:
        return math.inf
    mean = sum(steps * time for steps, time, _ in known) / number
    # The squared distances of a shape's steps from its mean, by its standard error.
    squares = sum(error**2 * n * (n - 1) + n * (time - mean) ** 2 for n, time, error in known)
    spread = math.sqrt(squares / (number - 1))
    # A shape of which one step was measured has the spread of all steps of its kind.
    errors = (
        count.steps * (spread / math.sqrt(max(count.intervals, 1)) if count.interval_error is None else error)
        for count, (_, _, error) in zip(timed, known, strict=True)
    )
    return math.hypot(*errors) / sum(count.steps for count in timed)
