"""The benchmark of vLLM under arriving requests: plans that take turns in one engine."""

import importlib
import math
import random
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import _arriving_turns
import _arriving_worker
import pytest
from _arriving_turns import merged_plan
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.measuring import recorder
from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner_vllm import vllm_plugin
from capture_planner_vllm.inside import hooks, observe, seam, splits, watch
from support import vllm_observed
from support.vllm_module import MANAGERS, capture, config_for, manager_for, vllm_modules

PLAN = codec.load_plan(Path(__file__).parents[2] / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml")


PARTS = st.tuples(
    *(
        st.lists(st.sampled_from(role.entries[:12]), unique=True, max_size=6, min_size=role.role is Role.TARGET)
        for role in PLAN.roles
    )
)
"""Some graphs of each role, of its largest ones."""


def part_of(parts):
    """PLAN with these graphs alone."""
    roles = zip(PLAN.roles, parts, strict=True)
    return replace(
        PLAN, roles=tuple(evolve(role, entries=tuple(entries), waivers=(), lazy=()) for role, entries in roles)
    )


@pytest.fixture(scope="module")
def modules():
    """A process of vLLM with the plugin."""
    with pytest.MonkeyPatch.context() as patch, vllm_modules() as made:
        patch.setattr(seam, "_callbacks", {})
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        patch.setattr(hooks, "decisions", {})
        for name in (vllm_plugin.APPLY, vllm_plugin.OBSERVE, vllm_plugin.PROFILE):
            patch.delenv(name, raising=False)
        patch.setenv(vllm_plugin.PLAN, "unused")
        hooks.apply_to_managers(made[MANAGERS])
        yield made


def started(modules, file, patch):
    """The tracks of an engine that runs the plan of a file: their roles, managers and captured graphs."""
    patch.setenv(vllm_plugin.PLAN, str(file))
    patch.setattr(splits.FULL_GRAPHS, "tokens", None)
    patch.setattr(splits, "OWN_BOUND", 512)
    plan = codec.load_plan(file)
    config = config_for(modules, plan)
    hooks.set_sizes(plan, config)
    tracks = []
    for role in plan.planned:
        manager = manager_for(modules, config, plan, role)
        capture(manager)
        captured = [desc for descs in manager._capture_descs.values() for desc in descs]
        tracks.append(SimpleNamespace(role=role, manager=manager, keys=dict.fromkeys(captured, 0)))
    return tracks


def tables(tracks):
    """What engines dispatch by, and up to where they bound the splits of attention."""
    managers = [track.manager for track in tracks]
    full, own = splits.FULL_GRAPHS.tokens, splits.OWN_BOUND
    largest = managers[0].compilation_config.max_cudagraph_capture_size
    # The bound is that of FlashAttention's builder.
    return [(each._candidates, each._lora_dispatch_map) for each in managers], min(largest, max(full, own))


@given(st.tuples(PARTS, PARTS))
def test_merged_plan_has_each_graph_once(parts):
    plans = [part_of(each) for each in parts]
    merged = merged_plan(plans)
    assert codec.loads(codec.dumps(merged), Plan) == merged
    for role in merged.roles:
        every = [entry for plan in plans for entry in plan.role(role.role).entries]
        assert len(set(role.entries)) == len(role.entries)
        assert set(role.entries) == set(every)


@given(parts=st.tuples(PARTS, PARTS), turns=st.lists(st.integers(0, 1), min_size=1, max_size=4))
def test_engine_dispatches_as_one_that_runs_the_plan_alone(parts, turns, modules, tmp_path_factory):
    """After each turn: by the same tables, with the same bound on attention's splits."""
    plans = [part_of(each) for each in parts]
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        for name, plan in (("0", plans[0]), ("1", plans[1]), ("merged", merged_plan(plans))):
            (folder / name).write_text(codec.dumps(plan), "utf-8")
        alone = []
        for turn in (0, 1):
            tracks = started(modules, folder / str(turn), patch)
            alone.append((*tables(tracks), [len(track.keys) for track in tracks]))
        tracks = started(modules, folder / "merged", patch)
        patch.setattr(_arriving_worker, "OBSERVERS", [SimpleNamespace(_tracks=tracks)])
        found = [_arriving_worker.Table.of(str(folder / str(turn))) for turn in (0, 1)]
        for turn in turns:
            found[turn].take()
            assert tables(tracks) == alone[turn][:2]
            assert list(found[turn].graphs.values()) == alone[turn][2]


def test_graph_that_was_not_captured_is_an_error(modules, tmp_path, monkeypatch):
    less = replace(PLAN, roles=tuple(evolve(role, entries=role.entries[1:]) for role in PLAN.roles))
    for name, plan in (("all", PLAN), ("less", less)):
        (tmp_path / name).write_text(codec.dumps(plan), "utf-8")
    tracks = started(modules, tmp_path / "less", monkeypatch)
    monkeypatch.setattr(_arriving_worker, "OBSERVERS", [SimpleNamespace(_tracks=tracks)])
    with pytest.raises(RuntimeError, match="target: not captured"):
        _arriving_worker.Table.of(str(tmp_path / "all"))


TOKENS = st.integers(1, 200)
STEPS = st.lists(st.tuples(TOKENS, st.booleans()), min_size=60, max_size=120)


def outcome(tokens, is_decode, graph=0):
    return (Role.TARGET, 1, tokens, tokens if is_decode else None, is_decode, 0, graph, None)


def pipelined(plans, turns, length):
    """What steps cost in an engine that launches one step ahead; of each plan: seconds of launch and device."""
    _arriving_worker.STEPS.clear()
    pace, now, free, ends, began = watch.StepPace(1), 0.0, 0.0, [], []
    for column in turns:
        launch, device = plans[column]
        began.append((now - 1e-9, column))
        for _ in range(length):
            pace.started(now, joined=not ends)
            pace.dispatched((outcome(8, True), 1))
            now += launch
            pace.launched(now)
            free = max(free, now) + device
            ends.append(free)
            now = max([now, *ends[-2:-1]])
    return _arriving_turns.by_turn(_arriving_worker.STEPS, began)


@given(STEPS, st.integers(2, 9), st.floats(0.5, 2), st.randoms(use_true_random=False))
def test_equal_steps_show_what_a_plan_changes_and_no_drift(steps, length, factor, draw):
    """Batches of a doubling take the same time, longer by a factor under one plan; another load has another host."""
    rows = []
    for host in (1.0, 1.7):
        turns, timed = [], []
        for index, batch in enumerate(steps):
            if index % length == 0:
                turns.append((index - 0.5, draw.choice("ab")))
            column = turns[-1][1]
            kind = _arriving_turns.doubling(_arriving_turns.kind_of(outcome(*batch)))
            seconds = host * (1 + len(kind)) / 1e3 * (factor if column == "b" else 1)
            timed.append((float(index), outcome(*batch), seconds))
        rows.append({"turns": _arriving_turns.by_turn(timed, turns)})
    counted = sum(
        steps for row in rows for halves in row["turns"].values() for half in halves for steps, _ in half.values()
    )
    turns = (min(length, len(steps) - start) for start in range(0, len(steps), length))
    assert counted == 2 * sum(max(0, each - 2) for each in turns)
    for row in rows:
        if (found := _arriving_turns.compared([row])["step_ms"]) is not None and len(found) == 2:
            assert found["b"] / found["a"] == pytest.approx(factor, rel=1e-3)


@pytest.fixture
def noted(monkeypatch):
    """Steps are noted with their beginning."""
    monkeypatch.setattr(watch, "StepPace", watch.StepPace)  # put back afterwards
    monkeypatch.setattr(_arriving_worker, "STEPS", [])
    _arriving_worker.note_steps()


@pytest.mark.parametrize("one", [(1, 5), (2, 5), (12, 5), (1, 9)], ids=str)
@pytest.mark.parametrize("length", [8, 16])
def test_a_turn_costs_what_the_plan_alone_does(noted, one, length):
    """Also where the launches of the other plan hide what the device does, as the engine launches one step ahead."""
    plans = {"a": one, "b": (1, 5)}
    found = pipelined(plans, "abbabaabab", length)
    for column in plans:
        alone = _arriving_turns.equal_steps({"": _arriving_turns.added(pipelined(plans, [column], 200)[column])})
        for half in found[column]:
            assert _arriving_turns.equal_steps({"": half}) == pytest.approx(alone)


def test_slow_eager_steps_are_no_stalls():
    """Each plan's steps are held to its own, those without a graph apart; a stall is left out."""
    steps = [
        (float(index), outcome(8, True, 0 if index % 3 else None), 0.001 if index % 3 else 0.02) for index in range(60)
    ]
    steps[31] = (31.0, outcome(8, True, 0), 0.5)
    even, odd = _arriving_turns.by_turn(steps, [(-1.0, "a")])["a"]
    # Without the first and the last step, and without the stall.
    assert even == {"decode 8": (19 + 38, 19 * 20.0 + 38)}
    assert odd == {}


def test_plan_that_served_no_turn_of_a_load_is_not_compared():
    served = _arriving_turns.by_turn([(float(index), outcome(8, True), 0.001) for index in range(9)], [(-1.0, "a")])
    both = {**served, "b": served["a"]}
    assert _arriving_turns.compared([{"turns": both}, {"turns": served}])["step_ms"] == {"a": 1.0, "b": 1.0}
    assert _arriving_turns.compared([])["step_ms"] is None


def test_sizes_that_a_plan_did_not_have_count_with_those_of_their_doubling():
    """One plan lacks 80, so that 65 to 128 tokens are one kind; both had 32, and only one had kinds near 400."""
    columns = {
        "a": {"mixed 32": (2, 2.0), "mixed 80": (1, 5.0), "mixed 128": (1, 7.0), "decode 400": (3, 9.0)},
        "b": {"mixed 32": (2, 4.0), "mixed 128": (2, 8.0), "mixed 400": (1, 90.0)},
    }
    assert _arriving_turns.equal_steps(columns) == {"a": (4 * 1 + 4 * 6) / 8, "b": (4 * 2 + 4 * 4) / 8}


def test_error_is_what_the_ratio_of_equal_plans_varies_by():
    """Over many runs of six rounds, whose host drifts from one to the next, and within one."""
    draw = random.Random(0)
    ratios, errors = [], []
    for _ in range(60):
        rows = []
        for _ in range(6):
            host, turns, steps = draw.lognormvariate(0, 0.2), [], []
            for index in range(48):
                turns.append((index * 8 - 0.5, "abc"[index % 3] if index % 2 else draw.choice("abc")))
                drift = host * draw.lognormvariate(0, 0.2)
                for step in range(8):
                    seconds = drift * draw.lognormvariate(-6, 0.3)
                    steps.append((float(index * 8 + step), outcome(draw.choice((8, 16, 300)), True), seconds))
            rows.append({"turns": _arriving_turns.by_turn(steps, turns)})
        found = _arriving_turns.compared(rows)
        ratios.append(math.log(found["step_ms"]["a"] / found["step_ms"]["b"]))
        errors.append(_arriving_turns.error_of(found, "b", "a"))
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(ratios), rel=0.2)
    assert abs(statistics.fmean(ratios)) < 3 * statistics.stdev(ratios) / math.sqrt(len(ratios))


@given(TOKENS, TOKENS, st.booleans())
def test_kinds_are_of_near_sizes(one, other, is_decode):
    """A larger batch is of no smaller kind, and a kind has at most a quarter more tokens than its batches."""
    kinds = [_arriving_turns.kind_of(outcome(tokens, is_decode)).split() for tokens in (one, other)]
    sizes = [int(size) for _, size in kinds]
    assert {name for name, _ in kinds} == {"decode" if is_decode else "mixed"}
    assert (one <= other) <= (sizes[0] <= sizes[1])
    assert all(tokens <= size <= 1.25 * tokens for tokens, size in zip((one, other), sizes, strict=True))


def test_observer_that_is_asked_is_the_one_that_observes(monkeypatch):
    """The managers' module is imported before the plugin is registered, and vLLM registers it again."""
    for module, name in ((observe.Observer, "__init__"), (recorder.Recorder, "__init__"), (watch, "StepPace")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    for name in ("OBSERVERS", "RECORDERS", "STEPS"):
        monkeypatch.setattr(_arriving_worker, name, [])
    monkeypatch.setattr(seam, "_callbacks", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv(vllm_plugin.PLAN, raising=False)

    def engine(*_):
        vllm_plugin.register()
        return vllm_observed.started()

    monkeypatch.setattr(_arriving_worker, "Vllm", engine)
    with vllm_observed.process():
        importlib.import_module(MANAGERS)
        runner = _arriving_worker.engine_of({"options": {}, "adapters": []})
        for _ in range(9):
            vllm_observed.run(runner, vllm_observed.step(4, 4))
        (observer,) = _arriving_worker.OBSERVERS
        assert [track.manager for track in observer._tracks][:1] == [runner.cudagraph_manager]
        assert _arriving_worker.observation().roles[0].steps == 9
        began = [start for start, *_ in _arriving_worker.STEPS]
        assert len(began) == 7  # one is in flight, and the last has no end
        assert began == sorted(set(began))
        runner.shutdown()
