"""Draft lengths: K by batch size and capture sizes, in one decision that gives the most accepted tokens per second.

The weights are work, not steps and not time. Requests need the same tokens whatever K is, and the traffic says at
which batch sizes those tokens were made. Steps and time at a batch size are not fixed: they depend on K. Given the
tokens of each n, W(n), the throughput is

    sum of W(n) / sum of W(n) / rate(n, K(n)),

and its numerator is a constant. So the ratio is largest where the time is least: a sum over batch sizes, which a
dynamic programme minimises exactly. With steps as weights both halves would depend on K.

Where requests finish sooner, fewer run at once; the schedule is best for the batch sizes of the traffic.

A size of a range is a graph of each role that has graphs: target and draft prefill run on the same padded batch
(vLLM 0.33: the draft prefill takes over the target's), and the draft decodes on the same number of requests.

``speculative: {schedule: measured}`` asks for it; the ranges become decisions of the target, with the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby, takewhile
from operator import mul

import attrs

from capture_planner.errors import PlanningError, Problem
from capture_planner.modes import Chain, GraphMode, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.measured.teams import smoothed
from capture_planner.planning.sizing.program import hull_walk
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import MAX_TIERS, Speculative
from capture_planner.records.plan import Decision
from capture_planner.records.spec import Spec
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount

NOISE = 0.02
"""A range is worth a change of K if the neighbour's K takes longer there by more than this."""

WIDTH = 16
"""Requests that a range spans at least to be worth a change of K, unless it gains ``SWITCH``."""

SWITCH = 0.01
"""Share of the time of all work: narrower ranges are worth a change of K only if they gain more together."""


@attrs.frozen(kw_only=True)
class DraftLength:
    """One K: the tokens and the time of its steps, by batch size. ``[n - 1]`` is about n requests."""

    k: int
    tokens: float
    """Tokens that a request gets of a step: 1 and the accepted drafts."""
    padded: tuple[float, ...]
    """Milliseconds of the passes that have graphs, at a size of n requests: non-decreasing."""
    exact: tuple[float, ...]
    """Milliseconds of all else, for n requests without padding."""
    graphs: int
    """Graphs of each size."""

    @property
    def most(self) -> int:
        """The largest batch that the limits admit with this K."""
        return len(self.padded)


@attrs.frozen(order=True)
class Span:
    """Batches of ``first`` to ``last`` requests, padded to ``last``, which draft ``k`` tokens."""

    first: int
    last: int
    k: int


@attrs.frozen
class DraftProblem:
    """The K and the sizes to choose from, and what batch sizes count for."""

    lengths: tuple[DraftLength, ...]
    """The K to choose from, ascending; at least one admits every batch size."""
    weights: tuple[float, ...]
    """Tokens that a request gets while n run, over all of the traffic: ``[n - 1]``."""
    graphs: int | None = None
    """Most graphs; None: every batch size may be a size. At least those of one size of any K."""

    @cached_property
    def sums(self) -> tuple[float, ...]:
        """The weight of all batches up to each size, from 0."""
        return (0.0, *accumulate(self.weights))

    @property
    def most(self) -> int:
        """The largest batch."""
        return len(self.weights)

    @property
    def graphs_of(self) -> Mapping[int, int]:
        """Graphs of each size, by K."""
        return {length.k: length.graphs for length in self.lengths}

    def cost(self, span: Span) -> float:
        """Return the milliseconds that the work of a span takes; infinite where the limits do not admit it."""
        length = next(each for each in self.lengths if each.k == span.k)
        # Each of its requests needs room for 1 + K tokens and the drafter's own rows.
        if span.last > length.most:
            return float("inf")
        padded = (self.sums[span.last] - self.sums[span.first - 1]) * length.padded[span.last - 1]
        counts = range(span.first - 1, span.last)
        return (padded + sum(self.weights[n] * length.exact[n] for n in counts)) / length.tokens

    def work(self, first: int, last: int) -> float:
        """Return the tokens that batches of ``first`` to ``last`` requests get."""
        return sum(n * self.weights[n - 1] for n in range(first, last + 1))

    def total(self, spans: Sequence[Span]) -> float:
        """Return the milliseconds of all work."""
        return sum(map(self.cost, spans))

    def num_graphs(self, spans: Sequence[Span]) -> int:
        """Return how many graphs the sizes of the spans need."""
        graphs = self.graphs_of
        return sum(graphs[span.k] for span in spans)

    def fixed(self) -> tuple[Span, ...] | None:
        """Return the spans of the K that is best for all batch sizes together; None where none admits them all."""
        whole = (length for length in self.lengths if length.most == self.most)
        choices = [optimum(attrs.evolve(self, lengths=(length,))) for length in whole]
        return min(choices, key=self.total, default=None)


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
        # Not one size of the longest drafts has its graphs, so all decodes run eager.
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
        *_assumptions(costs, modes, speculative, ranges(spans)),
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


def schedule(problem: DraftProblem) -> tuple[Span, ...]:
    """Return the spans to run: the optimum without ranges that are within noise, or a fixed K that is as good."""
    spans, fixed = _settled(problem, optimum(problem)), problem.fixed()
    return fixed if fixed is not None and problem.total(fixed) <= problem.total(spans) else spans


def optimum(problem: DraftProblem) -> tuple[Span, ...]:
    """Return the spans whose work takes least, within the graphs allowed; of equal ones those of the smaller K.

    Among spans that end in j with the same K, the time is linear in the weight before the span: a lower envelope of
    lines, whose best one only moves on as j grows, since larger sizes take no less time.
    """
    # With graphs for every size of any K nothing is padded, and each batch size has its own best K.
    needed = max(length.graphs for length in problem.lengths) * problem.most
    if problem.graphs is None or problem.graphs >= needed:
        single = ([Span(n, n, length.k) for length in problem.lengths] for n in range(1, problem.most + 1))
        return tuple(min(spans, key=lambda span: (problem.cost(span), span.k)) for spans in single)
    layers: list[list[float]] = []
    steps: list[list[tuple[int, DraftLength] | None]] = []
    for allowed in range(problem.graphs + 1):
        times, taken = _layer(problem, layers, allowed)
        layers.append(times)
        steps.append(taken)
    found, graphs, last = [], problem.graphs, problem.most
    while last:
        step = steps[graphs][last]
        assert step is not None, "one size of some K covers every batch"
        start, length = step
        found.append(Span(start + 1, last, length.k))
        graphs, last = graphs - length.graphs, start
    return tuple(reversed(found))


def _layer(
    problem: DraftProblem, layers: Sequence[list[float]], allowed: int
) -> tuple[list[float], list[tuple[int, DraftLength] | None]]:
    """Return the least time and the last span by batch size, with ``allowed`` graphs; ``layers``: times with fewer."""
    times = [0.0] + [float("inf")] * problem.most
    taken: list[tuple[int, DraftLength] | None] = [None] * (problem.most + 1)
    walks = []
    for length in problem.lengths:
        if length.graphs <= allowed:
            # A span without graphs follows batches of this very row, which is filled as the walk goes.
            before = layers[allowed - length.graphs] if length.graphs else times
            heights: list[float | None] = []
            walk = hull_walk(length.padded, problem.sums, heights, range(1, length.most + 1))
            exact = (0.0, *accumulate(map(mul, problem.weights, length.exact)))
            walks.append((length, before, heights, exact, walk))
    for last in range(1, problem.most + 1):
        for length, before, heights, exact, walk in walks:
            if last > length.most:
                continue
            start = last - 1
            heights.append(None if before[start] == float("inf") else before[start] * length.tokens - exact[start])
            found = next(walk)
            if found is not None:
                time = (found[0] + problem.sums[last] * length.padded[start] + exact[last]) / length.tokens
                if time < times[last]:
                    times[last], taken[last] = time, (found[1], length)
    return times, taken


def _settled(problem: DraftProblem, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return the spans with fewer changes of K: none of them gains less than ``NOISE`` over a neighbour's K.

    Ranges narrower than ``WIDTH`` are given up too, as far as all of that takes no more than ``SWITCH`` of the time.
    Gains are those over the optimum, so that all work takes longer than that by at most the sum of both.
    """
    least, graphs, settled = [problem.cost(span) for span in spans], problem.graphs_of, [*spans]
    while True:
        runs = [[*alike] for _, alike in groupby(range(len(spans)), key=lambda index: settled[index].k)]
        spare = float("inf") if problem.graphs is None else problem.graphs - problem.num_graphs(settled)
        room = sum(least) * (1 + SWITCH) - problem.total(settled)
        changes = []
        for before, run, after in zip([[], *runs], runs, [*runs[1:], []], strict=False):
            own = [settled[index] for index in run]
            for k in sorted({settled[near[0]].k for near in (before, after) if near}):
                if (graphs[k] - graphs[own[0].k]) * len(run) <= spare:
                    other = [attrs.evolve(span, k=k) for span in own]
                    time = problem.total(other)
                    loss = time / sum(least[index] for index in run) - 1
                    is_wide = own[-1].last - own[0].first + 1 >= WIDTH
                    gains = loss > NOISE and (is_wide or time - problem.total(own) > room)
                    changes.append((gains, loss, run[0], other))
        # The change that gains nothing and loses least, if any, comes first.
        gains, loss, first, other = min(changes, default=(True, float("inf"), 0, []))
        # Where there are more ranges than a schedule may have, even one that gains is given up.
        if gains and (len(runs) <= MAX_TIERS or loss == float("inf")):
            return tuple(settled)
        settled[first : first + len(other)] = other


def ranges(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the ranges of a schedule: neighbouring spans of one K as one."""
    joined = [list(alike) for _, alike in groupby(spans, key=lambda span: span.k)]
    return tuple(Span(alike[0].first, alike[-1].last, alike[0].k) for alike in joined)


def acceptance_of(speculative: Speculative, traffic: Traffic | None) -> tuple[tuple[float, ...], str]:
    """Return the share of steps in which drafts 0 to i are accepted, by i up to K, and where it is from."""
    if speculative.acceptance:
        return speculative.acceptance[: speculative.num_tokens], "as the spec gives it"
    counts = () if traffic is None else zip(traffic.drafted, traffic.accepted, strict=True)
    # Positions behind one that was never drafted have no share.
    known = [accepted / drafted for drafted, accepted in takewhile(lambda pair: pair[0], counts)]
    if len(known) < speculative.num_tokens:
        has = counted(len(known), "position") if known else "no position"
        message = f"acceptance is known for {has}, and num_tokens is {speculative.num_tokens}"
        remedy = "give speculative.acceptance, lower num_tokens, or take traffic of an engine that drafts that many"
        raise _refusal("acceptance", message, remedy)
    # Where steps drafted different numbers, later positions are of other steps, which may have accepted more.
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
            given = _given(batch, tokens)
            steps.setdefault(given, Counter())[num_reqs] += batch.count
    # Without a number of requests there is nothing to choose by.
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
            # The same tokens, in as many more steps as each gives fewer.
            query_len = 1 + speculative.draft_tokens(num_reqs)
            count *= _given(batch, tokens) / tokens[query_len - 1]
            batch = attrs.evolve(batch, num_reqs=num_reqs, num_tokens=num_reqs * query_len, query_len=query_len)
        shape = attrs.evolve(batch, count=1)
        steps[shape] = steps.get(shape, 0.0) + count
    # A batch that ran keeps a step where its count rounds to 0.
    batches = (attrs.evolve(shape, count=max(round(count), 1)) for shape, count in steps.items())
    return replace(traffic, batches=tuple(batches))


def _given(batch: TrafficCount, tokens: Sequence[float]) -> float:
    """Return the tokens that each request got of a decode; ``tokens`` are those of K drafts, by K."""
    return tokens[min(batch.query_len or len(tokens), len(tokens)) - 1]


def _decode_requests(batch: TrafficCount) -> int | None:
    """Return the requests of a decode of the target; None for other batches, and where the source does not say."""
    if batch.role is not Role.TARGET or batch.past_prompt is False:
        return None
    # Neither a length nor a phase: it may as well be a mixed batch.
    if batch.query_len is None and not batch.past_prompt:
        return None
    if batch.num_reqs is None and batch.num_tokens is not None and batch.query_len is not None:
        return batch.num_tokens // batch.query_len
    return batch.num_reqs


def _allowed(spec: Spec, modes: Mapping[Role, GraphMode]) -> tuple[int | None, str]:
    """Return the most graphs of decodes, one left for each ladder of mixed batches, and the bound in words."""
    bounds, decodes = [], spec.budget.allowed_of(Kind.DECODE)
    # Each ladder of mixed batches needs a graph of the same budget.
    if (bound := spec.budget.allowed_graphs()) is not None:
        mixed = [mode for role, mode in modes.items() if role is not Role.DRAFT_DECODE]
        bounds.append((max(bound[0] - sum(mode.mixed_mode is not GraphMode.NONE for mode in mixed), 0), bound[1]))
    if decodes is not None:
        bounds.append((decodes, "graphs.decode"))
    return min(bounds, default=(None, ""))


def _assumptions(
    costs: Costs, modes: Mapping[Role, GraphMode], speculative: Speculative, spans: Sequence[Span]
) -> Iterator[str]:
    """Yield where a time was taken from, how many others were taken from what is near, and which are bounds."""
    lengths = range(speculative.num_tokens + 1)
    families = dict.fromkeys(family for k in lengths for family, _, _ in _passes(modes, speculative, k))
    reached: dict[Family, int] = {}
    for span in spans:
        for family, _, width in _passes(modes, speculative, span.k):
            reached[family] = max(reached.get(family, 0), span.last * width)
    first, *others = [*costs.assumptions(list(families))] or [""]
    if first:
        yield first
    if others:
        yield f"the times of {counted(len(others), 'other kind')} of passes too are those of the nearest that it has"
    yield from costs.bounds(reached)


def _passes(modes: Mapping[Role, GraphMode], speculative: Speculative, k: int) -> Iterator[tuple[Family, int, int]]:
    """Yield the family of each pass of a step with ``k`` drafts, how often it runs, and its tokens per request."""
    for role, mode in modes.items():
        decode, width = mode.decode_mode, 1 + k + speculative.extra_slots * role.is_drafter
        if role is not Role.DRAFT_DECODE:
            # Decodes without a ladder of their own run on graphs of mixed batches.
            query_len = None if decode is not GraphMode.NONE and not mode.is_separate else width
            yield (role, decode, query_len, None), 1, width
        elif speculative.chain is Chain.FUSED and k > 2 and decode is GraphMode.FULL:
            yield (role, decode, 1, k - 1), 1, 1
        elif k > 1:
            yield (role, decode, 1, None), k - 1, 1


def _lengths(
    spec: Spec, modes: Mapping[Role, GraphMode], costs: Costs, tokens: tuple[float, ...], most: int
) -> tuple[DraftLength, ...]:
    """Return what each K gives and takes, for batches of up to ``most`` requests."""
    speculative, room = spec.speculative, spec.limits.max_num_tokens
    assert speculative is not None
    lengths = []
    for k in range(speculative.num_tokens + 1):
        # With more drafts fewer requests fit in the limit on tokens.
        counts = range(1, min(most, room // (1 + k + speculative.extra_slots)) + 1)
        if not counts:
            continue
        padded, exact, graphs = [0.0] * len(counts), [0.0] * len(counts), 0
        for family, times, width in _passes(modes, speculative, k):
            role, mode, query_len, chain = family
            captured = modes[role].is_separate
            graphs += captured
            curve = costs.eager(role, query_len) if mode is GraphMode.NONE else costs.graph(family)
            target = padded if captured else exact
            for index, count in enumerate(counts):
                target[index] += times * curve(count * width)
                exact[index] += times * (chain or 1) * costs.profile.expert_milliseconds(role, count * width)
        for index, count in enumerate(counts):
            exact[index] += costs.profile.step(count, 0.0)
        rising = tuple(accumulate(padded, max))  # the overhead of the host may fall as a size grows
        lengths.append(DraftLength(k=k, tokens=tokens[k], padded=rising, exact=tuple(exact), graphs=graphs))
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
