"""Drafts of served requests: those proposed are verified, what the target says is kept, the drafter goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner_conformance import Case, play
from capture_planner_conformance.failure import Law, Violation
from capture_planner_conformance.scene import DraftScheme, Serve
from capture_planner_conformance.shapes import SMALL
from capture_planner_runner.execution.updates import Updates
from capture_planner_runner.ledger.rows import Step
from support.runner_conformance import RunnerCheck, RunnerScene, runner_under_test
from support.runner_conformance.served_drafts import (
    DecodeRow,
    Event,
    Proposal,
    StepRows,
    _kept,
    check_counted_drafts,
    check_served_drafts,
)

Events = list[Event]
LONGEST = 99
SHIFTED = [DraftScheme.EAGLE, DraftScheme.EAGLE3, DraftScheme.LAYERS, DraftScheme.MODULES]


@st.composite
def loads(draw: st.DrawFn) -> tuple[DraftScheme, Events, dict[str, tuple[int, ...]]]:
    """Return what a request of random tokens is served with, one prompt and then decodes, until it has all of them."""
    drafter = draw(st.sampled_from([*SHIFTED, DraftScheme.DRAFT_MODEL]))
    k, prompt = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tokens = tuple(draw(st.lists(st.integers(0, 2), min_size=prompt + 1, max_size=prompt + 12)))
    events: Events = []
    first, ids, shift = 0, tokens[:prompt], int(drafter.reads_states)
    while first + 1 < len(tokens):
        is_decode = first >= prompt
        agrees = [first + place < len(tokens) and ids[place] == tokens[first + place] for place in range(1, len(ids))]
        kept = 1 + [*agrees, False].index(False) if is_decode else len(ids)
        common: dict[str, Any] = {"name": "one", "is_decode": is_decode, "first": first}
        events.append(StepRows(role=Role.TARGET, ids=ids, last=0, **common))
        if first + kept >= len(tokens):
            break
        read = tokens[first + shift : first + shift + kept + 1 - shift]
        rest = draw(st.tuples(*[st.integers(0, 2)] * (len(ids) - kept)))
        events.append(StepRows(role=Role.DRAFT_PREFILL, ids=(*read, *rest), last=len(read) - 1, **common))
        drafts = draw(st.tuples(*[st.integers(0, 2)] * k))
        # One forward of all draft decodes, or of each.
        chain = 0 if drafter is DraftScheme.MODULES else k - 1
        steps = [chain] if draw(st.booleans()) and chain else [1] * chain
        at = first + len(read)
        for number, each in enumerate(steps):
            events.append(DecodeRow(name="one", position=at + number, steps=each))
        events.append(Proposal(name="one", tokens=drafts))
        first += kept
        ids = (tokens[first], *drafts)
    return drafter, events, {"one": tokens}


@given(loads())
def test_what_a_request_is_served_with_is_right(load: tuple[DraftScheme, Events, dict[str, tuple[int, ...]]]) -> None:
    check_served_drafts(*load, LONGEST)


@given(loads(), st.data())
def test_one_difference_is_found(
    load: tuple[DraftScheme, Events, dict[str, tuple[int, ...]]], data: st.DataObject
) -> None:
    """Of a draft that is verified, a token that the drafter reads, where it begins, and how many rows it keeps; of a
    draft decode its position and its steps.
    """
    drafter, events, tokens = load
    changes = []
    for index, event in enumerate(events):
        if isinstance(event, Proposal):
            if index + 1 < len(events):
                changes.append((index, attrs.evolve(event, tokens=(9, *event.tokens[1:]))))
        elif isinstance(event, DecodeRow):
            changes.append((index, attrs.evolve(event, position=event.position + data.draw(st.sampled_from((-1, 1))))))
            changes.append((index, attrs.evolve(event, steps=event.steps + 1)))
        elif event.role is Role.DRAFT_PREFILL:
            changes += [
                (index, attrs.evolve(event, ids=(*event.ids[: event.last], 9, *event.ids[event.last + 1 :]))),
                (index, attrs.evolve(event, first=event.first + 1)),
            ]
            if event.is_decode:
                changes.append((index, attrs.evolve(event, last=event.last - 1)))
    if changes:
        index, changed = data.draw(st.sampled_from(changes))
        with pytest.raises(Violation) as error:
            check_served_drafts(drafter, [*events[:index], changed, *events[index + 1 :]], tokens, LONGEST)
        assert error.value.failure.check is RunnerCheck.VERIFIED


@given(loads(), st.data())
def test_counted_drafts_are_those_that_were_verified_and_kept(
    load: tuple[DraftScheme, Events, dict[str, tuple[int, ...]]], data: st.DataObject
) -> None:
    """In all and by their place; one more or less is found, where what was kept is known."""
    _, events, tokens = load
    length, made, steps = len(tokens["one"]), 0, []
    for event in events:
        if isinstance(event, Proposal):
            made = len(event.tokens)
        elif isinstance(event, StepRows) and event.role is Role.TARGET and event.is_decode and event.first + 1 < length:
            kept = _kept(event, np.array(tokens["one"]))
            least = length - event.first if kept is None else kept
            accepted = least - 1 if kept is not None else data.draw(st.integers(least - 1, len(event.ids) - 1))
            places = tuple(int(accepted > place) for place in range(made))
            steps.append(counted(drafted_at=(1,) * made, accepted_at=places))
    most = 4
    check_counted_drafts(steps, events, tokens, most)
    for wrong in (counted(drafted_at=(1,), accepted_at=()), counted(drafted_at=(), accepted_at=(0, 0, 0, 9))):
        with pytest.raises(Violation) as error:
            check_counted_drafts([*steps, wrong], events, tokens, most)
        assert error.value.failure.check is RunnerCheck.COUNTED


def counted(drafted_at: tuple[int, ...], accepted_at: tuple[int, ...]) -> Step:
    """Return a step that counts so many drafts."""
    sums = {"drafted": sum(drafted_at), "accepted": sum(accepted_at)}
    rest = {"index": 0, "num_reqs": 1, "num_tokens": 1, "prompts": 0, "seconds": 0.0, "waiting": 0}
    return Step(**sums, **rest, drafted_at=drafted_at, accepted_at=accepted_at)  # type: ignore[arg-type]


def reads_guesses(original: Callable[..., None]) -> Callable[..., None]:
    """Leave the drafter the tokens that were filled in as if all drafts were kept."""

    def prepare(self: Updates, verified: Any, prefill: Any, *rest: Any) -> None:
        before = prefill.input_ids.clone()
        original(self, verified, prefill, *rest)
        prefill.input_ids.copy_(before)

    return prepare


def verifies_one(original: Callable[..., None]) -> Callable[..., None]:
    """Verify the first draft of each request, and reject the others."""

    def prepare(self: Updates, verified: Any, *rest: Any) -> None:
        original(self, attrs.evolve(verified, most=min(verified.most, 2)), *rest)

    return prepare


def counts_one_key_less(original: Callable[..., None]) -> Callable[..., None]:
    """Begin draft decodes with sequences that are one short."""

    def prepare(self: Updates, verified: Any, prefill: Any, last: Any, decode: Any, *rest: Any) -> None:
        original(self, verified, prefill, last, decode, *rest)
        if decode is not None:
            for lengths in decode.lengths:
                lengths[: len(verified.starts) - 1] -= 1

    return prepare


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (None, None),
        (reads_guesses, RunnerCheck.VERIFIED),
        (verifies_one, RunnerCheck.VERIFIED),
        (counts_one_key_less, RunnerCheck.PLACED),
    ],
    ids=["healthy", "drafter reads guesses", "one draft verified", "a key less"],
)
def test_drafts_on_the_device_are_checked(monkeypatch: pytest.MonkeyPatch, bug: Any, check: Law | None) -> None:
    """Steps launched ahead, half of the drafts right."""
    if bug is not None:
        monkeypatch.setattr(Updates, "prepare_drafts", bug(Updates.prepare_drafts))
    scene = RunnerScene(
        shape=SMALL[0],
        mode=GraphMode.FULL,
        num_reqs=2,
        num_tokens=16,
        drafts=3,
        ahead=True,
        agreeing=True,
        size_reqs=(2,),
    )
    failure = play(runner_under_test(), Case(scene=scene, steps=(Serve(requests=((2, 18, 0), (3, 17, 0))),))).failure
    assert (None if failure is None else failure.check) is check


def test_drafts_are_counted_where_the_next_batch_has_none() -> None:
    """K is 1 for one request and 0 for two: the second step verifies a draft and makes none."""
    scene = RunnerScene(shape=SMALL[0], drafts=2, schedule=((1, 1, 1), (2, 2, 0), (3, 3, 2)), num_reqs=3, num_tokens=16)
    serve = Serve(requests=((13, 0, 2), (0, 0, 2), (0, 3, 0)))
    assert play(runner_under_test(), Case(scene=scene, steps=(serve,))).failure is None
