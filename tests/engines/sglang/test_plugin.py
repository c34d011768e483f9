"""The plugin inside a stand-in for SGLang: what it applies, observes and refuses, and that SGLang goes on."""

import importlib.metadata
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from capture_planner import Dispatcher, codec, load_plan
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.inside import resolve
from capture_planner.engines.launch import PROFILE
from capture_planner.errors import RunError
from capture_planner.modes import Reason, Role
from capture_planner.records._base import digest, replace
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import decode_families
from capture_planner_sglang import sglang_plugin
from capture_planner_sglang.emulation.export import ALGORITHMS, decode_sizes_of
from capture_planner_sglang.inside import observe, seam
from capture_planner_sglang.inside.observe import SglangObserver
from engines.generators import sglang_apply
from support import sglang_standin
from support.sglang_standin import ForwardMode, Mode

LOCKED = Path(__file__).parents[3] / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml"
PLAN = load_plan(LOCKED)


def values(plan, **changes):
    """The settings of an SGLang that agrees with a plan."""
    spec, most = plan.speculative, plan.limits.max_num_reqs
    found = {"pool": most, "running": most, "sizes": (1, 2, 4, most)}
    if spec is not None:
        drafts = spec.num_tokens
        found |= {"algorithm": ALGORITHMS[spec.method], "steps": drafts, "topk": 1, "draft_tokens": drafts + 1}
    return found | changes


def start(monkeypatch, **settings):
    """Register the plugin in a stand-in, and make its scheduler."""
    engine = sglang_standin.installed(monkeypatch, **settings)
    sglang_plugin.register()
    engine.registry.apply_hooks()
    return engine, engine.Scheduler(None, None)


@pytest.fixture
def plan_file(tmp_path, monkeypatch):
    """The environment of a process with a plan; gives a function that writes one."""
    for name in (sglang_plugin.STRICT, sglang_plugin.OBSERVE, sglang_plugin.PLAN):
        monkeypatch.delenv(name, raising=False)

    def write(plan):
        path = tmp_path / "plan.yaml"
        codec.write(path, codec.dumps(plan))
        monkeypatch.setenv(sglang_plugin.PLAN, str(path))
        return path

    return write


def captured(scheduler):
    """Each role's sizes; none where SGLang made no runner."""
    runners = {Role.TARGET: scheduler.target, Role.DRAFT_PREFILL: scheduler.extend, Role.DRAFT_DECODE: scheduler.draft}
    return {role: () if runner is None else tuple(runner.capture_bs) for role, runner in runners.items()}


def batch(num_reqs, mode=Mode.DECODE, tokens=None):
    """A forward batch."""
    return SimpleNamespace(
        batch_size=num_reqs, forward_mode=ForwardMode(mode), lora_ids=None, input_ids=range(tokens or num_reqs)
    )


def test_plugin_is_an_entry_point():
    """As SGLang looks for it, among what is installed."""
    points = importlib.metadata.entry_points(group="sglang.srt.plugins", name="capture_planner")
    assert [point.load() for point in points] == [sglang_plugin.register]


def test_register_without_variables_imports_nothing_of_the_planner():
    """A process of SGLang without a plan loads this module and no other of ours."""
    code = "import sys; from capture_planner_sglang import sglang_plugin as p; p.register(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in run.stdout.split() if name.startswith("capture_planner")] == [
        "capture_planner_sglang",
        "capture_planner_sglang.sglang_plugin",
    ]


def test_standin_has_the_seams_that_the_plugin_checks(monkeypatch):
    """``oracle/run_sglang_apply.py`` checks the same tables against the wheel."""
    sglang_standin.installed(monkeypatch)
    assert not [*seam.unknown((*seam.APPLY, *seam.OBSERVE))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=16000)
@given(seed=st.integers(0, 10**6))
def test_runners_capture_exactly_the_planned_sizes(seed, plan_file, monkeypatch):
    """Role by role; a role that the plan leaves eager has no runner, and one that it cannot have keeps SGLang's.

    The example keeps SGLang's sizes, some of which exceed the request pool; that is no fault of the plan.
    """
    plan = sglang_apply.plan(Random(seed))
    plan = replace(plan, lora=None)
    plan_file(plan)
    with monkeypatch.context() as patch:
        patch.setenv(sglang_plugin.STRICT, "1")
        _, scheduler = start(patch, **values(plan))
    pool = plan.limits.max_num_reqs
    planned, own = decode_sizes_of(plan).by_role, tuple(sorted({n for n in values(plan)["sizes"] if n <= pool}))
    found = captured(scheduler)
    for role, sizes in planned.items():
        assert found[role] == (own if sizes is None else sizes)


def test_sizes_outside_of_a_runner_are_those_of_all_roles(plan_file, monkeypatch):
    """Buffers are made for the largest, and the request pool that was not given is the plan's."""
    plan_file(PLAN)
    engine, _ = start(monkeypatch, **values(PLAN, running=None))
    everything = decode_sizes_of(PLAN).all()
    decode = engine.context.get_exec().graph.cuda_graph_config.decode
    assert (tuple(decode.bs), decode.max_bs) == (everything, everything[-1])
    assert engine.context.get_schedule().max_running_requests == PLAN.limits.max_num_reqs


def test_disagreement_leaves_sglang_alone(plan_file, monkeypatch, caplog):
    """One error line with every flag to give; strict stops the scheduler."""
    plan_file(PLAN)
    _, scheduler = start(monkeypatch, **values(PLAN, running=48, steps=5))
    assert set(captured(scheduler).values()) == {(1, 2, 4, 256)}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "--max-running-requests 256" in line
    assert "--speculative-num-steps 3" in line
    monkeypatch.setenv(sglang_plugin.STRICT, "1")
    with pytest.raises(RunError, match="max-running-requests 256"):
        start(monkeypatch, **values(PLAN, running=48))


def test_pool_below_the_plan_is_reported(plan_file, monkeypatch, caplog):
    """SGLang filters the sizes by its request pool."""
    plan_file(PLAN)
    _, scheduler = start(monkeypatch, **values(PLAN, pool=100))
    assert captured(scheduler)[Role.TARGET][-1] == 100
    assert "exceed its request pool" in caplog.text


@pytest.mark.parametrize("change", ["version", "parameter", "attribute", "missing"])
def test_unknown_sglang_is_left_alone(change, plan_file, monkeypatch, caplog):
    """With one line; strict ends the process, as SGLang swallows a plugin's exceptions."""
    plan_file(PLAN)
    engine = sglang_standin.installed(monkeypatch, **values(PLAN))
    module = resolve(seam.SIZES.rpartition(".")[0])
    if change == "version":
        monkeypatch.setattr(resolve("sglang.version"), "__version__", "0.5.24")
    elif change == "parameter":
        module.get_batch_sizes_to_capture = lambda runner: ([1], [])
    elif change == "attribute":
        module.get_batch_sizes_to_capture = (
            lambda model_runner, captured_req_width=1, *, gathered_buffer_required=None: 0
        )
    else:
        del module.get_batch_sizes_to_capture
    sglang_plugin.register()
    assert not engine.registry.hooks
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("SGLang is left alone: ")
    monkeypatch.setenv(sglang_plugin.STRICT, "1")
    with pytest.raises(SystemExit, match="capture_planner"):
        sglang_plugin.register()


def test_unreadable_plan_leaves_sglang_alone(plan_file, monkeypatch, caplog, tmp_path):
    """With the file in the line."""
    monkeypatch.setenv(sglang_plugin.PLAN, str(tmp_path / "none.yaml"))
    engine = sglang_standin.installed(monkeypatch)
    sglang_plugin.register()
    assert not engine.registry.hooks
    assert "none.yaml" in caplog.text


def observed(monkeypatch, tmp_path, engine, scheduler, steps):
    """Run steps, and return the observation that is written."""
    for run in steps:
        run()
    hooks = [hook for hooks in engine.registry.hooks.values() for _, hook in hooks]
    (observer,) = {hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), SglangObserver)}
    observer._recorder.close()
    (path,) = (tmp_path / "seen").glob("sglang.rank0.*.yaml")
    return codec.load_observation(path)


class Event:
    """A CUDA event that is over at once."""

    def record(self):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1.5


@pytest.fixture
def observing(monkeypatch, tmp_path):
    """The environment of a process that is observed, with events and memory of no device."""
    monkeypatch.setenv(sglang_plugin.OBSERVE, str(tmp_path / "seen"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 2 << 30))


@pytest.mark.parametrize("planned", [True, False])
def test_observation_has_graphs_answers_and_counts(planned, plan_file, observing, monkeypatch, tmp_path):
    """With a plan and without one; the answers are those that the runners gave."""
    if planned:
        plan_file(PLAN)
    engine, scheduler = start(monkeypatch, **values(PLAN, prefill="breakable"))
    output = SimpleNamespace(correct=[3, 1, 0], num_correct_drafts_per_req_cpu=None)
    found = observed(
        monkeypatch,
        tmp_path,
        engine,
        scheduler,
        [
            lambda: scheduler.target.execute(batch(5, Mode.TARGET_VERIFY, 20)),
            lambda: scheduler.draft.execute(batch(5)),
            lambda: scheduler.extend.execute(batch(5, Mode.DRAFT_EXTEND_V2, 20), None),
            lambda: scheduler.prefill.execute(batch(2, Mode.EXTEND, 50)),
            lambda: scheduler.eager.execute(batch(2, Mode.EXTEND, 500)),
            lambda: scheduler.eager.execute(batch(300, Mode.TARGET_VERIFY, 1200)),
            lambda: scheduler.eager.execute(batch(1, Mode.IDLE)),
            lambda: scheduler.worker.draft_forward(batch(300)),
            lambda: engine.Processor()._resolve_spec_v2_tokens(output, None),
        ],
    )
    assert found.plan == (digest(PLAN) if planned else None)
    assert (found.drafted, found.accepted) == ((3, 3, 3), (2, 1, 1))
    roles = {role.role: role for role in found.roles}
    sizes = decode_sizes_of(PLAN).by_role if planned else dict.fromkeys(Role, (1, 2, 4, 256))
    for role, runner in captured(scheduler).items():
        assert runner == sizes[role]
        decodes = [graph.entry for graph in roles[role].graphs if not graph.prompts_only]
        assert [entry.num_reqs for entry in decodes] == sorted(sizes[role], reverse=True)
        assert all(graph.seconds is not None and graph.mib == 0 for graph in roles[role].graphs)

    def counts(role):
        return {
            (each.num_reqs, each.num_tokens, each.query_len): (
                each.reason if each.graph is None else roles[role].graphs[each.graph].entry.num_tokens
            )
            for each in roles[role].batches
        }

    fit = {role: min(size for size in sizes[role] if size >= 5) for role in sizes}
    assert counts(Role.TARGET) == {
        (5, 20, 4): 4 * fit[Role.TARGET],
        (2, 50, None): 64,
        (2, 500, None): Reason.SIZES,
        (300, 1200, 4): Reason.SIZES,
    }
    assert counts(Role.DRAFT_PREFILL) == {(5, 20, 4): 4 * fit[Role.DRAFT_PREFILL]}
    assert counts(Role.DRAFT_DECODE) == {(5, 5, 1): fit[Role.DRAFT_DECODE], (300, 300, 1): Reason.SIZES}
    assert {each.milliseconds for role in found.roles for each in role.batches} >= {1.5}


def test_steps_have_the_time_that_the_loop_spends_on_them(observing, monkeypatch, tmp_path):
    """Of every step of the target: its launch and the processing of its result, with what comes before each."""
    monkeypatch.delenv(sglang_plugin.PLAN, raising=False)
    engine, scheduler = start(monkeypatch, prefill="disabled")
    clock = iter(range(1000))
    monkeypatch.setattr(observe, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))

    def launched(num_reqs):
        made = batch(num_reqs)
        made.run, made.process = lambda: scheduler.target.execute(made), lambda: None
        scheduler.run_batch(made)  # reads the clock twice
        return made

    steps = 64
    last = launched(3)
    for _ in range(steps):
        new = launched(3)
        scheduler.process_batch_result(last, None)
        last = new
    found = observed(monkeypatch, tmp_path, engine, scheduler, [])
    (count,) = found.roles[0].batches
    assert (count.steps, count.intervals, count.interval) == (steps + 1, steps - 1, pytest.approx(3000, rel=0.05))


def test_observed_answers_are_our_dispatch(plan_file, observing, monkeypatch, tmp_path):
    """Law 12: under a plan the engine's own answers are the dispatcher's."""
    plan_file(PLAN)
    engine, scheduler = start(monkeypatch, **values(PLAN))
    found, dispatcher = observed(monkeypatch, tmp_path, engine, scheduler, []), Dispatcher(PLAN)
    managers = emulation_of(found).managers
    assert [manager.role for manager in managers] == [*Role]
    for manager in managers:
        for family in decode_families(manager.role, PLAN):
            for count in range(1, PLAN.limits.max_num_reqs + 1):
                batch = Batch.decode(manager.role, count, family.query_len)
                ours, theirs = dispatcher.dispatch(batch).entry, manager.dispatch(batch).entry
                assert (theirs.mode, theirs.num_reqs) == (ours.mode, ours.num_reqs)


def test_profile_times_each_full_graph(plan_file, observing, monkeypatch, tmp_path):
    """One replay warms it up, five are timed."""
    plan_file(PLAN)
    monkeypatch.setenv(PROFILE, "1")
    engine, scheduler = start(monkeypatch, **values(PLAN, prefill="breakable"))
    found = observed(monkeypatch, tmp_path, engine, scheduler, [])
    for role in found.roles:
        assert {graph.milliseconds for graph in role.graphs if not graph.prompts_only} == {1.5}
    assert Counter(scheduler.draft.backend.replayed) == dict.fromkeys(scheduler.draft.backend._graphs, 6)


def test_failure_of_observing_stops_it_and_not_sglang(plan_file, observing, monkeypatch, caplog):
    """One line with the reason; strict raises it."""
    _, scheduler = start(monkeypatch, **values(PLAN))
    del scheduler.target.model_runner.lora_manager
    assert scheduler.target.execute(batch(5)) == "graph"
    assert scheduler.target.execute(batch(5)) == "graph"
    assert [record.getMessage() for record in caplog.records] == ["SGLang is not observed any more"]


@pytest.mark.parametrize("broken", ["mem_get_info", "Event", "record", "_before_capture", "_keep", "tables"])
def test_failure_anywhere_leaves_sglang_as_it_is(broken, plan_file, observing, monkeypatch, caplog):
    """While it captures, when a runner is made, when the scheduler is, and where a step is timed."""

    def fails(*words, **options):
        raise ZeroDivisionError(broken)

    plan_file(PLAN)
    owners = {"mem_get_info": torch.cuda, "Event": torch.cuda, "record": Event}
    monkeypatch.setattr(owners.get(broken, SglangObserver), broken, fails)
    _, scheduler = start(monkeypatch, **values(PLAN, prefill="breakable"))
    for _ in range(3):
        assert scheduler.target.execute(batch(5)) == "graph"
    assert [record.getMessage() for record in caplog.records] == ["SGLang is not observed any more"]


def test_refused_plan_is_a_note_of_the_observation(plan_file, observing, monkeypatch, tmp_path):
    """The engine by itself was observed."""
    plan_file(PLAN)
    engine, scheduler = start(monkeypatch, **values(PLAN, running=48))
    found = observed(monkeypatch, tmp_path, engine, scheduler, [])
    assert found.plan is None
    assert any("--max-running-requests 256" in note for note in found.notes)
