"""Random deployments of the scheduler, simulated step by step without a model."""

import random

import attrs
import numpy as np
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner_runner.ledger.rows import Wait
from capture_planner_runner.serving.scheduler import Scheduler
from capture_planner_runner.serving.speculative import settle
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request

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
    fewer: bool = False
    """Whether the drafter proposes fewer drafts in some steps."""

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
    waited_for: tuple[Wait | None, ...]
    """Of each that is admitted."""
    waiting: int
    num_tokens: int
    query_len: int | None
    max_query_len: int | None
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
    moments: list[Moment] = []
    proposed: dict[str, tuple[int, ...]] = {}
    places, outputs, now = scheduler.states, {}, 0.0
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
            count = scheduled.draft_tokens if gained else 0
            places.proposed[live.state_index] = chosen.randint(0, count) if case.fewer else count
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
        waited_for=tuple(live.waited_for for live in admitted),
        waiting=scheduler.waiting,
        num_tokens=scheduled.num_tokens,
        query_len=scheduled.query_len,
        max_query_len=scheduled.max_query_len,
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


@st.composite
def varying(draw):
    """Drafters that propose as many drafts as they like, and a target that verifies just those."""
    case = draw((ANY | crowds()).filter(lambda case: case.speculative is not None))
    speculative = replace(case.speculative, varying_decodes=(Role.TARGET,))
    return attrs.evolve(case, speculative=speculative, fewer=draw(st.booleans()))


ANY = cases(roomy=False) | cases(roomy=True)
