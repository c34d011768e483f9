"""Judging: what steps take, added up a second time from a list of all steps."""

from __future__ import annotations

from math import ceil

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import Judgement, Prices, Steps, judge, passes_of
from capture_planner.planning.sizing import Ladder
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import Domain, query_len_of
from capture_planner.records.model import Method, Speculative
from capture_planner.records.profile import ExpertCost, Overhead, Profile
from capture_planner.records.spec import Limits, Parallel, Spec
from support.measured import MODEL, lines, profile

FULL, PIECEWISE, EAGER = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE
MODES = st.sampled_from((EAGER, PIECEWISE, FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE))


@st.composite
def deployments(draw: st.DrawFn) -> Spec:
    """Draw a deployment with or without drafts, of which the last requests may have fewer."""
    k = draw(st.sampled_from((0, 2, 3, 4)))
    schedule = ((1, 3, k), (4, 8, max(k - 2, 1))) if k and draw(st.booleans()) else ()
    speculative = Speculative(method=Method.EAGLE3, num_tokens=k, schedule=schedule) if k else None
    return Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=8, max_num_tokens=64),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend="alpha",
        speculative=speculative,
        parallel=draw(st.sampled_from((Parallel(), Parallel(tensor=2, sequence=True)))),
    )


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Draw a time for every family, so that none is taken from another; steps of 0.25 are added up exactly."""
    families = [
        *(
            (role, mode, each, None)
            for role in Role
            for mode in (FULL, PIECEWISE, EAGER)
            for each in (None, *range(1, 6))
        ),
        *(
            (Role.DRAFT_DECODE, mode, each, steps)
            for mode in (FULL, PIECEWISE, EAGER)
            for each in (None, 1)
            for steps in range(1, 4)
        ),
    ]
    start = draw(st.integers(1, 9))
    curves = lines(families, (1, 64), lambda index: (start + index * 0.25, start + index * 0.25 + 15.75))
    apart = draw(st.sampled_from((0.0, 0.5)))
    ways = draw(
        st.sets(st.sampled_from([(mode, length) for mode in (EAGER, PIECEWISE, FULL) for length in (None, 1, 2)]))
    )
    return replace(
        profile(),
        curves=curves,
        overheads=tuple(
            Overhead(mode=mode, query_len=length, milliseconds=draw(st.sampled_from((0.5, 1.0, 4.0))), steps=1)
            for mode, length in sorted(ways, key=str)
        ),
        step_milliseconds=apart,
        step_milliseconds_per_request=apart / 2,
        experts=tuple(
            ExpertCost(role=role, tokens=(64,), milliseconds=(milliseconds,))
            for role, milliseconds in zip(Role, draw(st.sampled_from(((), (16.0, 8.0, 1.0)))), strict=False)
        ),
    )


@st.composite
def batches(draw: st.DrawFn, spec: Spec) -> Batch:
    number = draw(st.integers(1, 8))
    if draw(st.booleans()):
        return Batch.decode(Role.TARGET, number, query_len_of(Role.TARGET, spec, number))
    return Batch.mixed(Role.TARGET, number, draw(st.integers(number, 64)))


def time_of(known: Profile, key: tuple[Role, GraphMode, int | None, int | None], tokens: int) -> float:
    """Return the time of exactly that family."""
    (curve,) = [each for each in known.curves if each.key == key]
    return curve.milliseconds[0] + 0.25 * (tokens - 1)


def beyond(known: Profile, key: tuple[Role, GraphMode, int | None, int | None], tokens: int) -> float:
    """Return the time of a graph of exactly that family; beyond 64 tokens in proportion, or that of an eager pass."""
    if tokens <= 64:
        return time_of(known, key, tokens)
    return time_of(known, key, 64) * tokens / 64


def entry_for(batch: Batch, mode: GraphMode, repeats: int, fused: bool) -> Entry | None:
    """Return a graph of a batch with one token, or one request, of padding."""
    if mode is EAGER:
        return None
    each = batch.uniform_query_len if mode is FULL else None
    steps = repeats if fused and mode is FULL and batch.role is Role.DRAFT_DECODE else None
    reqs = batch.num_reqs + 1
    tokens = batch.num_tokens + 1 if each is None else reqs * each
    return Entry(
        mode=mode, num_tokens=tokens, num_reqs=None if mode is PIECEWISE else reqs, query_len=each, draft_steps=steps
    )


@settings(max_examples=max(settings.default.max_examples, 40))
@given(deployments(), profiles(), st.data())
def test_a_judgement_adds_up_the_passes_of_every_step(spec: Spec, known: Profile, data: st.DataObject) -> None:
    """The mean, the share of steps with an eager pass, and the times; each pass by its own entry or its eager time."""
    counts = data.draw(st.dictionaries(batches(spec), st.integers(1, 5), max_size=4))
    floors = [data.draw(st.sampled_from((0.0, 20.0, 60.0))) for _ in known.overheads]
    overheads = zip(known.overheads, floors, strict=True)
    known = replace(known, overheads=tuple(replace(each, floor=floor) for each, floor in overheads))
    modes = st.sampled_from((EAGER, PIECEWISE, FULL))
    served = {(role, odd): data.draw(modes) for role in Role for odd in (0, 1)}
    fused = data.draw(st.booleans())
    chains = {(each, repeats) for batch in counts for each, repeats in passes_of(batch, spec)}
    answers = {
        each: entry_for(each, served[each.role, each.num_tokens % 2], repeats, fused) for each, repeats in chains
    }
    costs = Costs(known)
    found = judge(answers.__getitem__, Steps(counts), costs, spec, dict.fromkeys(Role, GraphMode.FULL_AND_PIECEWISE))
    every: list[float] = []
    eager = 0
    for batch, count in counts.items():
        passes = list(passes_of(batch, spec))
        base = min((each.milliseconds for each in known.overheads), default=known.step_milliseconds)
        apart = base + known.step_milliseconds_per_request * batch.num_reqs
        total = apart
        for each, repeats in passes:
            entry = answers[each]
            if entry is None:
                chain = repeats if each.role is Role.DRAFT_DECODE else None
                time = time_of(known, (each.role, EAGER, each.uniform_query_len, chain), each.num_tokens)
            else:
                key = each.role, entry.mode, entry.query_len, entry.draft_steps
                time = beyond(known, key, entry.num_tokens) * (1 if entry.draft_steps else repeats)
                time += known.expert_milliseconds(each.role, each.num_tokens) * repeats
            if not each.role.is_drafter:
                mode, length = (EAGER, each.uniform_query_len) if entry is None else (entry.mode, entry.query_len)
                tokens, experts = each.num_tokens if entry is None else entry.num_tokens, known.expert_milliseconds
                # The host's time is that of all passes: the draft prefill of as many tokens has a part of it.
                prefill = beyond(known, (Role.DRAFT_PREFILL, mode, length, None), tokens)
                prefill -= experts(Role.DRAFT_PREFILL, tokens) if mode is EAGER else 0.0
                held = known.floor(mode, length) - prefill + experts(each.role, each.num_tokens)
                time = max(time, held if known.floor(mode, length) else 0.0) + known.overhead(mode, length) - base
            total += time
        every += [total] * count
        eager += count * any(answers[each] is None for each, _ in passes)
    every.sort()
    assert found.steps == len(every)
    prices = Prices(costs, spec, dict.fromkeys(Role, GraphMode.FULL_AND_PIECEWISE))
    best = 0.0
    for batch, count in counts.items():
        passes = (
            prices.with_every_size(each, repeats, fused=answers[each] is not None and bool(answers[each].draft_steps))
            for each, repeats in passes_of(batch, spec)
        )
        best += known.step(batch.num_reqs, sum(passes)) * count
    assert found.every_size_ms == pytest.approx(best / max(len(every), 1))
    assert found.mean_step_ms == pytest.approx(sum(every) / max(len(every), 1))
    assert found.eager_share == eager / max(len(every), 1)
    assert [time for time, count in found.times for _ in range(count)] == pytest.approx(every)
    assert len(dict(found.times)) == len(found.times)
    for percent in (0, 1, 50, 90, 100):
        place = max(ceil(len(every) * percent / 100 - 1e-9), 1) - 1
        assert found.percentile(percent) == (pytest.approx(every[place]) if every else 0)


@settings(max_examples=max(settings.default.max_examples, 40))
@given(deployments(), profiles(), MODES, st.integers(0, 2), st.data())
def test_every_size_is_the_batch_itself_in_the_mode_of_its_role(
    spec: Spec, known: Profile, mode: GraphMode, fused: int, data: st.DataObject
) -> None:
    """Decodes of their own query length, mixed batches as mixed; aligned; chains in one graph or in single steps."""
    batch = data.draw(batches(spec))
    decode = batch.query_len is not None and batch.past_prompt
    prices = Prices(Costs(known), spec, dict.fromkeys(Role, mode))
    speculative = spec.speculative
    ladders = []
    if fused and speculative is not None:
        ladders = [_chain(k - 1) for k in {speculative.num_tokens, *(k for *_, k in speculative.schedule)} if k > 1]
    found = prices.on_every_size(batch, {ladder.draft_steps for ladder in ladders})
    for (each, repeats), every in zip(passes_of(batch, spec), found, strict=True):
        own = decode or each.role is Role.DRAFT_DECODE
        lowered = mode.decode_mode if own else mode.mixed_mode
        length = each.query_len if own and mode.is_separate else None
        step = 2 if spec.parallel.sequence else 1
        tokens = -(-each.num_tokens // step) * step
        chain = repeats if ladders and each.role is Role.DRAFT_DECODE else None
        fixed = 0.0 if each.role.is_drafter else known.base_overhead
        eager = time_of(
            known,
            (each.role, EAGER, each.uniform_query_len, repeats if each.role is Role.DRAFT_DECODE else None),
            each.num_tokens,
        ) + (fixed and known.overhead(EAGER, each.uniform_query_len) - fixed)
        one = eager
        if lowered is not EAGER:
            family = each.role, lowered, length, chain
            one = beyond(known, family, tokens) * (1 if chain else repeats)
            one += fixed and known.overhead(lowered, length) - fixed
            one += known.expert_milliseconds(each.role, each.num_tokens) * repeats
        if not (own and mode.is_separate):
            one = min(one, eager)
        assert prices.with_every_size(each, repeats, fused=chain is not None) == every
        assert every == pytest.approx(one)


def _chain(steps: int) -> Ladder:
    return Ladder(
        role=Role.DRAFT_DECODE,
        kind=Kind.DECODE,
        mode=FULL,
        query_len=1,
        draft_steps=steps,
        domain=Domain.upto(8),
        sizes=(),
        max_num_reqs=8,
    )


@given(profiles(), st.integers(1, 200))
def test_every_size_goes_beyond_what_the_profile_has(known: Profile, tokens: int) -> None:
    """A size beyond the last measured one takes its time in proportion; mixed batches run eager where that is less."""
    spec = Spec(model=MODEL, limits=Limits(max_num_reqs=200, max_num_tokens=200), mode=FULL, backend="alpha")
    prices = Prices(Costs(known), spec, {Role.TARGET: GraphMode.FULL_AND_PIECEWISE})
    mixed = Batch(role=Role.TARGET, num_reqs=1, num_tokens=tokens, query_len=None, past_prompt=False)
    length = mixed.uniform_query_len
    eager = time_of(known, (Role.TARGET, EAGER, length, None), tokens) + known.overhead(EAGER, length)
    experts = known.expert_milliseconds(Role.TARGET, tokens)
    graph = beyond(known, (Role.TARGET, PIECEWISE, None, None), tokens) + known.overhead(PIECEWISE, None) + experts
    found = prices.with_every_size(mixed, 1)
    assert found == pytest.approx(min(graph, eager) - known.base_overhead)
    decode = Batch.decode(Role.TARGET, tokens, 1)
    more = known.overhead(FULL, 1) - known.base_overhead
    assert prices.with_every_size(decode, 1) == pytest.approx(
        beyond(known, (Role.TARGET, FULL, 1, None), tokens) + more + experts
    )


@given(profiles(), st.sampled_from((EAGER, PIECEWISE, FULL)), st.sampled_from((None, 1, 2)))
def test_an_unknown_overhead_is_that_of_the_nearest_mode_that_is_as_fast(
    known: Profile, mode: GraphMode, length: int | None
) -> None:
    """Its own figure, else the most of its mode or of the next faster one: never less than the least of all."""
    own = {each.key: each.milliseconds for each in known.overheads}
    found = known.overhead(mode, length)
    order = (FULL, PIECEWISE, EAGER)
    best = known.base_overhead
    for each in order[: order.index(mode) + 1]:
        best = max((ms for (other, _), ms in own.items() if other is each), default=best)
    assert found == own.get((mode, length), best)
    assert found >= known.base_overhead


@pytest.mark.parametrize(("mean", "every", "regret"), [(3.0, 2.0, 0.5), (2.0, 2.0, 0.0), (0.0, 0.0, 0.0)])
def test_regret_is_what_the_mean_step_takes_longer(mean: float, every: float, regret: float) -> None:
    judgement = Judgement(steps=1, mean_step_ms=mean, every_size_ms=every, eager_share=0.0, times=())
    assert judgement.regret == pytest.approx(regret)
    assert attrs.evolve(judgement, steps=0).percentile(50) == 0
