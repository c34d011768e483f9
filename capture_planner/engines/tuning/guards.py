"""Guards: what a proposal must not do, whatever it gains by the steps that were seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from capture_planner.analysis.lint import Finding, Severity, lint
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.emulation import CapturedGraph, Emulation
from capture_planner.engines.tuning.judgement import Evidence, Pricing
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import batches, extra_slots, kind_of, split_when
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Policy, Roles, Sizes, Spec
from capture_planner.records.text import counted

FindingKey = tuple[str, Role | None]
"""The code of a rule and the role that it is about."""

Lost = tuple[Batch, int, GraphMode, GraphMode]
"""A batch, the last extent that it stands for, its mode today, and its mode in the proposal."""

_RANK = {GraphMode.NONE: 0, GraphMode.PIECEWISE: 1, GraphMode.FULL: 2}


def finding_key(finding: Finding) -> FindingKey:
    """Return what makes a finding of two plans the same one."""
    return finding.rule.code, finding.diagnostic.role


def warnings_of(plan: Plan) -> tuple[Finding, ...]:
    """Return what ``check`` warns of in a plan; its notes are left out."""
    return tuple(each for each in lint(plan) if each.severity is not Severity.NOTE)


@attrs.frozen(kw_only=True)
class GraphGuard:
    """Batches that must keep the graph that they have today, besides decodes with full graphs."""

    decodes: bool = False
    """Decodes with a piecewise graph."""
    mixed: bool = False
    """Mixed batches."""

    @classmethod
    def of(cls, evidence: Evidence) -> GraphGuard:
        """Return what is kept: everything by the costs of another deployment, mixed batches where none was seen."""
        return cls(decodes=evidence.is_estimate, mixed=evidence.is_estimate or not evidence.has_prompts)


EVERY = GraphGuard(decodes=True, mixed=True)


def lost_graphs(today: Emulation, proposed: Emulation, kept: GraphGuard | None = None) -> tuple[str, ...]:
    """Return which batches lose their graph, or a full one, in sentences.

    Batches that an observation has no answer for are left out.
    """
    return tuple(_described(_lost(today, proposed, kept or GraphGuard())))


def lost_kinds(today: Emulation, proposed: Emulation, kept: GraphGuard) -> frozenset[tuple[Role, Kind]]:
    """Return the roles and kinds of the batches that lose their graph."""
    return frozenset((batch.role, batch.kind) for batch, *_ in _lost(today, proposed, kept))


def _lost(today: Emulation, proposed: Emulation, kept: GraphGuard) -> list[Lost]:
    lost: list[Lost] = []
    for role in [each for each in today.modes if each in proposed.modes]:
        for batch, last in _asked(today, proposed, role):
            # The dispatch of mixed batches is most of the work; skip it where they may lose graphs.
            if batch.kind is Kind.MIXED and not kept.mixed:
                continue
            before = today.dispatch(batch)
            counts = kept.decodes or batch.kind is Kind.MIXED or before.mode is GraphMode.FULL
            # What an observation does not know cannot be lost.
            if before.reason is Reason.UNKNOWN or not counts:
                continue
            after = proposed.dispatch(batch)
            if _RANK[after.mode] < _RANK[before.mode]:
                lost.append((batch, last, before.mode, after.mode))
    return lost


def _asked(today: Emulation, proposed: Emulation, role: Role) -> Iterator[tuple[Batch, int]]:
    """Yield the batches of a role that both admit; above the largest graph of both one represents all."""
    largest = max(
        (graph.entry.num_tokens for side in (today, proposed) for graph in side.graphs if graph.role is role), default=0
    )
    yield from batches(role, today, families=today.families(role), upto=largest)


SLOWER = 0.02
"""Least share by which a pass takes longer than today on a graph that pads it further, to be named."""


def slower_batches(today: Pricing, proposed: Pricing) -> tuple[str, ...]:
    """Return which batches that have a graph on both sides take longer than today, in sentences by class.

    They are padded further; whether the traffic has them or not.
    """
    found: dict[tuple[Role, Kind, int | None], list[tuple[float, int, float, float]]] = {}
    sides = today.deployment, proposed.deployment
    for role in [each for each in sides[0].modes if each in sides[1].modes]:
        for batch, _ in _asked(*sides, role):
            before, after = (side.dispatch(batch).entry for side in sides)
            # Batches that lose or gain a graph are for ``lost_graphs``; here is what padding costs the others.
            if before is None or after is None or after.num_tokens <= before.num_tokens:
                continue
            was, takes = (pricing.on(batch, entry) for pricing, entry in ((today, before), (proposed, after)))
            if takes > was * (1 + SLOWER):
                group = found.setdefault((role, batch.kind, batch.query_len), [])
                group.append((takes / was - 1, batch.extent(batch.kind), was, takes))
    return tuple(_slower(*kind, each) for kind, each in found.items())


def _slower(role: Role, kind: Kind, width: int | None, sizes: list[tuple[float, int, float, float]]) -> str:
    what, noun = ("mixed batches", "tokens") if kind is Kind.MIXED else (f"decodes of {width}", "requests")
    extents = [at for _, at, _, _ in sizes]
    share, at, was, takes = max(sizes)
    span = f"{counted(len(sizes), 'size')} of {min(extents)} to {max(extents)} {noun}"
    return (
        f"{role.value}, {what}: passes of {span} take longer on larger graphs, by up to {share:.0%}: at {at} "
        f"{takes:.3g} ms, not {was:.3g}"
    )


def _described(lost: list[Lost]) -> Iterator[str]:
    def apart(one: Lost, two: Lost) -> bool:
        return _class(one) != _class(two) or two[0].extent(two[0].kind) != one[1] + 1

    for run in split_when(apart, lost):
        batch, _, before, after = run[0]
        first, last = batch.extent(batch.kind), run[-1][1]
        span = f"{first}" if first == last else f"{first} to {last}"
        decode = f"decodes of {span} requests, query length {batch.query_len}"
        what = decode if batch.kind is Kind.DECODE else f"mixed batches of {span} tokens"
        now = "eager" if after is GraphMode.NONE else after.value
        yield f"{batch.role.value}: {what} have {before.value} graphs today and would run {now}"


def _class(lost: Lost) -> tuple[object, ...]:
    batch, _, before, after = lost
    return batch.role, batch.kind, batch.query_len, batch.active_loras, before, after


def shifted(steps: Mapping[Batch, int], deployment: Emulation) -> dict[Batch, int]:
    """Return the steps under twice the load: each batch has twice the requests and, with prompts, twice the tokens.

    Both end at the limits of the deployment. Decodes have as many tokens as the schedule gives so many requests.
    """
    limits, families = deployment.limits, deployment.families(Role.TARGET)
    found: dict[Batch, int] = {}
    for batch, count in steps.items():
        requests = min(2 * batch.num_reqs, limits.max_num_reqs)
        decodes = (
            Batch.decode(Role.TARGET, requests, family.query_len, min(batch.active_loras, requests))
            for family in families
            if requests in family.requests
        )
        own = next(decodes, None) if kind_of(batch, families) is Kind.DECODE else None
        if own is None:
            # A drafter may need rows of its own in the same batch, which bound the target's tokens.
            most = limits.max_num_tokens - requests * extra_slots(deployment)
            tokens = max(min(2 * batch.num_tokens, most), batch.num_tokens)
            own = attrs.evolve(batch, num_reqs=min(requests, tokens), num_tokens=tokens, query_len=None)
        found[own] = found.get(own, 0) + count
    return found


@attrs.frozen(kw_only=True)
class ShiftRegret:
    """Extra time of steps over a graph of every size if the load doubles: shares, by side."""

    today: float
    proposed: float
    gain: float
    """Share of today's time that the proposed side saves; below 0: it takes more."""


def few(sentences: tuple[str, ...], most: int = 2) -> str:
    """Return some sentences as one, and how many more there are."""
    rest = len(sentences) - most
    return "; ".join(sentences[:most]) + (f"; and {counted(rest, 'more')}" if rest > 0 else "")


def with_todays(spec: Spec, plan: Plan, today: Emulation, kept: GraphGuard) -> Spec | None:
    """Return the spec with the sizes of a plan, and today's of each role and kind in which it takes graphs away.

    None where it takes none away, and where the costs and the load say enough for it to do so.
    """
    # By own costs and a load with prompts the choice may stand as it is.
    if kept == GraphGuard():
        return None
    own = emulation_of(plan)
    lost = lost_kinds(today, own, kept)
    if not lost:
        return None
    sizes = {role: _explicit(role, own.graphs, today.graphs, lost) for role in own.modes}
    roles = {role.value: replace(spec.roles.of(role), sizes=sizes.get(role)) for role in Role if role.is_drafter}
    # Today's graphs run already, so a budget for new ones does not bound them.
    budget = replace(spec.budget, max_graphs=None, memory=None, seconds=None)
    target = sizes[Role.TARGET] or Sizes()
    return replace(spec, sizes=target, roles=Roles(target=spec.roles.target, **roles), budget=budget)


def _explicit(
    role: Role, graphs: tuple[CapturedGraph, ...], todays: tuple[CapturedGraph, ...], lost: frozenset[tuple[Role, Kind]]
) -> Sizes | None:
    found: dict[Kind, set[int]] = {Kind.DECODE: set(), Kind.MIXED: set()}
    for source, kinds in ((graphs, set(Kind)), (todays, {kind for each, kind in lost if each is role})):
        for graph in source:
            entry = graph.entry
            kind = Kind.MIXED if entry.query_len is None else Kind.DECODE
            if graph.role is role and kind in kinds:
                found[kind].add(entry.num_tokens // (entry.query_len or 1))
    tokens, reqs = (tuple(sorted(found[kind])) or None for kind in (Kind.MIXED, Kind.DECODE))
    return Sizes(policy=Policy.EXPLICIT, num_tokens=tokens, num_reqs=reqs) if tokens or reqs else None
