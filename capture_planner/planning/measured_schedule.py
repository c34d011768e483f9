"""``speculative: {schedule: measured}``: from traffic and a profile to the ranges of a schedule, with the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate, takewhile

import attrs

from capture_planner.errors import PlanningError, Problem
from capture_planner.modes import Chain, GraphMode, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.draft_lengths import DraftLength, DraftProblem, Span, ranges, schedule
from capture_planner.planning.sizing.smoothing import smoothed
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Speculative
from capture_planner.records.plan import Decision
from capture_planner.records.spec import Spec
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount


@attrs.frozen
class ChosenSchedule:
    """The drafter with a schedule of concrete ranges, and how it was chosen."""

    speculative: Speculative
    decisions: tuple[Decision, ...]
    measurements: Measurements
    """With the traffic as the schedule makes it: what sizes are to be chosen by."""
    problem: DraftProblem
    spans: tuple[Span, ...]
    """The ranges, with the sizes that were chosen together with them."""


def choose_schedule(spec: Spec, modes: Mapping[Role, GraphMode], measurements: Measurements | None) -> ChosenSchedule:
    """Return the schedule of ``spec``, whose ``speculative.schedule`` is ``measured``.

    :param modes: the resolved mode of each role, with ``num_tokens`` drafts.
    :raises PlanningError: measurements are missing, or say too little about acceptance, batch sizes or times.
    """
    speculative = spec.speculative
    assert speculative is not None
    if measurements is None:
        remedy = "name their files in sizes: {policy: measured, traffic: FILE, profile: FILE}, or list the ranges"
        raise _refusal("schedule", "a measured schedule needs a traffic and a profile", remedy)
    traffic, costs = measurements.traffic, Costs(measurements.profile)
    shares, source = acceptance_of(speculative, traffic)
    tokens = tuple(accumulate(shares, initial=1.0))
    most = min(spec.limits.max_num_reqs, spec.limits.max_num_tokens // (1 + speculative.extra_slots))
    graphs, rule = _allowed(spec, modes)
    lengths = _lengths(spec, modes, costs, tokens, most)
    if graphs is not None and graphs < max(length.graphs for length in lengths):
        modes, graphs, rule = dict.fromkeys(modes, GraphMode.NONE), None, f"{rule} leaves no graphs for decodes"
        lengths = _lengths(spec, modes, costs, tokens, most)
    elif graphs is not None:
        rule = f"{rule} leaves {counted(graphs, 'graph')} for decodes"
    problem = DraftProblem(lengths, work_of(traffic, tokens, most), graphs)
    spans = schedule(problem)
    assumed = [
        "batch sizes are those of the traffic, though fewer requests run at once where each finishes sooner",
        "steps with prompts in them are not counted",
        *([rule] if rule else []),
        *_assumptions(costs, modes, speculative),
    ]
    acceptance = f"acceptance {', '.join(f'{share:.2f}' for share in shares)}, {source}"
    decisions = (
        _choice(problem, spans, speculative, acceptance),
        _decision("schedule-assumptions", "measured", "assumed", "; ".join(assumed)),
    )
    chosen = _concrete(speculative, spans, shares)
    if traffic is not None:
        measurements = attrs.evolve(measurements, traffic=rescheduled(traffic, chosen))
    return ChosenSchedule(chosen, decisions, measurements, problem, spans)


def acceptance_of(speculative: Speculative, traffic: Traffic | None) -> tuple[tuple[float, ...], str]:
    """Return the share of steps in which drafts 0 to i are accepted, by i up to K, and where it is from.

    Where steps drafted different numbers of tokens, later positions are of other steps than earlier ones; a share
    above the one before it is lowered to that.
    """
    if speculative.acceptance:
        return speculative.acceptance[: speculative.num_tokens], "as the spec gives it"
    counts = () if traffic is None else zip(traffic.drafted, traffic.accepted, strict=False)
    known = [min(accepted / drafted, 1.0) for drafted, accepted in takewhile(lambda pair: pair[0], counts)]
    if len(known) < speculative.num_tokens:
        has = counted(len(known), "position") if known else "no position"
        message = f"acceptance is known for {has}, and num_tokens is {speculative.num_tokens}"
        remedy = "give speculative.acceptance, lower num_tokens, or take traffic of an engine that drafts that many"
        raise _refusal("acceptance", message, remedy)
    return tuple(accumulate(known, min))[: speculative.num_tokens], "as the traffic has it"


def work_of(traffic: Traffic | None, tokens: tuple[float, ...], most: int) -> tuple[float, ...]:
    """Return the tokens that a request got while n ran, by n up to ``most``: ``[n - 1]``. Flat without traffic.

    A decode of query length q gave each request ``tokens[q - 1]``. Steps are smoothed as those of measured sizes are,
    so that batch sizes that the traffic has not met, or hardly, get the K that is best for them, and not any.
    """
    if traffic is None:
        return (1.0,) * most
    steps: dict[float, Counter[int]] = {}
    for batch in traffic.batches:
        num_reqs = _decode_requests(batch)
        if num_reqs is not None and num_reqs <= most:
            given = tokens[min(batch.query_len or len(tokens), len(tokens)) - 1]
            steps.setdefault(given, Counter())[num_reqs] += batch.count
    if not steps:
        message = "the traffic has no decode of the target whose number of requests it says"
        raise _refusal("schedule", message, "take traffic of a source that says it, such as an observation")
    total = sum(counts.total() for counts in steps.values())
    weights = [[given * weight for weight in smoothed(counts, most, total)] for given, counts in steps.items()]
    return tuple(map(sum, zip(*weights, strict=True)))[1:]


def rescheduled(traffic: Traffic, speculative: Speculative) -> Traffic:
    """Return the traffic as it would run with a schedule: the same work, in decodes of the length that it gives.

    A batch of n requests needs more steps where each gives fewer tokens. Counts of the drafter's passes are left out,
    since they follow the target's.

    :param speculative: with a concrete schedule, and the acceptance that it was chosen by.
    """
    tokens = tuple(accumulate(speculative.acceptance, initial=1.0))
    steps: dict[TrafficCount, float] = {}
    for batch in traffic.batches:
        if batch.role is not Role.TARGET:
            continue
        count: float = batch.count
        num_reqs = _decode_requests(batch)
        if num_reqs is not None:
            given = tokens[min(batch.query_len or len(tokens), len(tokens)) - 1]
            query_len = 1 + speculative.draft_tokens(num_reqs)
            count *= given / tokens[query_len - 1]
            batch = attrs.evolve(batch, num_reqs=num_reqs, num_tokens=num_reqs * query_len, query_len=query_len)
        shape = attrs.evolve(batch, count=1)
        steps[shape] = steps.get(shape, 0.0) + count
    batches = (attrs.evolve(shape, count=max(round(count), 1)) for shape, count in steps.items())
    return replace(traffic, batches=tuple(batches))


def _decode_requests(batch: TrafficCount) -> int | None:
    """Return the requests of a decode of the target; None for other batches, and where the source does not say."""
    if batch.role is not Role.TARGET or batch.past_prompt is False:
        return None
    if batch.query_len is None and not batch.past_prompt:
        return None
    if batch.num_reqs is None and batch.num_tokens is not None and batch.query_len is not None:
        return batch.num_tokens // batch.query_len
    return batch.num_reqs


def _allowed(spec: Spec, modes: Mapping[Role, GraphMode]) -> tuple[int | None, str]:
    """Return the most graphs of decodes, one left for each ladder of mixed batches, and the bound in words."""
    bounds, decodes = [], spec.budget.allowed_of(Kind.DECODE)
    if (bound := spec.budget.allowed_graphs()) is not None:
        mixed = [mode for role, mode in modes.items() if role is not Role.DRAFT_DECODE]
        bounds.append((max(bound[0] - sum(mode.mixed_mode is not GraphMode.NONE for mode in mixed), 0), bound[1]))
    if decodes is not None:
        bounds.append((decodes, "graphs.decode"))
    return min(bounds, default=(None, ""))


def _assumptions(costs: Costs, modes: Mapping[Role, GraphMode], speculative: Speculative) -> Iterator[str]:
    """Yield where a time was taken from, and how many others were taken from what is near."""
    first, *others = [*costs.assumptions([*dict.fromkeys(_families(modes, speculative))])] or [""]
    if first:
        yield first
    if others:
        yield f"the times of {counted(len(others), 'other kind')} of passes too are those of the nearest that it has"


def _families(modes: Mapping[Role, GraphMode], speculative: Speculative) -> Iterator[Family]:
    for k in range(speculative.num_tokens + 1):
        yield from (family for family, _ in _passes(modes, speculative, k))


def _passes(modes: Mapping[Role, GraphMode], speculative: Speculative, k: int) -> Iterator[tuple[Family, int]]:
    """Yield the families of the passes of a step with ``k`` drafts, each with how often it runs."""
    for role, mode in modes.items():
        if role is Role.DRAFT_DECODE and k < 2:
            continue
        decode = mode.decode_mode
        width = 1 + k + speculative.extra_slots * role.is_drafter
        query_len = None if decode is not GraphMode.NONE and not mode.is_separate else width
        if role is not Role.DRAFT_DECODE:
            yield (role, decode, query_len, None), 1
        elif speculative.chain is Chain.FUSED and k > 2 and decode is GraphMode.FULL:
            yield (role, decode, 1, k - 1), 1
        else:
            yield (role, decode, 1, None), k - 1


def _lengths(
    spec: Spec, modes: Mapping[Role, GraphMode], costs: Costs, tokens: tuple[float, ...], most: int
) -> tuple[DraftLength, ...]:
    """Return what each K gives and takes, for batches of up to ``most`` requests."""
    speculative, room = spec.speculative, spec.limits.max_num_tokens
    assert speculative is not None
    lengths = []
    for k in range(speculative.num_tokens + 1):
        counts = range(1, min(most, room // (1 + k + speculative.extra_slots)) + 1)
        if not counts:
            continue
        padded, exact, drafting, graphs = *([0.0] * len(counts) for _ in range(3)), 0
        for (role, mode, query_len, steps), times in _passes(modes, speculative, k):
            width = 1 if role is Role.DRAFT_DECODE else 1 + k + speculative.extra_slots * role.is_drafter
            captured = modes[role].is_separate
            graphs += captured
            family = (role, mode, query_len, steps)
            curve = costs.eager(role, query_len) if mode is GraphMode.NONE else costs.graph(family)
            target = padded if captured else exact
            for index, count in enumerate(counts):
                milliseconds = times * curve(count * width)
                target[index] += milliseconds
                drafting[index] += milliseconds * role.is_drafter
        for index, count in enumerate(counts):
            # Padding of hidden drafts counts as if it were not hidden.
            exact[index] += costs.profile.step(count, 0.0, drafting[index]) - drafting[index]
        lengths.append(DraftLength(k=k, tokens=tokens[k], padded=tuple(padded), exact=tuple(exact), graphs=graphs))
    return tuple(lengths)


def _concrete(speculative: Speculative, spans: tuple[Span, ...], shares: tuple[float, ...]) -> Speculative:
    """Return the drafter with the ranges of the spans: without a schedule, where one K of 1 or more does for all."""
    tiers = tuple((span.first, span.last, span.k) for span in ranges(spans))
    # A parallel pass is as wide as the most drafts, and what it takes was read at this width.
    largest = speculative.num_tokens if speculative.parallel_drafting else max(max(k for *_, k in tiers), 1)
    return replace(
        speculative,
        num_tokens=largest,
        schedule=() if len(tiers) == 1 and tiers[0][2] == largest else tiers,
        acceptance=shares,
    )


def _choice(problem: DraftProblem, spans: tuple[Span, ...], speculative: Speculative, acceptance: str) -> Decision:
    """Return the decision of the ranges: the rate of each, and what the best fixed K would give."""
    said = [
        f"{span.first} to {span.last} requests draft {span.k} ({_rate(problem, spans, span.first, span.last)})"
        for span in ranges(spans)
    ]
    message = ", ".join(said)
    fixed = problem.fixed()
    if fixed is not None:
        gain = problem.total(fixed) / problem.total(spans) - 1
        rate = _rate(problem, fixed, 1, problem.most)
        than = f"the best fixed number, {fixed[0].k} ({rate})"
        message += f"; it is {than}" if len(ranges(spans)) == 1 else f"; {gain:.1%} more than {than}"
    if not any(span.k for span in spans):
        message += "; the drafter's pass over the target's batch runs all the same, and not without speculative"
    after = ", ".join(f"{span.first}-{span.last}: {span.k}" for span in ranges(spans))
    sizes = f"with {counted(len(spans), 'size')}" if problem.graphs is not None else "with every batch size a size"
    return _decision("schedule-measured", f"up to {speculative.num_tokens}", after, f"{message}; {sizes}; {acceptance}")


def _rate(problem: DraftProblem, spans: tuple[Span, ...], first: int, last: int) -> str:
    inside = [span for span in spans if first <= span.first and span.last <= last]
    return f"{problem.work(first, last) / problem.total(inside) * 1e3:,.0f} tokens/s"


def _decision(rule: str, before: str, after: str, message: str) -> Decision:
    return Decision(rule=rule, before=before, after=after, role=Role.TARGET, message=message)


def _refusal(field: str, message: str, remedy: str) -> PlanningError:
    return PlanningError([Problem(path=("speculative", field), message=message, remedy=remedy)])
