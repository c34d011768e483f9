"""Arrivals: a jump over steps that are alike is the same as one step at a time, with any times and acceptance."""

import math
from collections import Counter, deque

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.analysis.arrivals import MOST_BLOCKS, OrderedBlocks, for_role, latency_of, simulate
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import decode_families
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits, Parallel


@attrs.frozen
class Request:
    """A request of a trace."""

    arrival: float
    prompt: int
    output: int


@attrs.frozen
class SmallDeployment:
    """What batches come from, and nothing else."""

    limits: Limits
    speculative: Speculative | None = None
    acceptance: tuple[float, ...] = ()
    lora: None = None
    parallel: Parallel = attrs.Factory(Parallel)


def traces():
    """Short traces of short requests, at sixteenths of a second."""
    request = st.builds(
        Request,
        arrival=st.integers(0, 48).map(lambda at: at / 16),
        prompt=st.integers(1, 40),
        output=st.integers(1, 30),
    )
    return st.lists(request, min_size=1, max_size=12)


@st.composite
def deployed(draw):
    """Limits, speculation, and how many drafts are accepted."""
    speculative, acceptance = None, ()
    if draw(st.booleans()):
        last = draw(st.integers(1, 6))
        schedule = draw(st.sampled_from(((), ((1, last, 3), (last + 1, 99, 1)))))
        method = draw(st.sampled_from((Method.EAGLE, Method.DRAFT_MODEL)))
        speculative = Speculative(method=method, num_tokens=3, schedule=schedule)
        acceptance = draw(st.sampled_from(((), (0.75,), (0.75, 0.5, 0.25), (1.0, 1.0, 1.0))))
    most = draw(st.integers(1, 8))
    limits = Limits(max_num_reqs=most, max_num_tokens=draw(st.integers(most + 4, 48)))
    return SmallDeployment(limits, speculative, acceptance)


TIMES = {
    "alike": lambda batch: 62.5,
    "by tokens": lambda batch: 31.25 * (1 + batch.num_tokens // 8),
    "slow prompts": lambda batch: 62.5 if batch.past_prompt else 250.0,
}


def step_by_step(requests, deployment, step_time, window=(0.0, math.inf)):
    """The same scheduler without a jump: one step at a time, a list of requests, each with its own numbers."""
    limits, speculative = deployment.limits, deployment.speculative
    slots = 0 if speculative is None else speculative.extra_slots

    def drafts(count):
        return 0 if speculative is None else speculative.draft_tokens(count)

    def tokens_of(count):
        return 1 + sum(deployment.acceptance[: drafts(count)])

    queue, running = deque(sorted(requests, key=lambda request: request.arrival)), []
    clock, steps, first, later = 0.0, [], [], []
    while queue or running:
        clock = clock if running else max(clock, queue[0].arrival)
        while queue and queue[0].arrival <= clock and len(running) < limits.max_num_reqs:
            running.append({"request": queue[0], "prompt": queue[0].prompt, "output": float(queue.popleft().output)})
        decoding = [live for live in running if not live["prompt"]]
        each, chunks = 1 + drafts(len(running)), []
        left = limits.max_num_tokens - len(decoding) * (each + slots)
        for live in running:
            if live["prompt"] and left > slots:
                chunks.append((live, min(left - slots, live["prompt"])))
                left -= chunks[-1][1] + slots
        share, gained = 1.0, tokens_of(len(running))
        if chunks:
            total = len(decoding) * each + sum(chunk for _, chunk in chunks)
            batch = Batch.mixed(Role.TARGET, len(decoding) + len(chunks), total)
        else:
            count = len(decoding)
            while count > 1 and count * (1 + drafts(count) + slots) > limits.max_num_tokens:
                count -= 1
            batch = Batch.decode(Role.TARGET, count, min(1 + drafts(count), limits.max_num_tokens - slots))
            share, gained = count / len(decoding), 1 + sum(deployment.acceptance[: batch.num_tokens // count - 1])
        seconds = step_time(batch) / 1000
        counts = window[0] <= clock < window[1]
        if counts:
            steps.append(batch)
            later += [seconds * 1000 / share] * round(len(decoding) * share)
        clock += seconds
        for live in decoding:
            live["output"] -= gained * share
        for live, chunk in chunks:
            live["prompt"] -= chunk
            if not live["prompt"]:
                live["output"] -= 1
                if window[0] <= live["request"].arrival < window[1]:
                    first.append((clock - live["request"].arrival) * 1000)
        running = [live for live in running if live["prompt"] or live["output"] > 1e-6]
        if clock >= window[1]:
            break
    return steps, first, later


def simulated(requests, deployment, step_time, **more):
    return simulate(
        requests, deployment.limits, deployment.speculative, step_time, acceptance=deployment.acceptance, **more
    )


def rounded(values):
    return Counter(round(value, 6) for value in values)


@pytest.mark.parametrize("times", TIMES)
@given(traces(), deployed(), st.sampled_from(((0.0, math.inf), (0.0, 1.5), (1.5, math.inf), (0.5, 1.0))))
def test_jumps_equal_single_steps(times, requests, deployment, window):
    """Batches in their order, and what requests wait. Times are binary fractions: sums are exact."""
    found = simulated(requests, deployment, TIMES[times], window=window)
    steps, first, later = step_by_step(requests, deployment, TIMES[times], window)
    assert found.counts == Counter(steps)
    assert rounded(found.first_token.elements()) == rounded(first)
    assert rounded(found.inter_token.elements()) == rounded(later)
    at = 0
    for block in found.blocks:
        assert block == Counter(steps[at : at + block.total()])
        at += block.total()
    assert at == len(steps)


@given(traces(), deployed())
def test_batches_compute_every_token(requests, deployment):
    """Prompts whole, and each output but its last token, by batches that the limits admit."""
    found = simulated(requests, deployment, TIMES["alike"]).counts
    limits = deployment.limits
    assert all(batch.num_reqs <= limits.max_num_reqs for batch in found)
    assert all(batch.num_reqs <= batch.num_tokens <= limits.max_num_tokens for batch in found)
    if deployment.speculative is None:
        tokens = sum(batch.num_tokens * times for batch, times in found.items())
        assert tokens == sum(each.prompt + each.output - 1 for each in requests)


@given(traces(), deployed())
def test_accepted_drafts_only_shorten(requests, deployment):
    """With all drafts accepted there are no more steps than with none, if steps take alike."""
    assume(deployment.speculative is not None)
    none, every = (
        sum(simulated(requests, attrs.evolve(deployment, acceptance=each), TIMES["alike"]).counts.values())
        for each in ((), (1.0, 1.0, 1.0))
    )
    assert every <= none


def test_a_slower_deployment_meets_larger_batches():
    """The loop is closed: with steps of twice the time, twice as many requests run."""
    requests = [Request(index / 50, 1, 100) for index in range(2000)]
    fast, slow = (
        simulate(requests, Limits(max_num_reqs=512, max_num_tokens=8192), None, lambda batch, ms=ms: ms).counts
        for ms in (5.0, 10.0)
    )
    means = [sum(batch.num_reqs * count for batch, count in each.items()) / each.total() for each in (fast, slow)]
    assert means[1] == pytest.approx(2 * means[0], rel=0.1)


def test_latency_of_one_request():
    """Its prompt in two steps, then a token a step."""
    found = simulate([Request(0.25, 12, 5)], Limits(max_num_reqs=4, max_num_tokens=8), None, lambda batch: 10.0)
    latency = latency_of([found])
    assert (latency.first_token_p50, latency.first_token_p99) == pytest.approx((20, 20))
    assert (latency.inter_token_p50, latency.inter_token_p99) == pytest.approx((10, 10))
    assert found.seconds == pytest.approx(0.06)
    alone = simulate([Request(0, 1, 1)], Limits(max_num_reqs=4, max_num_tokens=8), None, lambda batch: 10.0)
    assert latency_of([alone]) is None


@given(traces(), deployed())
def test_draft_batches_follow_the_targets(requests, deployment):
    """Draft prefill on the same batches, and k - 1 decodes of one token after each."""
    found = simulated(requests, deployment, TIMES["alike"]).counts
    prefill = for_role(found, Role.DRAFT_PREFILL, ())
    assert {attrs.evolve(batch, role=Role.TARGET): times for batch, times in prefill.items()} == found
    decodes = for_role(found, Role.DRAFT_DECODE, decode_families(Role.DRAFT_DECODE, deployment))
    wanted = Counter()
    for batch, times in found.items() if deployment.speculative is not None else ():
        wanted[batch.num_reqs] += times * max(deployment.speculative.draft_tokens(batch.num_reqs) - 1, 0)
    assert Counter({batch.num_reqs: times for batch, times in decodes.items()}) == +wanted


@given(st.dictionaries(st.tuples(st.integers(1, 8), st.integers(0, 2)), st.integers(1, 9)))
def test_drafters_run_every_batch_of_the_target(counts):
    """Without its adapters: batches that differ in them alone are added up."""
    met = Counter({Batch.decode(Role.TARGET, reqs, 2, loras): times for (reqs, loras), times in counts.items()})
    speculative = Speculative(method=Method.EAGLE, num_tokens=2)
    deployment = SmallDeployment(Limits(max_num_reqs=8, max_num_tokens=48), speculative, ())
    families = decode_families(Role.DRAFT_DECODE, deployment)
    for role in Role:
        assert for_role(met, role, families).total() == met.total()


@given(st.lists(st.integers(0, 5), max_size=400), st.integers(1, 9))
def test_blocks_are_stretches_in_order(values, length):
    """All of it in its order, in no more blocks than the most; alike but the last."""
    blocks: OrderedBlocks[int] = OrderedBlocks(length)
    for value in values:
        assert blocks.room >= 1
        blocks.add({value: 1}, 1)
    at, found = 0, blocks.blocks
    for block in found:
        assert block == Counter(values[at : at + block.total()])
        at += block.total()
    assert at == len(values)
    assert len(found) <= MOST_BLOCKS
    sizes = [block.total() for block in found]
    assert len(set(sizes[:-1])) <= 1
    if len(sizes) > 1:
        assert sizes[0] / 2 <= sizes[-1] < 1.5 * sizes[0]
    if len(values) >= MOST_BLOCKS * length:
        assert len(found) >= MOST_BLOCKS // 2
    blocks.rename(lambda value: value // 2)
    assert sum(blocks.blocks, Counter()) == Counter(value // 2 for value in values)
