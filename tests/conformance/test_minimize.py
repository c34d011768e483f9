"""Cases are made small: as far as single cuts go, in so many plays, and of the same check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("torch")

from capture_planner_conformance import (
    Case,
    Check,
    Failure,
    Log,
    Scene,
    SearchProfile,
    SuiteOptions,
    dumps,
    loads,
    play,
    scenes,
    search,
    under_test,
    with_causes,
)
from capture_planner_conformance.minimize import PLAYS, minimize
from capture_planner_conformance.scene import Arrive, Depart, DraftScheme, Move, Reload, RunBatch, Serve
from capture_planner_conformance.shapes import SMALL
from capture_planner_conformance.suite import DRAFTS
from capture_planner_reference import Reference
from capture_planner_reference.executor import ReferenceExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS = st.integers(0, 4)
ROWS = st.lists(
    st.tuples(REQUESTS, st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=5, unique_by=lambda r: r[0]
)
STEPS = st.one_of(
    st.builds(Depart, request=REQUESTS),
    st.builds(Move, request=REQUESTS),
    st.builds(Reload, seed=st.integers(8, 15)),
    st.builds(RunBatch, rows=ROWS.map(tuple)),
    st.builds(
        Serve,
        requests=st.lists(
            st.tuples(st.integers(1, 24), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=4
        ).map(tuple),
    ),
)
ARRIVALS = st.builds(Arrive, prompt=st.integers(1, 24), computed=st.integers(0, 24), shares=st.none() | REQUESTS)
CASES = st.builds(
    lambda scene, arrivals, steps: Case(scene=scene, steps=(*arrivals, *steps)),
    scenes(SMALL, DRAFTS),
    st.lists(ARRIVALS, min_size=5, max_size=5),
    st.lists(STEPS, max_size=6),
)


def has_zero_row(case: Case, least: int) -> bool:
    """Whether a step has so many rows, one of them without a token."""
    return any(
        isinstance(step, RunBatch) and len(step.rows) >= least and any(not count for _, count, _ in step.rows)
        for step in case.steps
    )


LAWS: dict[str, tuple[int, Callable[[Case], bool]]] = {
    "a row without a token": (1, lambda case: has_zero_row(case, 1)),
    "one of three rows without a token": (3, lambda case: has_zero_row(case, 3)),
    "two arrivals": (2, lambda case: sum(isinstance(step, Arrive) for step in case.steps) >= 2),
    "a move and a drafter": (
        1,
        lambda case: case.scene.drafts > 0 and any(isinstance(step, Move) for step in case.steps),
    ),
    "several requests served": (
        0,
        lambda case: any(isinstance(step, Serve) and len(step.requests) > 1 for step in case.steps),
    ),
    "tokens": (0, lambda case: case.scene.num_tokens >= 5),
}
"""What a case needs, and how many requests that takes."""


def failing(holds: Callable[[Case], bool], check: Check = Check.ROWS) -> Callable[[Case], Failure | None]:
    """Return a play that fails where ``holds``."""

    def played(case: Case) -> Failure | None:
        return Failure(check=check, message="off", case=dumps(case)) if holds(case) else None

    return played


def smallest(case: Case, played: Callable[[Case], Failure | None], plays: int = PLAYS) -> tuple[Case, int]:
    """Return what a case comes to, and how often it was done."""
    found = played(case)
    assert found is not None, "the case fails"
    last, count = case, 0
    for result in minimize(found, loads(found.case), played, SMALL, DRAFTS, plays):
        count += 1
        last = case if result is None else (case := loads(result.case))
    return last, count


def without_a_step(case: Case) -> Iterator[Case]:
    """Yield the case without each step that is no arrival."""
    for index, step in enumerate(case.steps):
        if not isinstance(step, Arrive):
            yield attrs.evolve(case, steps=case.steps[:index] + case.steps[index + 1 :])


@pytest.mark.parametrize("name", LAWS)
@given(case=CASES)
def test_what_is_left_fails_and_nothing_can_be_left_out(name: str, case: Case) -> None:
    """No step, no row and no flag; whatever is tried on the way is a scene that can be planned."""
    (requests, law), tried = LAWS[name], []
    assume(law(case))

    def played(each: Case) -> Failure | None:
        tried.append(each)
        return failing(law)(each)

    small, count = smallest(case, played)
    assert count <= PLAYS
    assert law(small)
    assert not any(map(law, without_a_step(small)))
    scene = small.scene
    assert (scene.shape, scene.layers, scene.seed) == (SMALL[0], 1, 0)
    assert not any(
        (scene.ahead, scene.per_role, scene.drafter is not DraftScheme.EAGLE, scene.schedule, scene.size_tokens)
    )
    assert scene.drafts == (1 if "drafter" in name else 0)
    assert scene.num_tokens == (5 if name == "tokens" else 1 + scene.drafts)
    for each in tried:
        each.scene.spec("reference")
        limits = each.scene
        assert limits.num_tokens >= max(limits.num_reqs, 1 + limits.drafts)
        assert max(limits.size_tokens, default=limits.num_tokens) == limits.num_tokens
        assert max(limits.size_reqs, default=limits.num_reqs) <= limits.num_reqs
        assert loads(dumps(each)) == each
    assert sum(isinstance(step, Arrive) for step in small.steps) <= requests


@given(case=CASES, plays=st.integers(1, 20))
def test_it_is_bounded_by_plays_and_does_the_same_again(case: Case, plays: int) -> None:
    """Whatever fails, and however slow the machine is."""
    always = failing(lambda case: True)
    first = smallest(case, always, plays)
    assert first == smallest(case, always, plays)
    assert first[1] <= plays
    if plays == 1:
        assert first == (case, 1)


@given(case=CASES)
def test_another_check_is_another_bug(case: Case) -> None:
    """What breaks something else, or ends with another error, is a cut too many."""
    whole = failing(lambda case: True)
    for other in (
        Failure(check=Check.FILLED, message="off"),
        Failure(check=Check.RAN, message="ValueError: no such size"),
    ):
        found = whole(case) if other.check is Check.FILLED else None
        found = found or Failure(check=Check.RAN, message="TypeError: a slip", case=dumps(case))

        def played(each: Case, found: Failure = found, other: Failure = other) -> Failure:
            return found if each == case else attrs.evolve(other, case=dumps(each))

        results = list(minimize(found, loads(found.case), played, SMALL, DRAFTS, 40))
        assert results[0] is found
        assert results[-1] is found
        assert not any(results[1:-1])


@given(case=CASES)
def test_what_does_not_fail_again_is_left_alone(case: Case) -> None:
    """One play says so."""
    found = failing(lambda case: True)(case)
    assert found is not None
    assert list(minimize(found, loads(found.case), lambda case: None, SMALL, DRAFTS)) == [None]


@given(scene=scenes(SMALL, DRAFTS), requests=st.integers(1, 4))
def test_a_wrong_token_is_told_by_the_step_that_makes_it(scene: Scene, requests: int) -> None:
    """Served, it is a token; alone, it is a row of a graph."""
    case = Case(scene=scene, steps=(Serve(requests=((3, 2, 0),) * requests),))
    entry: Any = "a graph"

    def played(each: Case) -> Failure:
        served = any(isinstance(step, Serve) for step in each.steps)
        told = {"check": Check.TOKENS} if served else {"check": Check.ROWS, "entry": entry}
        return Failure(message="off", case=dumps(each), **told)

    last = list(minimize(played(case), case, played, SMALL, DRAFTS))[-1]
    assert last is not None
    assert last.check is Check.ROWS


class EmptyRowFault(ReferenceExecutor):
    """Goes wrong where a row without a token stands between others."""

    def prepare(self, metadata: Any) -> None:
        """Take the rows from their offsets, as far as all of them have a token."""
        super().prepare(metadata)
        starts = [int(start) for start in metadata.host["query_start_loc"]]
        lengths = [after - before for before, after in pairwise(starts)]
        if 0 in lengths[1:-1]:
            raise TypeError("a row without a token")


class FaultyReference(Reference):
    """The reference backend with one fault."""

    name = "broken"

    def __init__(self, **faults: Any) -> None:
        for name, fault in faults.items():
            setattr(self, name, fault)


@pytest.mark.thorough
def test_rows_without_a_token_come_down_to_three_requests() -> None:
    """Five requests with rows of 2, 2, 0, 1 and 0 tokens show no more than three do."""
    tested = under_test(FaultyReference(reserve=EmptyRowFault))
    scene = Scene(shape=SMALL[0], num_reqs=5, num_tokens=12, size_tokens=(12,), size_reqs=(5,), layers=2)
    arrivals = tuple(Arrive(prompt=6, computed=number) for number in range(5))
    rows = tuple((number, count, 0) for number, count in enumerate((2, 2, 0, 1, 0)))
    case = Case(scene=scene, steps=(*arrivals, Move(request=1), Reload(seed=9), RunBatch(rows=rows)))
    small, count = smallest(case, lambda case: play(tested, case).failure)
    assert count < PLAYS
    assert sum(isinstance(step, Arrive) for step in small.steps) == 3
    assert [type(step) for step in small.steps] == [Arrive, Arrive, Arrive, RunBatch]
    assert isinstance(small.steps[-1], RunBatch)
    assert [count for _, count, _ in small.steps[-1].rows] in ([1, 0, 2], [2, 0, 1])
    assert small.scene.num_reqs == 3


@pytest.mark.parametrize("shrink", [True, False])
def test_what_fails_now_and_then_is_said_to(shrink: bool) -> None:
    """A finding that a second run does not have is a finding, and no promise."""

    class Once(ReferenceExecutor):
        runs = 0

        def prepare(self, metadata: Any) -> None:
            super().prepare(metadata)
            Once.runs += 1
            if Once.runs == 40:
                raise TypeError("now and then")

    tested = under_test(FaultyReference(reserve=Once))
    log = Log()
    profile = SearchProfile(name="few", examples=20, steps=6)
    found = search(tested, SMALL[:1], SuiteOptions(profile=profile, shrink=shrink), log)
    assert found is not None
    assert found.failed is not None
    assert found.failed[0] < found.failed[1]
    assert found.frequency in str(found)
    assert with_causes(tested, found) == found
    assert log.violation is not None
    assert log.violation.failure is found


def always_failing(*, shrink: bool) -> Failure:
    """Return the finding of a backend that fails at every run."""
    tested = under_test(FaultyReference(reserve=EmptyRowFault))
    profile = SearchProfile(name="some", examples=60, steps=10)
    found = search(tested, SMALL[:1], SuiteOptions(profile=profile, shrink=shrink), Log())
    assert found is not None
    assert found.failed is None
    return found


def test_what_always_fails_is_not_doubted() -> None:
    always_failing(shrink=False)


@pytest.mark.thorough
def test_what_always_fails_is_not_doubted_when_it_is_small() -> None:
    assert len(always_failing(shrink=True).case) < len(always_failing(shrink=False).case)
