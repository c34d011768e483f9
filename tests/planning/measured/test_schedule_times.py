"""Measured schedules: what each number of drafts takes, added up a second time from the passes of a step."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.codec.shipped import shipped_profiles
from capture_planner.modes import Chain, GraphMode, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured import choose_schedule
from capture_planner.planning.measured.schedule import (
    DraftLength,
    DraftProblem,
    Span,
    _allowed,
    _choice,
    _lengths,
    work_of,
)
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, ScheduleSource, Speculative
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Budget, KindGraphs, Limits, Spec
from support.measured import MODEL, decodes, lines, profile

ANY = st.sampled_from([*GraphMode])
DECODES = st.sampled_from((GraphMode.NONE, GraphMode.FULL_DECODE_ONLY))
TOKENS = (1.0, 1.8, 2.4, 2.8, 3.0)


def spec_of(k: int, most: int, room: int, method: Method = Method.EAGLE3, **named: object) -> Spec:
    """Return a deployment with as many drafts, requests and tokens."""
    speculative = Speculative(method=method, num_tokens=k, schedule=ScheduleSource.MEASURED, **named)  # type: ignore[arg-type]
    limits = Limits(max_num_reqs=most, max_num_tokens=room)
    return Spec(model=MODEL, limits=limits, mode=GraphMode.FULL, backend="alpha", speculative=speculative)


def profile_of(apart: float = 0.0) -> Profile:
    """Return a time for every family of passes."""
    families = [
        *((role, mode, each, None) for role in Role for mode in MODES for each in (None, *range(1, 8))),
        *((Role.DRAFT_DECODE, GraphMode.FULL, 1, steps) for steps in range(1, 5)),
    ]
    curves = lines(families, (1, 101), lambda index: (1 + index / 4, 101 + index / 4))
    return replace(profile(), curves=curves, step_milliseconds=apart)


MODES = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)


@settings(max_examples=max(settings.default.max_examples, 40))
@given(
    modes=st.fixed_dictionaries({Role.TARGET: ANY, Role.DRAFT_PREFILL: ANY, Role.DRAFT_DECODE: DECODES}),
    spec=st.builds(
        spec_of,
        st.integers(1, 4),
        st.integers(1, 9),
        st.integers(7, 40),
        st.sampled_from((Method.EAGLE3, Method.DRAFT_MODEL)),
        chain=st.sampled_from(Chain),
    ),
    known=st.builds(profile_of, st.sampled_from((0.0, 2.0, 30.0))),
)
def test_each_number_of_drafts_takes_its_passes(modes: dict[Role, GraphMode], spec: Spec, known: Profile) -> None:
    """The target's and the first draft pass of 1 + K tokens, then K - 1 of one, in one graph where they are fused."""
    speculative, costs = spec.speculative, Costs(known)
    assert speculative is not None
    slots = int(speculative.method is Method.DRAFT_MODEL)
    most = min(spec.limits.max_num_reqs, spec.limits.max_num_tokens // (1 + slots))
    lengths = _lengths(spec, modes, costs, TOKENS, most)
    assert [length.k for length in lengths] == [
        k for k in range(speculative.num_tokens + 1) if spec.limits.max_num_tokens >= 1 + k + slots
    ]
    for length in lengths:
        k = length.k
        counts = [n for n in range(1, most + 1) if n * (1 + k + slots) <= spec.limits.max_num_tokens]
        assert length.tokens == TOKENS[k]
        assert len(length.padded) == len(length.exact) == len(counts)
        runs = {role: 1 if role is not Role.DRAFT_DECODE else k - 1 for role in Role}
        running = [role for role in Role if runs[role] > 0]
        assert length.graphs == sum(modes[role].is_separate for role in running)
        for index, count in enumerate(counts):
            padded = exact = 0.0
            for role in running:
                mode = modes[role].decode_mode
                width, steps, times = 1 + k + slots * (role is Role.DRAFT_PREFILL), None, runs[role]
                if role is Role.DRAFT_DECODE:
                    width = 1
                    if speculative.chain is Chain.FUSED and mode is GraphMode.FULL and k > 2:
                        steps, times = k - 1, 1
                shared = role is not Role.DRAFT_DECODE and mode is not GraphMode.NONE and not modes[role].is_separate
                key = role, mode, None if shared else width, steps
                (curve,) = [each for each in known.curves if each.key == key]
                time = times * (curve.milliseconds[0] + count * width - 1)
                padded += time * modes[role].is_separate
                exact += time * (not modes[role].is_separate)
            assert length.padded[index] == pytest.approx(padded)
            assert length.exact[index] == pytest.approx(exact + known.step(count, 0.0))


@given(
    st.fixed_dictionaries({Role.TARGET: ANY, Role.DRAFT_PREFILL: ANY, Role.DRAFT_DECODE: DECODES}),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
)
def test_mixed_batches_have_a_graph_of_the_budget_each(
    modes: dict[Role, GraphMode], graphs: int | None, own: int | None
) -> None:
    """The rest is for decodes, which may have a bound of their own; the nearer one counts, and is named."""
    budget = Budget(max_graphs=graphs, graphs=KindGraphs(decode=own))
    found, rule = _allowed(replace(spec_of(2, 8, 64), budget=budget), modes)
    mixed = sum(modes[role].mixed_mode is not GraphMode.NONE for role in (Role.TARGET, Role.DRAFT_PREFILL))
    bounds = [
        *([(max(graphs - mixed, 0), f"max_graphs {graphs}")] if graphs is not None else []),
        *([(own, "graphs.decode")] if own is not None else []),
    ]
    assert found == min((bound for bound, _ in bounds), default=None)
    assert rule in {text for bound, text in bounds if bound == found} or not bounds
    assert (rule == "") == (not bounds)
    assert budget.allowed_of(Kind.DECODE) == own


@pytest.mark.parametrize(
    ("method", "reqs", "room", "most"),
    [
        (Method.EAGLE3, 64, 20, 20),
        (Method.EAGLE3, 8, 64, 8),
        (Method.EAGLE3, 64, 64, 64),
        (Method.DRAFT_MODEL, 64, 21, 10),
    ],
)
def test_batches_of_a_schedule_end_at_the_limits(method: Method, reqs: int, room: int, most: int) -> None:
    """No more requests than tokens, of which the first draft pass of a draft model has one more for each."""
    spec = spec_of(2, reqs, room, method, acceptance=(0.8, 0.6))
    modes = dict.fromkeys(Role, GraphMode.FULL_DECODE_ONLY)
    traffic = decodes({4: 100, 6: 100}, 3)
    chosen = choose_schedule(spec, modes, Measurements(profile=profile(), traffic=traffic))
    assert chosen.problem.most == most
    # The same decodes, of which the source says tokens and query length alone.
    unnamed = replace(traffic, batches=tuple(attrs.evolve(batch, num_reqs=None) for batch in traffic.batches))
    assert work_of(unnamed, TOKENS, most) == work_of(traffic, TOKENS, most)


def test_rates_are_tokens_of_a_second() -> None:
    """Of each range by its own work, and of the best number for all."""
    short = DraftLength(k=0, tokens=1.0, padded=(4.0,) * 4, exact=(0.0,) * 4, graphs=2)
    long = DraftLength(k=1, tokens=1.5, padded=(5.0, 5.0, 40.0, 40.0), exact=(0.0,) * 4, graphs=2)
    problem = DraftProblem((short, long), (1.0, 3.0, 2.0, 2.0), None)
    spans = (Span(1, 2, 1), Span(3, 4, 0))
    speculative = Speculative(method=Method.EAGLE3, num_tokens=1, schedule=ScheduleSource.MEASURED)
    message = _choice(problem, spans, speculative, "acceptance").message
    rates = []
    for span, length in ((spans[0], long), (spans[1], short), (Span(1, 4, 0), short)):
        work = problem.work(span.first, span.last)
        rates.append(work / problem.total((span,)) * 1e3)
        seconds = sum(
            w * length.padded[span.last - 1] / length.tokens for w in problem.weights[span.first - 1 : span.last]
        )
        assert problem.total((span,)) == pytest.approx(seconds)
    assert f"1 to 2 requests draft 1 ({rates[0]:,.0f} tokens/s), 3 to 4 requests draft 0 ({rates[1]:,.0f}" in message
    gain = problem.total((Span(1, 4, 0),)) / problem.total(spans) - 1
    assert f"; {gain:.1%} more than the best fixed number, 0 ({rates[2]:,.0f} tokens/s)" in message


@pytest.mark.parametrize("name", ["qwen3-0.6b-eagle3.h200", "qwen3-8b-eagle3.h200"])
def test_padded_times_never_fall_as_batches_grow(name: str) -> None:
    """With a floor, the host's share of a step falls as its passes grow; the search needs non-decreasing times."""
    shipped = codec.load_profile(shipped_profiles()[name])
    known = replace(shipped, overheads=tuple(replace(each, floor=8.0) for each in shipped.overheads))
    spec = replace(spec_of(5, 256, 8192), model=known.model)
    for length in _lengths(spec, dict.fromkeys(Role, GraphMode.FULL_DECODE_ONLY), Costs(known), (1.0,) * 6, 256):
        assert list(length.padded) == sorted(length.padded)
