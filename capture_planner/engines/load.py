"""Load: which of the batches that an engine allows are reached, by a traffic or with so many requests at once.

*Allowed* is a batch within the limits, however seldom. *Reached* is one that this load has. A finding about batches
that no load reaches costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs

from capture_planner.analysis.lint.core import Severity
from capture_planner.engines.check import EngineFinding, share
from capture_planner.engines.deployments import BatchAnswer, Run, walk
from capture_planner.engines.emulation import Emulation
from capture_planner.modes import Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import union
from capture_planner.records.text import counted, ranges_text
from capture_planner.records.traffic import Traffic, TrafficCount


@attrs.frozen(kw_only=True)
class EngineLoad:
    """What reaches an engine."""

    name: str
    """In words, behind "reached": ``with 64 requests at once``."""
    steps: Mapping[Kind, Mapping[int, int]] | None = None
    """Steps of the target by requests of decodes, and by tokens of other batches; None: not known."""
    most: int | None = None
    """Most requests in a batch; None: up to the limit."""

    @classmethod
    def at(cls, concurrency: int) -> EngineLoad:
        """Return the load of so many requests at once, on one data-parallel rank."""
        return cls(name=f"with {counted(concurrency, 'request')} at once", most=concurrency)

    @classmethod
    def of_traffic(cls, traffic: Traffic) -> EngineLoad:
        """Return the load of the target's steps of a traffic; those whose requests or tokens are not known are left."""
        steps: dict[Kind, Counter[int]] = {Kind.DECODE: Counter(), Kind.MIXED: Counter()}
        for each in traffic.batches:
            extent = _extent(each)
            if each.role is Role.TARGET and extent is not None:
                steps[_kind(each)][extent] += each.count
        return cls(name="by this traffic", steps=steps)

    @property
    def total(self) -> int:
        """Steps of the target."""
        return sum(sum(each.values()) for each in (self.steps or {}).values())

    def touched(self, runs: Sequence[Run]) -> int | None:
        """Return how many steps have one of the batches; None where steps are not known."""
        if self.steps is None:
            return None
        # Runs overlap: batches of one size have several adapters and query lengths.
        ends = {kind: union((run.first, run.last) for run in runs if run.batch.kind is kind) for kind in Kind}
        return sum(
            count
            for kind, counts in self.steps.items()
            for extent, count in counts.items()
            if any(first <= extent <= last for first, last in ends[kind])
        )

    def reaches(self, kind: Kind, first: int) -> bool:
        """Say whether so many requests can be in a batch; of other batches the tokens are not known."""
        return self.most is None or kind is Kind.MIXED or first <= self.most


def _kind(count: TrafficCount) -> Kind:
    # A source may not know the phase; a query length is then taken for a decode's.
    decode = count.past_prompt if count.past_prompt is not None else count.query_len is not None
    return Kind.DECODE if decode else Kind.MIXED


def _extent(count: TrafficCount) -> int | None:
    """Return requests of a decode, tokens of another batch, as findings count them."""
    if _kind(count) is Kind.MIXED:
        return count.num_tokens
    if count.num_reqs is not None or count.num_tokens is None:
        return count.num_reqs
    return count.num_tokens // (count.query_len or 1)


def ranked(findings: Sequence[EngineFinding], load: EngineLoad) -> tuple[EngineFinding, ...]:
    """Return findings with the steps that they touch, the most first; those not reached are notes, and last."""
    seen = [_seen(each, load) for each in findings]
    return tuple(each for _, each in sorted(seen, key=lambda one: one[0]))


def _seen(finding: EngineFinding, load: EngineLoad) -> tuple[tuple[int, int], EngineFinding]:
    """Return a finding under a load, with its place: those that touch steps, those about no batches, the others."""
    diagnosis = finding.diagnosis
    if diagnosis.concerns is None:
        return (1, 0), finding
    runs, severity = diagnosis.runs, diagnosis.severity
    steps = load.touched(runs)
    is_reached = steps != 0 and any(load.reaches(run.batch.kind, run.first) for run in runs)
    if not is_reached:
        says, place, severity = f"allowed, and not reached {load.name}", (2, 0), Severity.NOTE
    elif steps is not None:
        says, place = f"reached {load.name}: {share(steps, load.total)}", (0, -steps)
    else:
        says, place = f"reached {_up_to(runs, load)}{load.name}", (0, 0)
    total = None if steps is None else load.total
    told = attrs.evolve(diagnosis, message=f"{diagnosis.message}; {says}", severity=severity)
    return place, attrs.evolve(finding, diagnosis=told, steps=steps, total=total, is_reached=is_reached)


def _up_to(runs: Sequence[Run], load: EngineLoad) -> str:
    """Say which of the decodes are reached, where not all are."""
    decodes = [(run.first, run.last) for run in runs if run.batch.kind is Kind.DECODE]
    most = load.most
    if most is None or not decodes or max(last for _, last in decodes) <= most:
        return ""
    ends = [(first, min(last, most)) for first, last in union(decodes) if first <= most]
    return f"by decodes of {ranges_text(ends)} requests " if ends else ""


def reached_graphs(emulation: Emulation, load: EngineLoad) -> tuple[int, int]:
    """Return how many different graphs an engine captures, and how many of them the load reaches."""
    answers = (one for one in walk(emulation) if one.answer.entry is not None and _happens(one, load))
    reached = {(one.batch.role, one.answer.entry) for one in answers}
    return len({(graph.role, graph.entry) for graph in emulation.graphs}), len(reached)


def _happens(one: BatchAnswer, load: EngineLoad) -> bool:
    kind = one.batch.kind
    if load.steps is not None:
        return any(one.extent <= extent <= one.last for extent in load.steps[kind])
    return load.reaches(kind, one.batch.num_reqs if kind is Kind.DECODE else one.extent)


def load_text(emulation: Emulation, load: EngineLoad) -> str:
    """Say how many graphs the load reaches: ``12 of 51 graphs are reached with 8 requests at once``."""
    captured, reached = reached_graphs(emulation, load)
    beyond = ""
    if load.steps is not None:
        limits = emulation.limits
        bounds = {Kind.DECODE: limits.max_num_reqs, Kind.MIXED: limits.max_num_tokens}
        over = sum(
            count for kind, most in bounds.items() for extent, count in load.steps[kind].items() if extent > most
        )
        beyond = f"; {share(over, load.total)} are beyond the limits" if over else ""
    return f"{reached} of {counted(captured, 'graph')} are reached {load.name}{beyond}"
