"""The check of law 8: plans of every kind, and each way in which an answer of a rank can be wrong."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.analysis.data_parallel import Submission, Vector, agree
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry
from support.runner_conformance import rank_agreement
from support.runner_conformance.rank_agreement import MOST_REQS, MOST_TOKENS, disagreements, plans, shown
from support.strategies import vectors


def test_plans_are_of_every_kind() -> None:
    """Without drafts, with three, and with three or two by the number of requests, and up to three of each request;
    with and without adapters.
    """
    assert len(set(plans())) == len(plans()) == 16
    tiers = [None if plan.speculative is None else plan.speculative.tiers(MOST_REQS) for plan in plans()]
    fixed = [((1, MOST_REQS, 3),)] * 4
    assert tiers == [None] * 4 + fixed + [((1, 4, 3), (5, MOST_REQS, 2))] * 4 + fixed
    varies = [any(entry.max_query_len for entry in plan.role(Role.TARGET).entries) for plan in plans()]
    assert varies == [False] * 12 + [True] * 4
    for plan, adapters in zip(plans(), [False, False, True, True] * 4, strict=True):
        assert (plan.limits.max_num_reqs, plan.limits.max_num_tokens) == (MOST_REQS, MOST_TOKENS) == (12, 64)
        cases = {entry.active_loras for entry in plan.role(Role.TARGET).entries}
        assert cases == ({0, 1, 2, 4, 5} if adapters else {0})
    mixed = [any(entry.mode is GraphMode.PIECEWISE for entry in plan.role(Role.TARGET).entries) for plan in plans()]
    assert mixed == [True, False] * 8


BATCH = Batch(role=Role.TARGET, num_reqs=2, num_tokens=8, query_len=4, past_prompt=True)


@pytest.mark.parametrize(
    ("submission", "text"),
    [
        (Submission(), "idle"),
        (Submission(batch=BATCH), "2 x 4"),
        (Submission(batch=attrs.evolve(BATCH, active_loras=2)), "2 x 4, 2 LoRA"),
        (Submission(batch=attrs.evolve(BATCH, query_len=None)), "2 requests, 8 tokens"),
        (Submission(batch=BATCH, captured=False), "2 x 4, no graphs"),
        (Submission(missing=frozenset(plans()[0].role(Role.TARGET).entries[:2])), "idle, 2 graphs lost"),
    ],
)
def test_vector_is_shown_rank_by_rank(submission: Submission, text: str) -> None:
    """What each submits, and which graphs it has not."""
    vector = Vector(role=Role.TARGET, ranks=(submission, Submission()))
    assert shown(vector) == f"target: {text} | idle"


@given(st.data())
def test_each_wrong_answer_is_said(data: st.DataObject) -> None:
    """One answer is changed at a time: every message that must follow does, and none is said of a right one."""
    plan = data.draw(st.sampled_from(plans()))
    vector = data.draw(vectors(plan))
    order = tuple(data.draw(st.permutations(range(len(vector.ranks)))))
    assert not list(disagreements(agree, plan, vector, order))
    right = agree(rank_agreement.Dispatcher(plan), vector)
    rank = data.draw(st.sampled_from(order))
    answer, submitted = right.answers[rank], vector.ranks[rank]
    working = [each.batch for each in vector.ranks if each.batch is not None]
    entries = plan.role(vector.role).entries
    entry = data.draw(st.sampled_from((answer.dispatch.entry, None, *entries)))
    batch = data.draw(st.sampled_from((answer.batch, None, *working)))
    reason = data.draw(st.sampled_from((answer.dispatch.reason, "another")))
    changed = attrs.evolve(answer, batch=batch, dispatch=attrs.evolve(answer.dispatch, entry=entry, reason=reason))

    def wrong(dispatcher: object, asked: Vector) -> object:
        if asked is not vector:
            return agree(dispatcher, asked)
        return attrs.evolve(right, answers=(*right.answers[:rank], changed, *right.answers[rank + 1 :]))

    expected = set()
    if entry != answer.dispatch.entry:
        if len(vector.ranks) > 1:
            expected.add("ranks diverge")
        if working:
            first = entry if rank == 0 else right.answers[0].dispatch.entry
            expected.add(f"every rank can run {answer.dispatch.entry}, and the choice is {first}")
    if reason != answer.dispatch.reason and len(vector.ranks) > 1:
        expected.add("ranks have different reasons")
    if batch is None and working:
        expected.add(f"rank {rank} runs nothing while others work")
    elif submitted.batch is not None and batch != submitted.batch:
        expected.add(f"rank {rank} runs another batch than its own")
    elif batch is not None and entry is not None and not fits(entry, batch):
        expected.add(f"rank {rank}: {entry} has no room for {batch.num_reqs} requests, {batch.num_tokens} tokens")
    if entry is not None and any(not each.captured or entry in each.missing for each in vector.ranks):
        expected.add(f"rank {rank} replays {entry}, which another rank has not captured")
    if changed != answer and order != tuple(range(len(order))):
        expected.add("in another order, ranks have other answers")
    said = list(disagreements(wrong, plan, vector, order))
    assert len(said) == len(set(said))
    for start in expected:
        assert [message for message in said if message.startswith(start)], (start, said)
    known = expected | {"in another order", "ranks diverge"}
    assert all(any(message.startswith(start) for start in known) for message in said)


def fits(entry: Entry, batch: Batch) -> bool:
    """Say whether a graph has room for a batch."""
    rows = entry.num_reqs is None or entry.num_reqs >= batch.num_reqs
    uniform = entry.query_len is None or entry.query_len == batch.uniform_query_len
    if entry.max_query_len is not None:
        uniform = 1 <= (batch.decode_query_len or 0) <= entry.max_query_len
    return rows and uniform and entry.num_tokens >= batch.num_tokens


def test_a_graph_of_varying_decodes_has_no_room_for_prompts() -> None:
    """Whatever their counts are."""
    plan = plans()[-1]
    entry = max((e for e in plan.role(Role.TARGET).entries if e.max_query_len), key=lambda e: e.num_tokens)
    vector = Vector(role=Role.TARGET, ranks=(Submission(batch=Batch.mixed(Role.TARGET, 2, 5)),))

    def wrong(dispatcher: object, asked: Vector) -> object:
        right = agree(dispatcher, asked)
        (answer,) = right.answers
        return attrs.evolve(right, answers=(attrs.evolve(answer, dispatch=attrs.evolve(answer.dispatch, entry=entry)),))

    said = list(disagreements(wrong, plan, vector, (0,)))
    assert f"rank 0: {entry} has no room for 2 requests, 5 tokens" in said


def test_idle_ranks_run_nothing_where_none_has_work() -> None:
    """A rank that runs a batch all the same is found, and one that decides otherwise the second time."""
    plan = plans()[0]
    vector = Vector(role=Role.TARGET, ranks=(Submission(), Submission()))
    answers = iter(range(9))

    def busy(dispatcher: object, asked: Vector) -> object:
        right = agree(dispatcher, asked)
        return attrs.evolve(right, answers=(attrs.evolve(right.answers[0], batch=BATCH), right.answers[1]))

    def unsteady(dispatcher: object, asked: Vector) -> object:
        return attrs.evolve(agree(dispatcher, asked), draft_tokens=next(answers))

    said = list(disagreements(busy, plan, vector, (0, 1)))
    assert said == ["rank 0 runs though none has work"]
    assert list(disagreements(unsteady, plan, vector, (0, 1))) == ["a rank that decides alone finds another answer"]
