"""Budgets: never exceeded, never wasteful, and what is given up comes in order."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.sizing import Ladder, fit, minimax, total
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import Domain
from capture_planner.records.spec import Lora

# What goes first; a draft decode has no mixed batches.
VALUE = {
    (Kind.MIXED, Role.DRAFT_PREFILL): 0,
    (Kind.MIXED, Role.TARGET): 1,
    (Kind.DECODE, Role.DRAFT_PREFILL): 2,
    (Kind.DECODE, Role.DRAFT_DECODE): 3,
    (Kind.DECODE, Role.TARGET): 4,
}


@st.composite
def ladders(draw, lora=True):
    """A few ladders of any kind over domains of up to 64, some fixed and some that may be recomputed."""
    cases = draw(
        st.just((0,)) | st.builds(Lora, max_active=st.integers(1, 9), specialize=st.booleans()).map(Lora.cases)
    )
    found = []
    for role in draw(st.sets(st.sampled_from(Role), min_size=1)):
        for kind in draw(st.sets(st.sampled_from(Kind), min_size=1)):
            if (kind, role) not in VALUE:
                continue
            domain = Domain.upto(draw(st.integers(1, 64)), draw(st.sampled_from((1, 1, 2, 4))))
            adaptive = draw(st.booleans())
            if adaptive:
                sizes = minimax(domain, draw(st.integers(1, 20)))
            else:
                drawn = draw(st.sets(st.integers(1, 64), max_size=12))
                sizes = domain.needed([*drawn, domain.ceiling])
            decode = kind is Kind.DECODE
            found.append(
                Ladder(
                    role=role,
                    kind=kind,
                    mode=GraphMode.FULL if decode else GraphMode.PIECEWISE,
                    query_len=1 if decode else None,
                    domain=domain,
                    sizes=sizes,
                    adaptive=adaptive,
                    cases=cases if lora and role is Role.TARGET else (0,),
                    max_num_reqs=64,
                )
            )
    return tuple(found)


def worst(fitted):
    """The largest ratio over ladders that still have sizes."""
    return max((ladder.worst for ladder in fitted if ladder.sizes), default=Fraction(1))


@given(ladders(), st.integers(0, 80))
def test_fit_never_exceeds_the_budget(given_ladders, allowed):
    """Whatever the ladders, what is left fits."""
    assert total(fit(given_ladders, allowed, Reason.BUDGET)) <= allowed


@given(ladders(), st.integers(0, 80))
def test_fit_keeps_ladders_that_fit(given_ladders, extra):
    """A budget that is large enough changes nothing."""
    assert fit(given_ladders, total(given_ladders) + extra, Reason.BUDGET) == given_ladders


@given(ladders(), st.integers(0, 80))
def test_fit_gives_up_coverage_last(given_ladders, allowed):
    """A ladder keeps its largest size, or loses all of them and says why; the order is kept."""
    fitted = fit(given_ladders, allowed, Reason.BUDGET)
    for before, after in zip(given_ladders, fitted, strict=True):
        assert (before.role, before.kind) == (after.role, after.kind)
        if after.sizes:
            assert after.sizes[-1] == before.sizes[-1]
            assert after.cut is None
        else:
            assert after.cut is Reason.BUDGET
    plain = sum(len(ladder.served(ladder.sizes[-1])[:2]) for ladder in given_ladders)
    if allowed >= plain:
        assert all(ladder.sizes for ladder in fitted)


@pytest.mark.parametrize("adaptive", [True, False])
def test_ladder_of_one_graph_is_the_largest_size(adaptive):
    """A budget of one graph covers everything, whatever the largest size."""
    for last in range(1, 20):
        domain = Domain.upto(last)
        ladder = Ladder(
            role=Role.TARGET,
            kind=Kind.DECODE,
            mode=GraphMode.FULL,
            query_len=1,
            domain=domain,
            sizes=tuple(range(1, last + 1)),
            adaptive=adaptive,
            max_num_reqs=64,
        )
        (fitted,) = fit((ladder,), 1, Reason.BUDGET)
        assert fitted.sizes == (last,)
        assert fitted.cut is None


def test_fit_pads_least():
    """Two alike in a budget of an odd number: each is the best of as many sizes, and one graph is left."""
    for last in range(20, 65):
        domain = Domain.upto(last)
        shape = {"domain": domain, "sizes": minimax(domain, 15), "adaptive": True, "max_num_reqs": 64}
        alike = [
            Ladder(role=role, kind=Kind.DECODE, mode=GraphMode.FULL, query_len=1, **shape)
            for role in (Role.TARGET, Role.DRAFT_PREFILL)
        ]
        for ladder in fit(alike, 9, Reason.BUDGET):
            assert ladder.sizes == minimax(domain, 4)


def of_the_target(**shape):
    """A decode ladder of one size."""
    shape = {"domain": Domain.upto(64), "sizes": (64,), "max_num_reqs": 64, "query_len": 1} | shape
    return Ladder(role=Role.TARGET, kind=Kind.DECODE, mode=GraphMode.FULL, **shape)


def test_fit_drops_lora_cases_before_ladders():
    """None and the most are left; a ladder without adapters is as it was."""
    adapters, plain = of_the_target(cases=(0, 1, 2, 4, 5)), of_the_target(query_len=4)
    assert total((adapters, plain)) == 6
    fitted = fit((adapters, plain), 3, Reason.BUDGET)
    assert [ladder.cases for ladder in fitted] == [(0, 5), (0,)]
    assert all(ladder.sizes == (64,) for ladder in fitted)
    one = of_the_target(cases=(0, 5), sizes=(32, 64))
    assert fit((one, plain), 3, Reason.BUDGET)[0].cases == (0, 5)
    assert [ladder.cases for ladder in fit((adapters, one), 4, Reason.BUDGET)] == [(0, 5), (0, 5)]


def test_fit_drops_longer_queries_first():
    """They are rarer."""
    fitted = fit([of_the_target(query_len=n) for n in (2, 4, 1)], 1, Reason.BUDGET)
    assert [ladder.query_len for ladder in fitted if ladder.sizes] == [1]
    fitted = fit([of_the_target(query_len=n) for n in (2, 4, 1)], 2, Reason.BUDGET)
    assert [ladder.query_len for ladder in fitted if ladder.sizes] == [2, 1]


def test_ladder_is_thinned_only_if_that_saves_a_graph():
    """It is itself where it is further from the ratio already, and where nothing shorter is within."""
    fixed = of_the_target(sizes=(1, 2, 4, *range(8, 65, 8)))
    assert fixed.worst == Fraction(16, 9)
    assert fixed.thinned(Fraction(3, 2)) is fixed
    assert fixed.tightened() is fixed
    assert len(fixed.thinned(Fraction(2)).sizes) < len(fixed.sizes)
    assert fixed.served(64) == (0,)
    computed = of_the_target(sizes=minimax(Domain.upto(64), 6), adaptive=True)
    assert computed.thinned(computed.worst + Fraction(1, 1 << 20)) is computed
    assert len(computed.thinned(Fraction(3)).sizes) < 6


@given(ladders(), st.integers(0, 20))
def test_fit_drops_mixed_before_decodes_and_drafters_before_targets(given_ladders, allowed):
    """No ladder is dropped while a less valuable one stays."""
    fitted = fit(given_ladders, allowed, Reason.BUDGET)
    dropped = [VALUE[ladder.kind, ladder.role] for ladder in fitted if not ladder.sizes]
    kept = [VALUE[ladder.kind, ladder.role] for ladder in fitted if ladder.sizes]
    assert max(dropped, default=-1) < min(kept, default=99)


@given(ladders(), st.integers(0, 60), st.integers(1, 20))
def test_larger_budget_never_pads_more(given_ladders, allowed, more):
    """Monotone: among budgets that keep every ladder, more graphs mean no worse padding."""
    one, other = (fit(given_ladders, n, Reason.BUDGET) for n in (allowed, allowed + more))
    assert sum(bool(ladder.sizes) for ladder in one) <= sum(bool(ladder.sizes) for ladder in other)
    if all(ladder.sizes for ladder in one):
        assert worst(other) <= worst(one)


@given(st.integers(1, 64), st.integers(1, 20), st.builds(Lora, max_active=st.integers(1, 9), specialize=st.just(True)))
def test_each_graph_more_pads_no_more_with_adapters(last, sizes, lora):
    """Monotone in steps of one graph: sizes are not given up for adapter cases that another graph serves."""
    domain = Domain.upto(last)
    ladder = of_the_target(domain=domain, sizes=minimax(domain, sizes), adaptive=True, cases=lora.cases())
    padding = [worst(fit([ladder], allowed, Reason.BUDGET)) for allowed in range(2, total([ladder]) + 1)]
    assert padding == sorted(padding, reverse=True)


@given(ladders())
def test_ladder_counts_its_graphs(given_ladders):
    """Sizes times the adapter counts that its real requests, not the padded ones, can need."""
    for ladder in given_ladders:
        counted = 0
        for size in ladder.sizes:
            real = ladder.num_reqs(min(size, ladder.domain.intervals[-1][1]))
            counted += sum(
                case == 0 or below < real for case, below in zip(ladder.cases, (0, *ladder.cases), strict=False)
            )
        assert ladder.num_graphs == counted


def test_ladder_as_text():
    """Mode, kind, query length and chain."""
    shape = {"role": Role.DRAFT_DECODE, "domain": Domain.upto(4), "sizes": (4,), "max_num_reqs": 4}
    mixed = Ladder(kind=Kind.MIXED, mode=GraphMode.PIECEWISE, **shape)
    chain = Ladder(kind=Kind.DECODE, mode=GraphMode.FULL, query_len=1, draft_steps=3, **shape)
    assert str(mixed) == "PIECEWISE mixed"
    assert str(chain) == "FULL decode, query length 1, chain of 3"
