"""Demand: the ladder of each pass, what waived passes cost, and which graphs serve them instead."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import Steps, passes_of
from capture_planner.planning.measured.teams import (
    NANO,
    UNKNOWN,
    Demand,
    Team,
    eager_of,
    prior_share,
    problem_of,
    serves,
    smoothed,
    waived,
)
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.program import TAIL
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import Domain
from capture_planner.records.model import Method, Speculative
from capture_planner.records.profile import CostCurve
from capture_planner.records.spec import Limits, Spec
from support.measured import MODEL, profile

TARGET, PREFILL, DECODE = Role.TARGET, Role.DRAFT_PREFILL, Role.DRAFT_DECODE


def ladder(role: Role, kind: Kind = Kind.DECODE, *, last: int = 8, **named: object) -> Ladder:
    """Return a ladder without sizes, of counts up to ``last``."""
    known: dict[str, object] = {
        "mode": GraphMode.FULL,
        "query_len": (1 if role is DECODE else 3) if kind is Kind.DECODE else None,
        "domain": Domain.upto(last),
        "sizes": (),
        "max_num_reqs": 8,
    }
    return Ladder(role=role, kind=kind, **known | named)  # type: ignore[arg-type]


def team(*ladders: Ladder, weights: tuple[int, ...] = (0, 1)) -> Team:
    return Team(ladders=ladders, weights=weights, passes=1)


CHAIN, SINGLE = team(ladder(DECODE, draft_steps=2)), team(ladder(DECODE))
BOTH, ALONE = team(ladder(TARGET), ladder(PREFILL)), team(ladder(TARGET))
MIXED, MIXED_BOTH = team(ladder(TARGET, Kind.MIXED)), team(ladder(TARGET, Kind.MIXED), ladder(PREFILL, Kind.MIXED))
TEAMS = {"chain": CHAIN, "single": SINGLE, "both": BOTH, "alone": ALONE, "mixed": MIXED, "mixed both": MIXED_BOTH}
SERVES = {("single", "chain"), ("mixed", "alone"), ("mixed", "both"), ("mixed both", "both")}


@pytest.mark.parametrize(("name", "decodes"), [*product(TEAMS, TEAMS)])
def test_mixed_graphs_serve_decodes_of_their_roles_and_single_steps_a_chain(name: str, decodes: str) -> None:
    """Nothing else serves what has no graph of its own."""
    assert serves(TEAMS[name], TEAMS[decodes]) == ((name, decodes) in SERVES)


@st.composite
def deployments(draw: st.DrawFn) -> tuple[Spec, list[Ladder]]:
    """Draw a deployment with some of its ladders; drafts of eight requests may be fewer."""
    k = draw(st.sampled_from((0, 1, 3, 4)))
    speculative = Speculative(method=Method.EAGLE3, num_tokens=k) if k else None
    limits = Limits(max_num_reqs=8, max_num_tokens=48)
    spec = Spec(model=MODEL, limits=limits, mode=GraphMode.FULL, backend="alpha", speculative=speculative)
    mode = draw(st.sampled_from((GraphMode.FULL, GraphMode.PIECEWISE)))
    last = draw(st.integers(1, 8))
    every = []
    for role in spec.active_roles:
        if role is DECODE:
            every.append(ladder(role, last=last, draft_steps=draw(st.sampled_from((None, max(k - 1, 1))))))
        else:
            every.append(ladder(role, last=last, query_len=1 + k))
            every.append(ladder(role, Kind.MIXED, last=draw(st.integers(1, 48)), mode=mode, max_num_reqs=last))
    return spec, [each for each in every if draw(st.integers(0, 3))]


@st.composite
def batches(draw: st.DrawFn, spec: Spec) -> Batch:
    number = draw(st.integers(1, 8))
    each = 1 + (spec.speculative.num_tokens if spec.speculative else 0)
    if draw(st.booleans()):
        return Batch.decode(TARGET, number, each)
    return Batch.mixed(TARGET, number, draw(st.integers(number, 48)))


def fits(each: Ladder, batch: Batch, repeats: int) -> bool:
    """Say whether a ladder's largest size has room for a batch."""
    last = each.domain.intervals[-1][1]
    if each.kind is Kind.DECODE:
        alike = batch.uniform_query_len == each.query_len and each.draft_steps in (None, repeats)
        return alike and batch.num_reqs <= last
    return batch.num_tokens <= last and (each.mode is GraphMode.PIECEWISE or batch.num_reqs <= each.max_num_reqs)


@settings(max_examples=max(settings.default.max_examples, 40))
@given(deployments(), st.booleans(), st.data())
def test_each_pass_counts_at_its_own_decodes_or_at_mixed_batches(
    drawn: tuple[Spec, list[Ladder]], by_request: bool, data: st.DataObject
) -> None:
    """Decodes before mixed batches; a chain in one graph is one pass; what fits nowhere is unserved. A step counts
    once, or once for each of its requests.
    """
    spec, ladders = drawn
    counts = data.draw(st.dictionaries(batches(spec), st.integers(1, 9) | st.integers(300, 900), max_size=4))
    tail = data.draw(st.none() | batches(spec))
    demand = Demand(Steps(counts), spec, ladders, "token" if by_request else "mean")
    weights_of = {batch: count * (batch.num_reqs if by_request else 1) for batch, count in counts.items()}
    passes: Counter[Ladder] = Counter()
    if tail is not None:
        demand.add_tail(tail)
    observed: dict[Ladder, Counter[int]] = {each: Counter() for each in ladders}
    heavy: dict[Ladder, Counter[int]] = {each: Counter() for each in ladders}
    unserved = []
    for batch, count, into in [*((batch, count, observed) for batch, count in weights_of.items()), (tail, TAIL, heavy)]:
        for each, repeats in passes_of(batch, spec) if batch is not None else ():
            own = [one for one in ladders if one.role is each.role and fits(one, each, repeats)]
            own.sort(key=lambda one: one.kind is Kind.MIXED)
            if own:
                amount = each.num_reqs if own[0].kind is Kind.DECODE else each.num_tokens
                number = repeats if own[0].draft_steps is None else 1
                into[own[0]][amount] += count * number
                if into is observed and batch is not None:
                    passes[own[0]] += counts[batch] * number
            elif into is observed:
                unserved.append((each, repeats, count))
    assert demand.unserved == unserved
    assert demand.total == sum(weights_of.values())
    for each in ladders:
        assert demand.passes[each] == passes[each]
        assert by_request or passes[each] == observed[each].total()
        alike = [one for one in ladders if one.role is each.role]
        decodes = [one for one in alike if one.kind is Kind.DECODE]
        # The flat part of mixed batches is the decodes' where the role had none, and part of it if they are few.
        mixed = [one for one in alike if one not in decodes]
        many = sum(passes[one] for one in mixed)
        part = 1 - 100 * Fraction(sum(passes[one] for one in decodes), max(many, 1))
        flat = {one: part * Fraction(3, 4) * prior_share(passes[one]) * observed[one].total() for one in mixed}
        moved = -flat[each] if each in mixed else sum(flat.values()) / len(decodes)
        unseen = bool(decodes) and many > 0 and part > 0
        last, total = each.domain.intervals[-1][1], sum(weights_of.values())
        weights = smoothed(observed[each], last, total, passes[each], given=float(moved) if unseen else 0.0)
        for amount, weight in heavy[each].items():
            weights[amount] += weight
        assert demand.team((each,)) == Team(ladders=(each,), weights=tuple(weights), passes=passes[each])


def costs_of(*, eager: bool = True) -> Costs:
    """Return times of n milliseconds and a half for graphs of n tokens, of ten times as many eager."""
    modes = ((GraphMode.FULL, 1.0), (GraphMode.NONE, 10.0)) if eager else ((GraphMode.FULL, 1.0),)
    curves = tuple(
        CostCurve(role=role, mode=mode, tokens=(1, 100), milliseconds=(1.5 * factor, 100.5 * factor))
        for role in Role
        for mode, factor in modes
    )
    return Costs(replace(profile(), curves=curves))


@given(st.lists(st.integers(0, 5), min_size=9, max_size=9), st.integers(0, 8), st.booleans(), st.booleans())
def test_waived_passes_cost_their_eager_times(weights: list[int], last: int, least: bool, chain: bool) -> None:
    """Only those beyond what others may serve; at least, what the others' replays cost where that is less."""
    decodes = team(ladder(DECODE, draft_steps=2 if chain else None), weights=(0, *weights[1:]))
    others = [team(ladder(DECODE, last=last))] if last else []
    expected = 0
    for count, weight in enumerate(weights[1:], 1):
        eager = round((count + 0.5) * 10 * NANO) * (2 if chain else 1)
        if count > last:
            expected += weight * eager
        elif least:
            expected += weight * min(round((count + 0.5) * NANO) * (2 if chain else 1), eager)
    assert waived(decodes, others, costs_of(), least=least) == expected


def test_waived_decodes_without_eager_times_cost_more_than_anything() -> None:
    assert waived(SINGLE, [], costs_of(eager=False)) == UNKNOWN
    assert UNKNOWN > TAIL * 10**30
    assert eager_of(SINGLE.ladders[0], costs_of(eager=False)) is None
    assert eager_of(SINGLE.ladders[0], costs_of()) is not None
    assert eager_of(MIXED.ladders[0], costs_of()) is not None


@given(st.lists(st.integers(0, 5), min_size=9, max_size=9), st.integers(1, 3), st.integers(0, 8), st.booleans())
def test_sizes_of_a_team_cost_the_graphs_of_all_its_ladders(
    weights: list[int], step: int, anchor: int, mixed: bool
) -> None:
    """Each size with the weights of its counts; decodes are served to the last, mixed batches to their anchors."""
    kind = Kind.MIXED if mixed else Kind.DECODE
    domain = Domain(((1, 8),), step)
    anchors = (anchor,) if mixed and anchor else ()
    ladders = [attrs.evolve(ladder(role, kind), domain=domain, anchors=anchors) for role in (TARGET, PREFILL)]
    own = team(*ladders, weights=(0, *weights[1:]))
    problem = problem_of(own, costs_of())
    unit = 1 if mixed else 3
    sizes = sorted({-(-count // step) * step for count in range(1, 9)})
    assert problem.sizes == tuple(sizes)
    assert problem.times == tuple(2 * round((size * unit + 0.5) * NANO) for size in sizes)
    sums = [sum(weights[1 : min(size, 8) + 1]) for size in sizes]
    assert problem.weights == tuple(sums)
    eager = [2 * round((min(size, 8) * unit + 0.5) * 10 * NANO) for size in sizes]
    assert problem.eager == tuple(eager)
    above = [
        sum(weights[n] * 2 * round((n * unit + 0.5) * 10 * NANO) for n in range(1, 9) if n > size) for size in sizes
    ]
    assert problem.tails == tuple(above)
    least = sizes[-1] if not mixed else min(max(1, anchor), sizes[-1])
    assert problem.sizes[problem.least_top] == min(size for size in sizes if size >= least)
