"""Measured sizes: what the plan says of them, and where ladders end."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured import _about_tail, _priced, _reachable, _teams
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.steps import Steps
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import Domain
from capture_planner.records.profile import CostCurve
from support.measured import profile

ONE, TWO = Batch.decode(Role.TARGET, 3, 1), Batch.decode(Role.TARGET, 3, 2)
MIXED = Batch.mixed(Role.TARGET, 2, 9)


def ladder(role: Role = Role.TARGET, **named: object) -> Ladder:
    """Return a ladder of mixed batches up to 64 tokens."""
    known: dict[str, object] = {"kind": Kind.MIXED, "mode": GraphMode.FULL, "domain": Domain.upto(64), "sizes": ()}
    return Ladder(role=role, max_num_reqs=8, **known | named)  # type: ignore[arg-type]


def costs_of(reach: int = 64, *, eager: bool = True) -> Costs:
    """Return times of n milliseconds for graphs of n tokens, of three times as many eager."""
    curves = [
        CostCurve(role=role, mode=mode, tokens=(1, reach), milliseconds=(factor, factor * reach))
        for role in Role
        for mode, factor in ((GraphMode.FULL, 1.0), *([(GraphMode.NONE, 3.0)] if eager else []))
    ]
    return Costs(replace(profile(), curves=tuple(curves)))


@pytest.mark.parametrize(
    ("batches", "rests"), [((ONE,), False), ((TWO,), False), ((ONE, TWO), True), ((MIXED,), True), ((ONE, MIXED), True)]
)
def test_a_percentile_rests_on_an_assumption_unless_all_are_decodes_of_one_length(
    batches: tuple[Batch, ...], rests: bool
) -> None:
    """With the time of the chosen sizes where they take longer."""
    steps = Steps(dict.fromkeys(batches, 3))
    assert bool([*_about_tail("p90", steps, 2.0, 2.0)]) == rests
    for sentence in _about_tail("p90", steps, 2.0, 2.0):
        assert sentence == "assumed: the p90 step is the same one as with a graph of every size, and takes 2 ms"
    for sentence in _about_tail("p90", steps, 2.0, 2.5):
        assert sentence.endswith("takes 2 ms; with these sizes the p90 step takes 2.5 ms")


@given(st.integers(1, 80), st.integers(1, 4), st.lists(st.integers(1, 64), max_size=2), st.booleans())
def test_mixed_ladders_end_where_the_profile_does(reach: int, step: int, anchors: list[int], shared: bool) -> None:
    """At a multiple of their step, and at no less than their anchors; both of a team where the nearer one does."""
    domain = Domain.upto(64, step)
    first = ladder(domain=domain, anchors=tuple(anchors))
    second = ladder(Role.DRAFT_PREFILL, domain=domain, anchors=tuple(anchors))
    decodes = ladder(Role.DRAFT_DECODE, kind=Kind.DECODE, query_len=1, domain=Domain.upto(8))
    ladders = [first, decodes, second]
    teams = _teams(ladders) if shared else [(0,), (1,), (2,)]
    assert teams == ([(0, 2), (1,)] if shared else [(0,), (1,), (2,)])
    known = costs_of(100)
    shorter = [replace(c, tokens=(1, reach + 1)) if c.role is Role.DRAFT_PREFILL else c for c in known.profile.curves]
    ended = _reachable(ladders, teams, Costs(replace(known.profile, curves=tuple(shorter))))
    top = max([(reach + 1) // step * step, *anchors])
    assert ended[1] == decodes
    assert ended[2].domain == domain.clipped(top)
    assert ended[0].domain == (domain.clipped(top) if shared else domain)


def test_what_is_lost_above_the_largest_size_is_said() -> None:
    """Mixed batches above it; a ladder that the budget leaves out, at its largest count; or why it is not known."""
    assert _priced(ladder(sizes=(8, 16)), costs_of()).price == "at 17 that takes 34 ms more than a graph"
    assert _priced(ladder(sizes=(64,)), costs_of()).price == "the profile has no graph of more than 64 tokens"
    assert _priced(ladder(sizes=(63,)), costs_of()).price == "at 64 that takes 128 ms more than a graph"
    assert _priced(ladder(), costs_of()).price == ""
    decodes = ladder(kind=Kind.DECODE, query_len=4, domain=Domain(((1, 2), (5, 8))), sizes=(8,))
    assert _priced(decodes, costs_of()).price == ""
    cut = attrs.evolve(decodes, sizes=(), cut=Reason.BUDGET)
    assert _priced(cut, costs_of()).price == "at 8 that takes 64 ms more than a graph"
    assert _priced(cut, costs_of(eager=False)).price == "the profile has no eager times of target"
