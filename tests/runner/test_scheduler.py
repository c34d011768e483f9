"""The scheduler: laws of every batch that it hands out, over whole simulated runs.

The model is a function of the tokens so far; drafts are right as often as an example says.
"""

import random
from collections import Counter

import attrs
import pytest
from hypothesis import event, given

from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import decode_families, is_admissible, kind_of
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits
from capture_planner_runner.ledger.rows import Wait
from capture_planner_runner.serving.scheduler import Scheduler
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request
from support.scheduling import ANY, Case, cases, crowds, say, scheduler_of, simulate, varying


@given(ANY | varying())
def test_every_request_is_served_with_what_the_model_says(case):
    """Whatever is drafted, and however the prompt is cut into chunks: greedy output, all of it."""
    scheduler, moments, outputs = simulate(case)
    expected = {}
    for request in case.requests:
        tokens = list(request.prompt)
        while len(tokens) < request.length:
            tokens.append(say(tokens))
        expected[request.name] = tuple(tokens)
    assert outputs == expected
    assert scheduler.done
    assert not scheduler.waiting
    assert scheduler.next_arrival is None
    event(f"steps in which somebody has no row: {any(len(m.rows) < len(m.running) for m in moments)}")


@given(ANY | crowds())
def test_every_batch_is_one_that_the_plan_covers(case):
    """Target, draft prefill and draft decodes are admissible; nobody has two rows or none of one."""
    families = {role: decode_families(role, case) for role in Role}
    for m in simulate(case)[1]:
        assert all(row.count >= 1 and 0 <= row.drafts < row.count for row in m.rows)
        assert len({row.name for row in m.rows}) == len({row.state_index for row in m.rows}) == len(m.rows)
        assert m.num_tokens == sum(row.count for row in m.rows)
        assert m.prompts == sum(not row.past_prompt for row in m.rows)
        assert m.draft_tokens == case.k(len(m.rows))
        counts = {row.count for row in m.rows}
        assert m.query_len == (counts.pop() if len(counts) == 1 else None)
        for role in (Role.TARGET, Role.DRAFT_PREFILL):
            batch = Batch(
                role=role,
                num_reqs=len(m.rows),
                num_tokens=m.num_tokens,
                query_len=m.query_len,
                past_prompt=m.prompts == 0,
            )
            assert is_admissible(batch, case, families[role])
        if m.draft_tokens > 1:
            batch = Batch(role=Role.DRAFT_DECODE, num_reqs=len(m.rows), num_tokens=len(m.rows), query_len=1)
            assert is_admissible(batch, case, families[Role.DRAFT_DECODE])


def wanted_query_len(case, m):
    """The query length of these decodes; None where the model's end, or limits below 1 + k, cut drafts."""
    k, most = case.k(len(m.rows)), case.limits.max_num_tokens
    near_the_end = any(case.max_model_len - 1 - row.computed < k for row in m.rows)
    decodes = sum(row.past_prompt for row in m.running)
    fits = any(count * (1 + case.k(count)) <= most for count in range(1, decodes + 1))
    return 1 + k if fits and not near_the_end else None


@given(ANY | crowds())
def test_decodes_alone_are_uniform(case):
    """Every row has one token and all drafts of its batch size: a uniform decode graph serves it."""
    families = decode_families(Role.TARGET, case)
    for m in simulate(case)[1]:
        if m.prompts == 0 and (wanted := wanted_query_len(case, m)):
            assert m.query_len == wanted
            batch = Batch(role=Role.TARGET, num_reqs=len(m.rows), num_tokens=m.num_tokens, query_len=m.query_len)
            assert kind_of(batch, families) is Kind.DECODE


@pytest.mark.parametrize("schedule", [(), ((1, 2, 1), (3, 5, 2))])
def test_decodes_that_hold_a_prompt_back_are_uniform_too(schedule):
    """Four decodes take all 5 tokens; the fifth request has no chunk, and the batch is decodes alone."""
    requests = [
        Request(name=f"r{index}", arrival=float(4 * (index == 4)), prompt=(1,), max_new_tokens=12) for index in range(5)
    ]
    case = Case(
        limits=Limits(max_num_reqs=5, max_num_tokens=5),
        speculative=Speculative(method=Method.EAGLE, num_tokens=2, schedule=schedule),
        requests=tuple(requests),
        pages=PageFormat(page_size=4, num_pages=64),
        max_model_len=32,
        chance=0.0,
    )
    alone = [m for m in simulate(case)[1] if m.prompts == 0]
    assert [m.query_len for m in alone] == [wanted_query_len(case, m) for m in alone]


@given(crowds())
def test_drafts_are_what_was_proposed_and_then_the_last_token_again(case):
    """Proposals are verified as they are; a row with too few is filled up to be like the others."""
    filled = 0
    for m in simulate(case)[1]:
        for row in m.rows:
            kept = row.proposed[: row.drafts]
            assert row.following == kept + (row.last,) * (row.drafts - len(kept))
            filled += len(kept) < row.drafts
    event(f"a row was filled up: {filled > 0}")


@given(varying())
def test_varying_decodes_verify_the_drafts_that_they_have(case):
    """Nothing is filled up, and nothing is verified beyond a request's last token; such decodes have a graph's kind."""
    families, ends = decode_families(Role.TARGET, case), {each.name: each.length for each in case.requests}
    differ = 0
    for m in simulate(case)[1]:
        for row in (row for row in m.rows if row.past_prompt):
            wanted = min(len(row.proposed), ends[row.name] - row.length - 1, case.max_model_len - 1 - row.computed)
            assert row.drafts <= max(min(wanted, case.k(len(m.rows)) if m.prompts == 0 else case.most_drafts), 0)
            assert row.following == row.proposed[: row.drafts]
            # Only the limit on tokens cuts more.
            whole = m.num_tokens + case.most_drafts < case.limits.max_num_tokens
            assert not (whole and m.prompts == 0) or row.drafts == max(min(wanted, m.draft_tokens), 0)
        assert (m.max_query_len is None) == (m.prompts > 0 or m.query_len is not None)
        if m.prompts == 0 and any(len(m.rows) in family.requests for family in families):
            batch = Batch(
                role=Role.TARGET,
                num_reqs=len(m.rows),
                num_tokens=m.num_tokens,
                query_len=m.query_len,
                max_query_len=m.max_query_len,
            )
            assert kind_of(batch, families) is Kind.DECODE
            differ += m.query_len is None
    event(f"decodes differ: {differ > 0}")


@given(ANY)
def test_no_page_has_two_owners(case):
    """Each request keeps its pages while it has a place, none is the null page, and all come back."""
    scheduler, moments, _ = simulate(case)
    for m in moments:
        owned = Counter(page for row in m.running for page in row.pages)
        assert not owned or max(owned.values()) == 1
        assert set(owned) <= set(range(1, case.pages.num_pages))
        for row in m.running:
            assert row.table == row.pages + (0,) * (len(row.table) - len(row.pages))
    before = {}
    for m in moments:
        assert all(before.get(row.name, row.pages) == row.pages for row in m.running)
        before |= {row.name: row.pages for row in m.running}
    assert scheduler._pool.free == case.pages.num_pages - 1
    assert sorted(scheduler._free) == list(range(case.limits.max_num_reqs))


@given(ANY)
def test_every_token_has_a_slot_of_its_own_request(case):
    """Positions stay below the model's end and within the pages that were taken; tokens follow on."""
    computed = {}
    for m in simulate(case)[1]:
        for row in m.running:
            assert row.computed == row.length - 1 if row.past_prompt else row.length == row.prompt
            assert row.computed >= computed.get(row.name, 0)
            computed[row.name] = row.computed
        for row in m.rows:
            last = row.computed + row.count - 1
            assert last < case.max_model_len
            assert last // case.pages.page_size < len(row.pages)
            if row.past_prompt:
                assert row.count == 1 + row.drafts
            else:
                assert row.drafts == 0
                assert row.computed + row.count <= row.prompt


@given(ANY)
def test_admission_is_in_order_of_arrival(case):
    """Nobody overtakes in the queue, and a place stays empty only if the first in the queue has no pages."""
    scheduler, moments, _ = simulate(case)
    admitted = [name for m in moments for name in m.admitted]
    assert admitted == [request.name for request in case.requests]
    by_name, entered = {request.name: request for request in case.requests}, 0
    for m in moments:
        entered += len(m.admitted)
        if m.waiting and len(m.running) < case.limits.max_num_reqs:
            free = case.pages.num_pages - 1 - sum(len(row.pages) for row in m.running)
            assert scheduler.pages_needed(case.requests[entered]) > free
        order = [row.name for row in m.running]
        assert order == sorted(order, key=admitted.index)
        assert len(m.running) <= case.limits.max_num_reqs
        for row in m.running:
            assert len(row.pages) == scheduler.pages_needed(by_name[row.name])


@given(cases(roomy=True))
def test_where_there_is_room_every_decode_has_a_row_and_prompts_go_on(case):
    """A step with tokens for everybody serves all decodes with all drafts, and the oldest prompt."""
    for m in simulate(case)[1]:
        assert all(row.count is not None for row in m.running if row.past_prompt)
        prompting = [row for row in m.running if not row.past_prompt]
        assert not prompting or prompting[0].count is not None


@given(ANY | crowds())
def test_prompts_go_by_age_after_all_decodes(case):
    """A chunk is for the oldest prompt first, and only where every decode has a row.

    So decodes end, and the oldest prompt is next: nobody waits for ever.
    """
    for m in simulate(case)[1]:
        if m.prompts:
            order = [row for row in m.running if row.past_prompt]
            order += [row for row in m.running if not row.past_prompt]
            assert list(m.rows) == order[: len(m.rows)]
            # Chunks are cut by the limit alone.
            whole = all(row.past_prompt or row.computed + row.count == row.prompt for row in m.rows)
            assert (whole and len(m.rows) == len(order)) or m.num_tokens == case.limits.max_num_tokens


@given(cases() | crowds())
def test_decodes_without_room_for_all_take_turns(case):
    """While the same requests decode alone, each has a row at least every ``ceil(all / rows)`` steps."""
    skipped, turns, before = Counter(), 0, set()
    for m in simulate(case)[1]:
        decodes = [row for row in m.running if row.past_prompt]
        if m.prompts or {row.name for row in decodes} != before:
            skipped.clear()
        before = {row.name for row in decodes}
        for row in decodes if m.prompts == 0 else ():
            skipped[row.name] = 0 if row.count is not None else skipped[row.name] + 1
            turns += skipped[row.name]
            assert skipped[row.name] < -(-len(decodes) // len(m.rows))
    event(f"somebody was skipped: {turns > 0}")


@given(ANY)
def test_arrivals_come_when_their_time_has(case):
    """``arrive`` queues those whose time has come, earliest first, and says when the next one comes."""
    shuffled = list(case.requests)
    random.Random(case.seed).shuffle(shuffled)
    scheduler = scheduler_of(attrs.evolve(case, requests=tuple(shuffled)))
    for now in range(35):
        scheduler.arrive(float(now), 0.0)
        later = [request.arrival for request in case.requests if request.arrival > now]
        assert scheduler.waiting == len(case.requests) - len(later)
        assert scheduler.next_arrival == min(later, default=None)
        assert not scheduler.done


@pytest.mark.parametrize("lookahead", [0, 3])
def test_pages_are_for_prompt_output_and_drafts_within_the_model(lookahead):
    """10 + 5 tokens and K drafts in pages of 4, and never more than the model is long."""
    speculative = Speculative(method=Method.EAGLE, num_tokens=lookahead) if lookahead else None

    def needed(max_model_len):
        scheduler = Scheduler(
            (),
            limits=Limits(max_num_reqs=1, max_num_tokens=8),
            speculative=speculative,
            pages=PageFormat(page_size=4, num_pages=9),
            max_model_len=max_model_len,
        )
        return scheduler.pages_needed(Request(name="r", arrival=0.0, prompt=(1,) * 10, max_new_tokens=5))

    assert needed(100) == (5 if lookahead else 4)
    assert needed(16) == 4


@given(ANY | crowds())
def test_requests_that_wait_know_what_for(case):
    """Those that were left over a step ago: for a place if all were taken, and for pages else."""
    stalled, was_full = 0, False
    for m in simulate(case)[1]:
        wait = Wait.PLACES if was_full else Wait.PAGES
        expected = [wait if place < stalled else None for place in range(len(m.admitted))]
        assert list(m.waited_for) == expected
        stalled, was_full = m.waiting, len(m.running) == case.limits.max_num_reqs
