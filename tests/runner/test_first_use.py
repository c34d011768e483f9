"""First use: recurrent states survive captures between steps, a report says what they took, and time is budgeted."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from capture_planner.modes import GraphMode, Reason
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.spec import CapturePolicy, CaptureTiming
from capture_planner.report.plain import plain
from capture_planner.report.terminal import tables
from capture_planner_conformance import Case, play, under_test
from capture_planner_conformance.probe import LayerShape, ProbeDrafter, ProbeTarget, Rows, Tables
from capture_planner_conformance.scene import VOCABULARY, DraftScheme, Scene, Serve, Shape
from capture_planner_runner.capture.first_use import MINUTE, TokenBucket
from capture_planner_runner.capture.variants import all_at_start, without_graphs
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.launch import launch
from capture_planner_runner.launch.request import RunRequest
from capture_planner_runner.report.run import run_report
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.launching import StepLauncher
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request
from support.launches import HERE, SPEC, CountingReference, ProgressRecord, registry_of, requests_of, started
from support.runner_conformance import RunnerScene
from support.runner_conformance.models import RecurrentTables
from support.runs import CPU

pytestmark = pytest.mark.usefixtures("one_thread")
LAZY = CaptureTiming(policy=CapturePolicy.LAZY, memory=1 << 30, seconds_per_minute=1e6)
SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)
REQUESTS = [
    Request(name=f"r{number}", arrival=number * 0.01, prompt=tuple(range(3, 3 + length)), max_new_tokens=7)
    for number, length in enumerate((2, 5, 9))
]


@pytest.mark.parametrize("drafts", [0, 2])
def test_recurrent_states_survive_captures_between_steps(drafts):
    """The tokens of an eager run, and of one that captured all at start."""
    scene = RunnerScene(shape=SHAPE, recurrent=True, drafts=drafts)
    planned = make_plan(replace(scene.spec("reference"), capture=LAZY), CPU, registry.load_backends())
    plan = replace(planned, roles=tuple(replace(role, lazy=role.entries) for role in planned.roles))
    device, found = torch.device("cpu"), []

    def layers(seed, recurrent=0):
        shape = LayerShape(heads=2, kv_heads=1, head_dim=4, windows=(None,))
        return (RecurrentTables if recurrent else Tables)(shape, VOCABULARY, SHAPE.longest, torch.float64, device, seed)

    for variant in (without_graphs(plan), all_at_start(plan), plan):
        target = ProbeTarget(layers(0, 1), Rows(), VOCABULARY, SHAPE.longest, 1)
        drafter = ProbeDrafter(layers(2), Rows(), target, DraftScheme.EAGLE, 3) if drafts else None
        pages = PageFormat(page_size=SHAPE.page_size, num_pages=40)
        with Runner(variant, target, drafter, registry.load_backends(), RecordedGraphs(), pages=pages) as runner:
            runner.capture()
            found.append({done.name: done.tokens for done in runner.serve(REQUESTS)})
    assert found[0] == found[1] == found[2]
    captured = {done.role for done in runner.session.captured if done.step is not None and done.waiver is None}
    assert captured == set(plan.planned)
    assert Reason.LAZY in {forward.reason for forward in runner.session.forwards}


def shown(report):
    """The report as a terminal has it, on one line."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables(run_report(report)))
    return " ".join(console.export_text().split())


def test_a_report_has_what_was_captured_on_first_use_and_what_is_left():
    """With the step, what it took, and how often it served; all is in the JSON too."""
    report = started(replace(SPEC, capture=LAZY), verify=True).report
    assert report.verification.passed
    late = [done for done in report.captured if done.step is not None]
    assert late
    assert len(report.captured) - len(late) == report.plan.num_graphs - report.plan.num_lazy
    text, found = shown(report), plain(report)
    assert f"{len(late)} of {report.plan.num_lazy} graphs in" in text
    assert "of 1.00 GiB are taken; of 1e+06 s a minute" in text
    assert "not captured" not in text
    assert found["lazy"]["unused"] + found["lazy"]["asked"] + len(late) == report.plan.num_lazy
    assert {each["step"] for each in found["captured"]["entries"]} == {done.step for done in report.captured}


@pytest.mark.parametrize("memory", [0, 1])
def test_a_graph_without_room_is_refused_and_the_report_says_why(memory):
    """Each with its size, while something is left of the memory; without any, none is tried, and they are counted."""
    backends = registry_of(CountingReference())
    planned = make_plan(replace(SPEC, capture=replace(LAZY, memory=memory)), HERE, backends)
    plan = replace(planned, roles=tuple(replace(role, lazy=role.entries) for role in planned.roles))
    choices = RunRequest(page_size=4, pages=60)
    report = launch(plan, backends, requests_of, choices, ProgressRecord()).report
    refused = [done for done in report.captured if done.waiver is not None]
    assert refused
    assert all(done.tried == bool(memory) for done in refused)
    assert all(done.taken == 0 for done in report.captured)
    assert report.lazy.taken == 0
    assert report.lazy.untried == sum(not done.tried for done in refused)
    assert Reason.MEMORY in {forward.reason for forward in report.forwards}
    text = shown(report)
    assert f"{report.lazy.untried} graphs not tried: nothing of capture.memory is left" in text or memory
    for done in refused:
        assert (f"{done.role.value}: {done.entry} did not fit into memory" in text) == done.tried


@pytest.mark.parametrize("is_refilled", [True, False])
def test_a_step_after_a_capture_fills_its_fields_again(monkeypatch, is_refilled):
    """A graph that fills its own fields for the next step would go on from what the capture has written."""
    if not is_refilled:
        monkeypatch.setattr(StepLauncher, "invalidate_fields", lambda self: None)
    sizes = {"size_tokens": (4, 16), "size_reqs": (2, 4)}
    scene = Scene(shape=SHAPE, mode=GraphMode.FULL_DECODE_ONLY, num_reqs=4, num_tokens=16, lazy=True, **sizes)
    steps = (Serve(requests=((3, 6, 0),)), Serve(requests=((3, 6, 0), (3, 6, 0))))
    assert (play(under_test("reference"), Case(scene=scene, steps=steps)).failure is None) == is_refilled


@given(st.floats(0.01, 60), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 30)), min_size=1, max_size=20))
def test_seconds_that_are_spent_are_those_that_came_back_a_minutes_worth_and_the_last(per_minute, moments):
    """Over any time: nothing is spent while it is overdrawn, so that a long spending is paid off first."""
    bucket, now, spent = TokenBucket.full(per_minute, 0.0), 0.0, []
    for wait, seconds in moments:
        now += wait
        bucket = bucket.at(now)
        if bucket.is_open:
            spent.append((now, seconds))
            bucket = bucket.less(seconds)
    for first, (since, _) in enumerate(spent):
        for last in range(first, len(spent)):
            until, longest = spent[last]
            allowed = per_minute + (until - since) * per_minute / MINUTE + longest
            assert sum(seconds for _, seconds in spent[first : last + 1]) <= allowed * (1 + 1e-9)
