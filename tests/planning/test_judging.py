"""Judging: what steps take, added up a second time from a list of all steps."""

from __future__ import annotations

from math import ceil

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.judging import Judgement, Prices, judge
from capture_planner.planning.measured import _with_every_size
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.steps import Steps, passes_of
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import Domain, query_len_of
from capture_planner.records.model import Method, Speculative
from capture_planner.records.profile import Profile
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
    overlap = draw(st.booleans())
    return replace(
        profile(),
        curves=curves,
        step_milliseconds=apart,
        step_milliseconds_per_request=apart / 2,
        drafts_overlap=overlap,
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
        apart = known.step_milliseconds + known.step_milliseconds_per_request * batch.num_reqs
        target = drafting = 0.0
        for each, repeats in passes:
            entry = answers[each]
            if entry is None:
                chain = repeats if each.role is Role.DRAFT_DECODE else None
                time = time_of(known, (each.role, EAGER, each.uniform_query_len, chain), each.num_tokens)
            else:
                key = each.role, entry.mode, entry.query_len, entry.draft_steps
                time = time_of(known, key, entry.num_tokens) * (1 if entry.draft_steps else repeats)
            target += time * (not each.role.is_drafter)
            drafting += time * each.role.is_drafter
        total = target + max(apart, drafting) if known.drafts_overlap else target + apart + drafting
        every += [total] * count
        eager += count * any(answers[each] is None for each, _ in passes)
    every.sort()
    assert found.steps == len(every)
    prices = Prices(costs, spec, dict.fromkeys(Role, GraphMode.FULL_AND_PIECEWISE))
    best = 0.0
    for batch, count in counts.items():
        target, *drafts = (
            prices.with_every_size(each, repeats, fused=answers[each] is not None and bool(answers[each].draft_steps))
            for each, repeats in passes_of(batch, spec)
        )
        best += known.step(batch.num_reqs, target, sum(drafts)) * count
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
    target = drafting = 0.0
    for each, repeats in passes_of(batch, spec):
        own = decode or each.role is Role.DRAFT_DECODE
        lowered = mode.decode_mode if own else mode.mixed_mode
        length = each.query_len if own and mode.is_separate else None
        step = 2 if spec.parallel.sequence else 1
        tokens = -(-each.num_tokens // step) * step
        chain = repeats if ladders and each.role is Role.DRAFT_DECODE else None
        if lowered is EAGER:
            eager = repeats if each.role is Role.DRAFT_DECODE else None
            one = time_of(known, (each.role, EAGER, each.uniform_query_len, eager), each.num_tokens)
        else:
            family = each.role, lowered, length, chain
            one = time_of(known, family, tokens) * (1 if chain else repeats)
        assert prices.with_every_size(each, repeats, fused=chain is not None) == pytest.approx(one)
        target += one * (not each.role.is_drafter)
        drafting += one * each.role.is_drafter
    assert _with_every_size(batch, prices=prices, spec=spec, ladders=ladders) == pytest.approx((target, drafting))


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
def test_sizes_that_no_graph_of_the_profile_reaches_run_eager(known: Profile, tokens: int) -> None:
    """Mixed batches beyond the last measured size; decodes have a ladder of their own up to the limits."""
    spec = Spec(model=MODEL, limits=Limits(max_num_reqs=200, max_num_tokens=200), mode=FULL, backend="alpha")
    prices = Prices(Costs(known), spec, {Role.TARGET: GraphMode.FULL_AND_PIECEWISE})
    mixed = Batch(role=Role.TARGET, num_reqs=1, num_tokens=tokens, query_len=None, past_prompt=False)
    family = EAGER if tokens > 64 else PIECEWISE
    length = mixed.uniform_query_len if family is EAGER else None
    assert prices.with_every_size(mixed, 1) == pytest.approx(
        time_of(known, (Role.TARGET, family, length, None), tokens)
    )
    decode = Batch.decode(Role.TARGET, tokens, 1)
    assert prices.with_every_size(decode, 1) == pytest.approx(time_of(known, (Role.TARGET, FULL, 1, None), tokens))


@pytest.mark.parametrize(("mean", "every", "regret"), [(3.0, 2.0, 0.5), (2.0, 2.0, 0.0), (0.0, 0.0, 0.0)])
def test_regret_is_what_the_mean_step_takes_longer(mean: float, every: float, regret: float) -> None:
    judgement = Judgement(steps=1, mean_step_ms=mean, every_size_ms=every, eager_share=0.0, times=())
    assert judgement.regret == pytest.approx(regret)
    assert attrs.evolve(judgement, steps=0).percentile(50) == 0
