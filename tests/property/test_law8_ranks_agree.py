"""Law 8, ranks agree: the decision is a pure function of the gathered vector, the same on every rank."""

import attrs
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.analysis.data_parallel import Submission, Vector, agree
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.plan import Plan
from capture_planner.testing import arbitrary_plans, batches, plans
from support import reference
from support.strategies import vectors

ANY_PLAN = plans(max_reqs=64) | arbitrary_plans()


def _working(vector):
    return [submitted.batch for submitted in vector.ranks if submitted.batch is not None]


def _held_by_all(vector, entry):
    return all(submitted.captured and entry not in submitted.missing for submitted in vector.ranks)


def _best(plan, vector, held):
    """The cheapest entry that serves every rank, by the laws and a scan over all entries.

    Each rank that works needs room on each axis, a uniform entry needs each of them to be such a
    decode, and a chain must be as long as the largest of them drafts. ``held`` says whether an entry
    must be one that all ranks captured.
    """
    working = [reference.without_adapters(batch) for batch in _working(vector)]
    chain = reference.chain_length(plan, vector.role, max(batch.num_reqs for batch in working))
    able = [
        entry
        for entry in plan.role(vector.role).entries
        if all(reference.serves(entry, batch, chain) for batch in working) and (not held or _held_by_all(vector, entry))
    ]
    return min(able, key=lambda entry: entry.cost, default=None)


@given(ANY_PLAN, st.data())
def test_ranks_agree_independently(plan, data):
    """Law 8: from its own copy of the plan, whatever it was asked before, and in whatever order."""
    asked = data.draw(st.lists(vectors(plan, max_ranks=6), min_size=1, max_size=4))
    text, expected = codec.dumps(plan), [agree(Dispatcher(plan), vector) for vector in asked]
    for copy in (codec.loads(text, Plan), plan):
        own = Dispatcher(copy)
        for batch in data.draw(st.lists(batches(plan), max_size=8)):
            own.dispatch(batch)
        for index in data.draw(st.permutations(range(len(asked)))):
            assert agree(own, asked[index]) == expected[index]


@given(ANY_PLAN, st.data())
def test_all_ranks_replay_one_entry_or_none_does(plan, data):
    """Law 8: entry and reason are common, and each rank's batch fits into the entry on both axes.

    A uniform entry is replayed only where every rank decodes so, idle ranks included. A fused chain is
    as long as the schedule says for the joint requests. Eager ranks are not padded.
    """
    vector = data.draw(vectors(plan))
    agreement = agree(Dispatcher(plan), vector)
    entry, reason, k = agreement.entry, agreement.reason, agreement.draft_tokens
    assert (entry is None) == (reason is not None)
    for submitted, answer in zip(vector.ranks, agreement.answers, strict=True):
        batch, padded = answer.batch, answer.dispatch
        assert (padded.entry, padded.reason) == (entry, reason)
        assert submitted.batch is None or batch == submitted.batch
        if entry is None:
            assert (padded.padded_tokens, padded.padded_reqs) == (0, 0)
            continue
        assert padded.padded_tokens == entry.num_tokens - batch.num_tokens >= 0
        assert padded.padded_reqs == (entry.num_reqs or batch.num_reqs) - batch.num_reqs >= 0
        assert entry.query_len in (None, batch.uniform_query_len)
    if plan.speculative is None or agreement.joint is None:
        assert k is None
    else:
        assert k == reference.scheduled_k(plan, agreement.joint.num_reqs)
        assert entry is None or entry.draft_steps in (None, k - 1)


@given(ANY_PLAN, st.data())
def test_the_entry_is_the_cheapest_that_serves_every_rank(plan, data):
    """Law 8: as a scan finds over all entries that every rank has captured."""
    vector = data.draw(vectors(plan, min_ranks=1))
    assume(_working(vector))
    agreement = agree(Dispatcher(plan), vector)
    best, wanted = _best(plan, vector, held=True), _best(plan, vector, held=False)
    assert agreement.entry == best
    assert agreement.lost_entry == (wanted if best != wanted else None)
    assert (agreement.reason is Reason.RANK) == (best is None and wanted is not None)


@given(ANY_PLAN, st.data())
def test_permuted_ranks_get_permuted_answers(plan, data):
    """Law 8: no rank is special."""
    vector = data.draw(vectors(plan))
    order = data.draw(st.permutations(range(len(vector.ranks))))
    dispatcher = Dispatcher(plan)
    answers = agree(dispatcher, vector).answers
    permuted = attrs.evolve(vector, ranks=tuple(vector.ranks[rank] for rank in order))
    assert agree(dispatcher, permuted).answers == tuple(answers[rank] for rank in order)


@given(ANY_PLAN, st.data(), st.lists(st.integers(0, 16), min_size=1, max_size=4))
def test_idle_ranks_change_nothing_for_the_others(plan, data, places):
    """Law 8: they take part with one request of the decode's length, and never make the batch larger."""
    vector = data.draw(vectors(plan, max_ranks=8))
    assume(_working(vector))
    ranks = list(vector.ranks)
    for place in places:
        ranks.insert(place, Submission())
    with_idle = agree(Dispatcher(plan), attrs.evolve(vector, ranks=tuple(ranks)))
    without = agree(Dispatcher(plan), vector)
    for name in ("joint", "entry", "reason", "lost_entry", "draft_tokens"):
        assert getattr(with_idle, name) == getattr(without, name)
    for submitted, answer in zip(ranks, with_idle.answers, strict=True):
        if submitted.batch is None:
            each = answer.batch.num_tokens
            assert answer.batch == Batch(role=vector.role, num_reqs=1, num_tokens=each, query_len=each)
            assert 1 <= each <= without.joint.num_tokens
            if without.joint.query_len is None:
                k = 0 if plan.speculative is None else reference.scheduled_k(plan, without.joint.num_reqs)
                more = reference.extra_rows(plan.speculative) if vector.role is Role.DRAFT_PREFILL else 0
                scheduled = 1 if vector.role is Role.DRAFT_DECODE else 1 + k + more
                assert each == min(scheduled, without.joint.num_tokens)


@given(ANY_PLAN, st.data())
def test_one_rank_without_graphs_makes_all_eager(plan, data):
    """Law 8: skipping is unanimous; where there was an entry, the reason on each rank is ``rank``."""
    vector = data.draw(vectors(plan))
    assume(_working(vector))
    rank = data.draw(st.integers(0, len(vector.ranks) - 1))
    ranks = [attrs.evolve(submitted, captured=True) for submitted in vector.ranks]
    before = agree(Dispatcher(plan), attrs.evolve(vector, ranks=tuple(ranks)))
    ranks[rank] = attrs.evolve(ranks[rank], captured=False)
    after = agree(Dispatcher(plan), attrs.evolve(vector, ranks=tuple(ranks)))
    expected = before.reason if before.entry is None else Reason.RANK
    assert {answer.dispatch.mode for answer in after.answers} == {GraphMode.NONE}
    assert {answer.dispatch.reason for answer in after.answers} == {expected}


@given(ANY_PLAN, st.data())
def test_lost_entries_are_as_if_never_planned(plan, data):
    """Law 8: all ranks answer as for a plan without them, wherever they were lost."""
    vector = data.draw(vectors(plan))
    vector = attrs.evolve(vector, ranks=tuple(attrs.evolve(s, captured=True) for s in vector.ranks))
    lost = frozenset().union(*(submitted.missing for submitted in vector.ranks))
    poorer = replace(
        plan,
        roles=tuple(
            replace(role, entries=tuple(e for e in role.entries if e not in lost)) if role.role is vector.role else role
            for role in plan.roles
        ),
    )
    whole = attrs.evolve(vector, ranks=tuple(attrs.evolve(s, missing=frozenset()) for s in vector.ranks))
    assert agree(Dispatcher(plan), vector).entry == agree(Dispatcher(poorer), whole).entry


@given(plans(max_reqs=12, max_tokens=48), st.data())
def test_joint_batches_have_an_entry_or_a_waiver(plan, data):
    """Law 8 with law 1: what the limits admit on each rank, they admit as the joint batch."""
    role = data.draw(st.sampled_from(plan.roles))
    every = list(reference.admissible(plan, role))
    assume(every)
    drawn = data.draw(st.lists(st.sampled_from(every), min_size=2, max_size=8))
    vector = Vector(role=role.role, ranks=tuple(Submission(batch=batch) for batch in drawn))
    agreement = agree(Dispatcher(plan), vector)
    assert agreement.reason not in (Reason.NOT_ADMISSIBLE, Reason.UNCOVERED, Reason.RANK, Reason.IDLE)
    assert agreement.entry is not None or agreement.answers[0].dispatch.waiver in role.waivers
