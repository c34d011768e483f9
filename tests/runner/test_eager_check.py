"""Graph and eager side by side: healthy runs have no difference, and each fault is found where it is."""

import json
import math
import tempfile
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from capture_planner.errors import PlanningError, RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records.model import DataType
from capture_planner_runner.execution.role import ForwardObserver
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.assembly import DTYPES, dtype_of
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.numerics import eager_check as compare
from capture_planner_runner.numerics import tolerance
from capture_planner_runner.numerics.eager_check import EagerCheck, TapKey, Taps
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from support.eager_faults import COMPARE, difference_of, world
from support.runs import CPU, requests_for, runnable_specs
from support.worlds import requests_of, serve

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 5, 3))


# Healthy ---------------------------------------------------------------------------------------


def configured(spec, folder):
    """Return the configuration of a model with the sliding windows of the spec; None where it has none."""
    shape = spec.model
    windows = [group.window for group in spec.roles.target.groups for _ in range(group.layers)]
    if not any(windows):
        return None
    numbers = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 24,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_model_len,
        "use_sliding_window": True,
        "sliding_window": max(filter(None, windows)),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }
    (folder / "config.json").write_text(json.dumps(numbers), "utf-8")
    return folder


def runner_of(spec, options, seed):
    """A runner of a tiny deployment in the spec's dtype; some random ones have no plan."""
    try:
        plan, dtype = make_plan(spec, CPU, registry.load_backends()), dtype_of(spec.model.dtype)
    except PlanningError:
        reject()
    with tempfile.TemporaryDirectory() as folder:
        source = configured(spec, Path(folder))
        target = load_target(source, plan.model, device=torch.device("cpu"), dtype=dtype, seed=seed)
    places, length = plan.limits.max_num_reqs, plan.model.max_model_len
    drafter = None
    if plan.speculative is not None:
        length += plan.speculative.num_tokens + 1
        drafter = choose_drafter("random", plan.speculative, target, num_states=places, length=length, seed=seed)
    pages = PageFormat(page_size=4, num_pages=1 + places * -(-length // 4))
    return Runner(plan, target, drafter, registry.load_backends(), RecordedGraphs(), pages=pages, options=options)


@settings(FEW, max_examples=FEW.max_examples * 2)
@given(
    st.data(), st.sampled_from((*[DataType.FLOAT64] * 3, *DTYPES)), st.integers(0, 9), st.sampled_from((0.0, 0.0, 0.7))
)
def test_a_healthy_deployment_has_no_difference(data, dtype, seed, temperature):
    """Every forward that a graph served is compared, in any dtype; tokens are those without comparing."""
    spec = data.draw(runnable_specs(dtype=dtype, lazy=True))
    requests = data.draw(requests_for(spec))
    tokens = {}
    for options in (attrs.evolve(COMPARE, temperature=temperature), Options(temperature=temperature)):
        with runner_of(spec, options, seed) as runner:
            runner.capture()
            tokens[options.compare] = {done.name: done.tokens for done in runner.serve(requests)}
            if options.compare:
                report, forwards = runner.comparison.report(), runner.session.forwards
    assert report.difference is None
    compared, eager = Counter(), Counter()
    for forward in forwards:
        (eager if forward.entry is None else compared)[forward.role] += forward.repeats
    assert (report.compared, report.eager) == (compared, eager)
    assert report.steps == len({forward.step for forward in forwards if forward.entry is not None})
    assert all(seen.error <= seen.tolerance for seen in report.largest)
    if dtype is DataType.FLOAT64:
        assert tokens[True] == tokens[False]
        assert report.near_ties == 0


# Near ties -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_half", [True, False])
def test_another_draft_of_equal_states_is_a_tie_in_half_precision_alone(monkeypatch, is_half):
    """Then it is counted, and what the chain goes on with is not compared; else it is a difference."""
    if is_half:
        monkeypatch.setattr(compare, "NEAR_TIES", 0)

    def plant(runner):
        body = runner.roles[Role.DRAFT_DECODE].body
        role, propose = runner.roles[Role.DRAFT_DECODE], body.drafter.propose
        forward = role._forward

        def other(hidden, places, positions, module):
            return (propose(hidden, places, positions) + 1) % 32

        def inside(extents, entry):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(body.drafter, "propose", other)
                forward(extents, entry)

        role._forward = inside

    made = world(k=3, mode=GraphMode.FULL)
    if not is_half:
        diff = difference_of(made, plant)
        assert (diff.tensor, diff.draft_step, diff.after) == ("draft_state.token", 0, "draft_state.hidden")
    else:
        with made.runner(options=COMPARE) as runner:
            plant(runner)
            runner.capture()
            serve(runner, requests_of(made, 1))
            report = runner.comparison.report()
        assert report.difference is None
        drafts = [f for f in runner.session.forwards if f.role is Role.DRAFT_DECODE and f.entry is not None]
        assert report.near_ties == sum(forward.num_reqs for forward in drafts)


# Parts -----------------------------------------------------------------------------------------


FLOATS = st.floats(-1e3, 1e3, width=32) | st.just(math.nan) | st.just(math.inf)


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS, FLOATS), min_size=1, max_size=5))
def test_row_errors_are_norms_relative_to_the_eager_row(rows):
    """As computed number by number; infinite where a number is not finite, 0 for equal rows."""
    table = torch.tensor(rows, dtype=torch.float64)
    graph, eager = table[:, :2], table[:, 2:]
    for error, (a, b, c, d) in zip(tolerance.row_errors(graph, eager).tolist(), rows, strict=True):
        apart, norm = math.hypot(a - c, b - d), math.hypot(c, d)
        wanted = math.inf if not math.isfinite(apart) else 0 if not apart else apart / norm if norm else math.inf
        if math.isnan(a + b + c + d) or math.isinf(abs(a) + abs(b) + abs(c) + abs(d)):
            assert error > max(each.model for each in tolerance.TOLERANCES.values()) or (a, b) == (c, d)
        else:
            assert error == pytest.approx(wanted)
    finite = eager.nan_to_num(0, 0)
    assert tolerance.row_errors(finite, finite).max() == 0


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=6), st.lists(st.integers(-5, 5), min_size=6, max_size=6))
def test_whole_numbers_are_equal_or_not(first, second):
    """No tolerance: infinite where one differs."""
    graph, eager = torch.tensor(first), torch.tensor(second[: len(first)])
    errors = tolerance.row_errors(graph, eager).tolist()
    assert errors == [0 if a == b else math.inf for a, b in zip(first, second, strict=False)]
    assert tolerance.tolerance_of(eager) == 0


@given(st.integers(-2, 5), st.lists(st.floats(-10, 10), min_size=4, max_size=4))
def test_a_token_falls_short_by_its_logit(token, logits):
    """Of the largest one, as a share of the largest magnitude; a token that is none falls short of all."""
    short = float(tolerance.shortfall(torch.tensor([token]), torch.tensor([logits], dtype=torch.float64)))
    if not 0 <= token < 4:
        assert short == math.inf
    else:
        gap = max(logits) - logits[token]
        assert short == pytest.approx(gap / max(map(abs, logits)) if gap else 0)


@given(st.sampled_from([*tolerance.TOLERANCES]), st.integers(0, 5), st.integers(0, 3))
def test_a_print_changes_where_a_slot_is_written(dtype, slot, column):
    """That slot's and no other's, in any dtype."""
    cache = torch.ones(6, 4, dtype=dtype)
    before = tolerance.prints(cache)
    cache[slot, column] = 1.5
    assert (tolerance.prints(cache) != before).nonzero().tolist() == [[slot]]


def test_taps_keep_the_front_rows_of_steps_in_order():
    """Buffers are as large as the largest graph, keep nothing while they are off, and can be poisoned."""
    taps = Taps(3)
    for step in (0, 1):
        taps.keep(TapKey(step, 0, "queries"), torch.full((2, 4), float(step)))
    with taps.off():
        taps.keep(TapKey(0, 0, "queries"), torch.ones(9, 4))
    kept = dict(taps.kept(2))
    assert [key.step for key in kept] == [0, 1]
    assert all(buffer.shape == (3, 4) for buffer in kept.values())
    assert [buffer[:2].mean().item() for buffer in kept.values()] == [0, 1]
    assert [key.step for key, _ in taps.kept(1)] == [0]
    taps.poison()
    assert all(buffer.isnan().all() for buffer in kept.values())


@pytest.mark.parametrize("options", [{"replay": False}, {"run_ahead": True}, {"drafts_on_device": True}])
def test_what_leaves_no_moment_to_compare_is_refused(options):
    """By name; nothing else is."""
    with pytest.raises(RunError, match=f"{next(iter(options))} is"):
        world().runner(options=Options(compare=True, **options))


def test_a_role_that_is_not_compared_is_the_plain_one():
    """Nothing is captured in addition; comparing poisons, and runs no step ahead."""
    made = world(k=2)
    with made.runner() as plain, made.runner(options=COMPARE) as runner:
        assert {type(role._observer) for role in plain.roles.values()} == {ForwardObserver}
        assert plain.comparison is None
        assert {type(role._observer) for role in runner.roles.values()} == {EagerCheck}
        assert runner.policy.options.poison
        assert not runner.policy.run_ahead
        assert not runner.policy.drafts_on_device
