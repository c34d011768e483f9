"""The scheduler: laws of every batch that it hands out, over whole simulated runs.

The model is a function of the tokens so far; drafts are right as often as an example says.
"""

import random
from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import decode_families, is_admissible, kind_of
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.scheduler import Scheduler
from capture_planner.runtime.serving.speculative import settle
from capture_planner.runtime.serving.workload import Request

VOCABULARY = 3


@attrs.frozen(kw_only=True)
class Case:
    """A deployment, its requests, and how good the drafter is."""

    limits: Limits
    speculative: Speculative | None
    requests: tuple[Request, ...]
    pages: PageFormat
    max_model_len: int
    chance: float = 0.5
    seed: int = 0
    lora: Lora | None = None
    parallel: Parallel = attrs.Factory(Parallel)

    @property
    def most_drafts(self):
        """K."""
        return 0 if self.speculative is None else self.speculative.num_tokens

    def k(self, num_reqs):
        """Drafts that the schedule has for so many requests."""
        return 0 if self.speculative is None else self.speculative.draft_tokens(num_reqs)


@attrs.frozen(kw_only=True)
class Row:
    """One request when a batch was made. ``count`` is None where it has a place and no row."""

    name: str
    state_index: int
    pages: tuple[int, ...]
    table: tuple[int, ...]
    prompt: int
    length: int
    computed: int
    following: tuple[int, ...]
    """The tokens to verify."""
    proposed: tuple[int, ...]
    """What the drafter said."""
    last: int
    """The last settled token."""
    drafts: int = 0
    count: int | None = None

    @property
    def past_prompt(self):
        """Whether it decodes."""
        return self.computed >= self.prompt


@attrs.frozen(kw_only=True)
class Moment:
    """One step: everybody who had a place, in order of admission, and what was handed out."""

    running: tuple[Row, ...]
    rows: tuple[Row, ...]
    admitted: tuple[str, ...]
    waiting: int
    num_tokens: int
    query_len: int | None
    prompts: int
    draft_tokens: int


def say(tokens):
    """Return the next token of a sequence, as a model would: of all that came before."""
    return (sum(tokens) + 5 * len(tokens) + tokens[-1]) % VOCABULARY


def scheduler_of(case):
    """Make the scheduler of a case."""
    return Scheduler(
        case.requests,
        limits=case.limits,
        speculative=case.speculative,
        pages=case.pages,
        max_model_len=case.max_model_len,
    )


def simulate(case):
    """Serve everything, as the runner does with a model; return the scheduler, moments and outputs."""
    scheduler, chosen = scheduler_of(case), random.Random(case.seed)
    places, moments, outputs, proposed, now = scheduler.states, [], {}, {}, 0.0
    most = sum(request.length + 1 for request in case.requests) + len(case.requests)
    while not scheduler.done:
        assert len(moments) <= most, "a step without progress"
        scheduler.arrive(now, now)
        scheduled, admitted = scheduler.schedule()
        if scheduled is None:
            assert scheduler.next_arrival is not None, "nobody is served, and somebody waits"
            now = scheduler.next_arrival
            continue
        now += 1
        moments.append(moment(scheduler, scheduled, admitted, proposed))
        settled = settle(scheduled, places, np.array([*sampled(scheduled, places)], dtype=np.int64))
        for live, gained in zip(scheduled.live, settled.gained, strict=True):
            places.proposed[live.state_index] = scheduled.draft_tokens if gained else 0
            start = int(places.length[live.state_index])
            tokens = places.tokens[live.state_index, :start].tolist()
            for index in range(places.proposed[live.state_index]):
                right = say(tokens)
                tokens.append(right if chosen.random() < case.chance else (right + 1) % VOCABULARY)
                places.tokens[live.state_index, start + index] = tokens[-1]
            proposed[live.request.name] = tuple(tokens[start:])
            if start >= live.request.length:
                end = live.request.length
                outputs[live.request.name] = tuple(places.tokens[live.state_index, :end].tolist())
                scheduler.finish(live)
    return scheduler, moments, outputs


def sampled(scheduled, places):
    """Yield what the model says after each row that is read."""
    for place, count, drafts in zip(scheduled.state_indices, scheduled.counts, scheduled.drafts, strict=True):
        end = int(places.computed[place] + count)
        if end - drafts == places.length[place]:
            tokens = places.tokens[place, :end].tolist()
            yield from (say(tokens[: end - drafts + index]) for index in range(drafts + 1))


def moment(scheduler, scheduled, admitted, proposed):
    """Take down a step before it is settled."""
    given = {
        live.state_index: (int(count), int(drafts))
        for live, count, drafts in zip(scheduled.live, scheduled.counts, scheduled.drafts, strict=True)
    }
    places = scheduler.states

    def row(live):
        (count, drafts), tokens = given.get(live.state_index, (None, 0)), places.tokens[live.state_index]
        return Row(
            name=live.request.name,
            state_index=live.state_index,
            pages=tuple(live.pages),
            table=tuple(places.table[live.state_index].tolist()),
            prompt=int(places.prompt[live.state_index]),
            length=int(places.length[live.state_index]),
            computed=int(places.computed[live.state_index]),
            following=tuple(tokens[int(places.length[live.state_index]) :][:drafts].tolist()),
            proposed=proposed.get(live.request.name, ()),
            last=int(tokens[places.length[live.state_index] - 1]),
            count=count,
            drafts=drafts,
        )

    return Moment(
        running=tuple(row(live) for live in scheduler.unfinished),
        rows=tuple(row(live) for live in scheduled.live),
        admitted=tuple(live.request.name for live in admitted),
        waiting=scheduler.waiting,
        num_tokens=scheduled.num_tokens,
        query_len=scheduled.query_len,
        prompts=scheduled.prompts,
        draft_tokens=scheduled.draft_tokens,
    )


def schedule_of(chosen, most_drafts, max_num_reqs):
    """No schedule, or tiers in which k rises, falls and is 0."""
    tiers, first = [], 1
    for _ in range(chosen.choice((0, 1, 2, 3))):
        last = first + chosen.randrange(max(max_num_reqs // 2, 1))
        tiers.append((first, last, chosen.randint(0, most_drafts)))
        first = last + 1
    return tuple(tiers)


def requests_of(chosen, count, longest):
    """Requests of any share of prompt and output, that arrive in bursts."""
    for index, arrival in enumerate(sorted(chosen.choice((0, 0, 0, 1, 3, 9, 30)) for _ in range(count))):
        length = chosen.randint(2, longest)
        prompt = chosen.randint(1, chosen.choice((1, length - 1)))
        yield Request(
            name=f"r{index}",
            arrival=float(arrival),
            prompt=tuple(chosen.randrange(VOCABULARY) for _ in range(prompt)),
            max_new_tokens=length - prompt,
        )


@st.composite
def cases(draw, roomy=False):
    """A deployment under load; a roomy one has tokens for all its requests with all their drafts."""
    chosen = random.Random(draw(st.integers(0, 1 << 32)))
    max_num_reqs = draw(st.sampled_from((1, 2, 3, 5, 8)))
    k = draw(st.integers(0, 5))
    speculative = None
    if k:
        schedule = schedule_of(chosen, k, max_num_reqs)
        speculative = Speculative(method=Method.EAGLE, num_tokens=k, schedule=schedule)
    full = max_num_reqs * (1 + k)
    tokens = chosen.randint(full, full + 20) if roomy else chosen.randint(1, full)
    max_model_len = draw(st.sampled_from((2, 10, 40)))
    requests = tuple(requests_of(chosen, draw(st.sampled_from((1, 6, 16))), max_model_len))
    case = Case(
        limits=Limits(max_num_reqs=max_num_reqs, max_num_tokens=tokens),
        speculative=speculative,
        requests=requests,
        pages=PageFormat(page_size=draw(st.integers(1, 7)), num_pages=1024),
        max_model_len=max_model_len,
        chance=draw(st.sampled_from((0.0, 0.3, 0.8, 1.0))),
        seed=chosen.randrange(1 << 32),
    )
    needed = [scheduler_of(case).pages_needed(request) for request in requests]
    pages = draw(st.sampled_from((max(needed), max(needed) * 2, sum(needed))))
    return attrs.evolve(case, pages=attrs.evolve(case.pages, num_pages=1 + pages))


@st.composite
def crowds(draw):
    """Requests that all decode from the second step on, and more of them than have room for drafts."""
    k, count = draw(st.integers(1, 5)), draw(st.integers(2, 8))
    chosen = random.Random(draw(st.integers(0, 1 << 32)))
    requests = [
        Request(name=f"r{index}", arrival=0.0, prompt=(1,), max_new_tokens=chosen.randint(1, 30))
        for index in range(count)
    ]
    schedule = schedule_of(chosen, k, count)
    return Case(
        limits=Limits(max_num_reqs=count, max_num_tokens=draw(st.integers(count, count * (1 + k)))),
        speculative=Speculative(method=Method.EAGLE, num_tokens=k, schedule=schedule),
        requests=tuple(requests),
        pages=PageFormat(page_size=4, num_pages=1 + 10 * count),
        max_model_len=40,
        chance=draw(st.sampled_from((0.0, 0.5, 1.0))),
    )


ANY = cases(roomy=False) | cases(roomy=True)


@given(ANY)
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
