"""The numbers of a run: what was captured, what served each forward, how long it took."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Entry
from capture_planner.report.writing import MODES
from capture_planner.runtime.ledger import Accounts, Forward, GraphCapture, RunReport, Step


@attrs.frozen(kw_only=True)
class Percentiles:
    """Percentiles by nearest rank: the smallest value that so many percent of the values do not exceed."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles | None:
        """Return the percentiles of values in any order and unit; None where there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (nearest_rank(ordered, percent) for percent in (50, 90, 99))
        return cls(count=len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1])


def nearest_rank(ordered: Sequence[float], percent: int) -> float:
    """Return a percentile (1 to 100) of at least one value, in ascending order."""
    return ordered[-(-percent * len(ordered) // 100) - 1]


@attrs.frozen(kw_only=True)
class CapturedKind:
    """The captured graphs of one role and mode."""

    role: Role
    mode: GraphMode
    graphs: int
    seconds: float
    memory: int
    """Bytes by which they grew their pool."""
    alone: int
    """Bytes that they would take in pools of their own, added up."""
    driver: int
    """Bytes of the device that they took outside the allocator."""
    largest: Entry
    smallest: Entry


@attrs.frozen(kw_only=True)
class ServedMode:
    """The forwards of a role that ran in one mode. Rows are summed over them."""

    mode: GraphMode
    forwards: int
    share: float
    """Of the role's forwards: the hit rate of the mode. 0 where the role had no forward."""
    real_tokens: int
    padded_tokens: int
    real_reqs: int
    padded_reqs: int

    @property
    def token_padding(self) -> float:
        """The share of the computed token rows that is padding."""
        return padding(self.real_tokens, self.padded_tokens)

    @property
    def request_padding(self) -> float:
        """The share of the request rows that is padding; 0 for PIECEWISE, which does not pad requests."""
        return padding(self.real_reqs, self.padded_reqs)


def padding(real: int, padded: int) -> float:
    """Return the padded share of ``real + padded`` rows; 0 where there are no rows."""
    return padded / (real + padded) if padded else 0.0


@attrs.frozen(kw_only=True)
class ServedRole:
    """What served the forwards of one role."""

    role: Role
    forwards: int
    modes: tuple[ServedMode, ...]
    """FULL, PIECEWISE and NONE, in that order."""
    decodes: int
    """Forwards whose batch was a uniform decode."""
    covered: int
    """Decodes that a graph served."""


@attrs.frozen(kw_only=True)
class Fallback:
    """Eager forwards of one role, reason and shape."""

    role: Role
    reason: Reason | None
    num_reqs: int
    num_tokens: int
    query_len: int | None
    forwards: int


@attrs.frozen(kw_only=True)
class GraphUse:
    """One captured graph, and how many forwards it served."""

    graph: GraphCapture
    forwards: int


@attrs.frozen(kw_only=True)
class Acceptance:
    """What became of the draft tokens."""

    drafted: int
    accepted: int
    decodes: int
    """Requests past their prompt, summed over the steps that verified drafts."""

    @property
    def rate(self) -> float | None:
        """Accepted draft tokens by drafted ones; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def length(self) -> float | None:
        """Tokens that a decode gained in a step that verified drafts: those accepted and one more."""
        return 1 + self.accepted / self.decodes if self.decodes else None


@attrs.frozen(kw_only=True)
class Latency:
    """Percentiles in seconds; each is None where nothing was measured."""

    first_token: Percentiles | None
    """From the queue to the first token, by request."""
    per_token: Percentiles | None
    """Time of an output token after the first, the mean of each finished request with two or more."""
    finished: Percentiles | None
    """From the queue to the last token, by finished request."""
    step: Percentiles | None
    forward_host: Percentiles | None
    """Host time of a forward: dispatch, fill, padding, backend preparation and guards."""


@attrs.frozen(kw_only=True)
class RunSummary:
    """The numbers of one run. Bytes and seconds; a fused or repeated forward counts as its repeats."""

    planned: int
    """Graphs that the plan wanted."""
    captured: tuple[CapturedKind, ...]
    dropped: tuple[GraphCapture, ...]
    """Graphs that could not be captured."""
    accounts: Accounts | None
    """Where the device's memory went during capture; None where no device was read."""
    later: int | None
    """Bytes that the device lost from the last capture to the end of serving; None: as above."""
    served_from: tuple[ServedRole, ...]
    fallbacks: tuple[Fallback, ...]
    """All of them, the most frequent first."""
    graphs: tuple[GraphUse, ...]
    """Every captured graph, the most used first."""
    acceptance: Acceptance | None
    """None where the plan has no drafter."""
    latency: Latency
    output_tokens: int
    tokens_per_second: float | None
    finished: int
    cut_off: int

    @property
    def unused(self) -> tuple[GraphCapture, ...]:
        """Captured graphs that served no forward, in capture order."""
        return tuple(used.graph for used in self.graphs if not used.forwards)


def summary(report: RunReport) -> RunSummary:
    """Return the numbers of a run, of any length: also of one that stopped before anything ran."""
    captured = [graph for graph in report.captured if graph.waiver is None]
    output_tokens = sum(request.output_tokens for request in report.served)
    finished = sum(request.finished is not None for request in report.served)
    return RunSummary(
        planned=report.plan.num_graphs,
        captured=tuple(_captured(captured)),
        dropped=tuple(graph for graph in report.captured if graph.waiver is not None),
        accounts=Accounts.of(report.captured),
        later=_later(report),
        served_from=tuple(_served_from(report)),
        fallbacks=_fallbacks(report.forwards),
        graphs=_used(captured, report.forwards),
        acceptance=None if report.plan.speculative is None else _acceptance(report.steps),
        latency=_latency(report),
        output_tokens=output_tokens,
        tokens_per_second=output_tokens / report.serve_seconds if report.serve_seconds > 0 else None,
        finished=finished,
        cut_off=len(report.served) - finished,
    )


def size(entry: Entry) -> tuple[int, int, int, int]:
    """Return what entries are ordered by where they are shown by size."""
    return entry.num_tokens, entry.num_reqs or 0, entry.active_loras, entry.draft_steps or 0


def _captured(graphs: Sequence[GraphCapture]) -> Iterable[CapturedKind]:
    for role, mode in product(Role, MODES):
        kind = [graph for graph in graphs if graph.role is role and graph.entry.mode is mode]
        if kind:
            entries = sorted((graph.entry for graph in kind), key=size)
            yield CapturedKind(
                role=role,
                mode=mode,
                graphs=len(kind),
                seconds=math.fsum(graph.seconds for graph in kind),
                memory=sum(graph.memory for graph in kind),
                alone=sum(graph.alone for graph in kind),
                driver=sum(graph.driver for graph in kind),
                largest=entries[-1],
                smallest=entries[0],
            )


def _later(report: RunReport) -> int | None:
    readings = report.captured[-1].readings if report.captured else None
    return report.served_reading.used - readings[-1].used if report.served_reading and readings else None


def _served_from(report: RunReport) -> Iterable[ServedRole]:
    for role in Role:
        forwards = [forward for forward in report.forwards if forward.role is role]
        if forwards or any(role_plan.role is role for role_plan in report.plan.roles):
            decodes = [forward for forward in forwards if forward.query_len is not None]
            total = _total(forwards)
            yield ServedRole(
                role=role,
                forwards=total,
                modes=tuple(_served_mode(mode, [f for f in forwards if f.mode is mode], total) for mode in MODES),
                decodes=_total(decodes),
                covered=_total(forward for forward in decodes if forward.entry is not None),
            )


def _total(forwards: Iterable[Forward], name: str | None = None) -> int:
    """Return how many forwards they are with their repeats, or the sum of a property over them."""
    return sum(forward.repeats * (1 if name is None else getattr(forward, name)) for forward in forwards)


def _served_mode(mode: GraphMode, forwards: Sequence[Forward], of_role: int) -> ServedMode:
    return ServedMode(
        mode=mode,
        forwards=_total(forwards),
        share=_total(forwards) / of_role if of_role else 0.0,
        real_tokens=_total(forwards, "num_tokens"),
        padded_tokens=_total(forwards, "padded_tokens"),
        real_reqs=_total(forwards, "num_reqs"),
        padded_reqs=_total(forwards, "padded_reqs"),
    )


def _fallbacks(forwards: Iterable[Forward]) -> tuple[Fallback, ...]:
    names = ("role", "reason", "num_reqs", "num_tokens", "query_len")
    counts: Counter[tuple[Any, ...]] = Counter()
    for forward in forwards:
        if forward.entry is None:
            counts[tuple(getattr(forward, name) for name in names)] += forward.repeats
    return tuple(Fallback(**dict(zip(names, key, strict=True)), forwards=count) for key, count in counts.most_common())


def _used(captured: Sequence[GraphCapture], forwards: Iterable[Forward]) -> tuple[GraphUse, ...]:
    uses: Counter[tuple[Role, Entry]] = Counter()
    for forward in forwards:
        if forward.entry is not None:
            uses[forward.role, forward.entry] += forward.repeats
    # Of an entry that a plan lists twice (lint finds it), the later capture replaced the earlier one.
    latest = {(graph.role, graph.entry): graph for graph in captured}
    used = [
        GraphUse(graph=graph, forwards=uses[key] if latest[key] is graph else 0)
        for graph in captured
        for key in [(graph.role, graph.entry)]
    ]
    return tuple(sorted(used, key=lambda graph: -graph.forwards))


def _acceptance(steps: Iterable[Step]) -> Acceptance:
    verified = [step for step in steps if step.drafted]
    return Acceptance(
        drafted=sum(step.drafted for step in verified),
        accepted=sum(step.accepted for step in verified),
        decodes=sum(step.num_reqs - step.prompts for step in verified),
    )


def first_token_times(report: RunReport) -> list[float]:
    """Return each request's time to its first token, in seconds."""
    return [request.first_token for request in report.served if request.first_token is not None]


def per_token_times(report: RunReport) -> list[float]:
    """Return each finished request's mean time of a token after the first, in seconds."""
    return [
        (request.finished - request.first_token) / (request.output_tokens - 1)
        for request in report.served
        if request.finished is not None and request.first_token is not None and request.output_tokens > 1
    ]


def _latency(report: RunReport) -> Latency:
    host = (forward.host_seconds / forward.repeats for forward in report.forwards for _ in range(forward.repeats))
    return Latency(
        first_token=Percentiles.of(first_token_times(report)),
        per_token=Percentiles.of(per_token_times(report)),
        finished=Percentiles.of(request.finished for request in report.served if request.finished is not None),
        step=Percentiles.of(step.seconds for step in report.steps),
        forward_host=Percentiles.of(host),
    )
