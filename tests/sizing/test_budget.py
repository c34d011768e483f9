"""Budgets: never exceeded, never wasteful, and what is given up comes in order."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.admissible import Domain
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.plan import Kind
from capture_planner.sizing import Ladder, fit, minimax, total
from capture_planner.spec import Lora

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
        st.just((0,))
        | st.builds(Lora, max_active=st.integers(1, 9), specialize=st.booleans()).map(Lora.cases)
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
def test_never_over_budget(given_ladders, allowed):
    """Whatever the ladders, what is left fits."""
    assert total(fit(given_ladders, allowed, Reason.BUDGET)) <= allowed


@given(ladders(), st.integers(0, 80))
def test_what_fits_is_left_alone(given_ladders, extra):
    """A budget that is large enough changes nothing."""
    assert fit(given_ladders, total(given_ladders) + extra, Reason.BUDGET) == given_ladders


@given(ladders(), st.integers(0, 80))
def test_coverage_is_given_up_last(given_ladders, allowed):
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


@given(ladders(), st.integers(0, 20))
def test_mixed_batches_go_before_decodes_and_drafters_before_targets(given_ladders, allowed):
    """No ladder is dropped while a less valuable one stays."""
    fitted = fit(given_ladders, allowed, Reason.BUDGET)
    dropped = [VALUE[ladder.kind, ladder.role] for ladder in fitted if not ladder.sizes]
    kept = [VALUE[ladder.kind, ladder.role] for ladder in fitted if ladder.sizes]
    assert max(dropped, default=-1) < min(kept, default=99)


@given(ladders(lora=False), st.integers(0, 60), st.integers(1, 20))
def test_a_larger_budget_never_pads_more(given_ladders, allowed, more):
    """Monotone: among budgets that keep every ladder, more graphs mean no worse padding."""
    one, other = (fit(given_ladders, n, Reason.BUDGET) for n in (allowed, allowed + more))
    assert sum(bool(ladder.sizes) for ladder in one) <= sum(bool(ladder.sizes) for ladder in other)
    if all(ladder.sizes for ladder in one):
        assert worst(other) <= worst(one)


@given(ladders())
def test_a_ladder_knows_its_graphs(given_ladders):
    """Sizes times the adapter counts that its real requests, not the padded ones, can need."""
    for ladder in given_ladders:
        counted = 0
        for size in ladder.sizes:
            real = ladder.num_reqs(min(size, ladder.domain.intervals[-1][1]))
            counted += sum(
                case == 0 or below < real
                for case, below in zip(ladder.cases, (0, *ladder.cases), strict=False)
            )
        assert ladder.num_graphs == counted


def test_a_ladder_reads_as_what_it_is():
    """Mode, kind, query length and chain."""
    shape = {"role": Role.DRAFT_DECODE, "domain": Domain.upto(4), "sizes": (4,), "max_num_reqs": 4}
    mixed = Ladder(kind=Kind.MIXED, mode=GraphMode.PIECEWISE, **shape)
    chain = Ladder(kind=Kind.DECODE, mode=GraphMode.FULL, query_len=1, draft_steps=3, **shape)
    assert str(mixed) == "PIECEWISE mixed"
    assert str(chain) == "FULL decode, query length 1, chain of 3"
