"""vllm#39773 with CUDA graphs: a draft decode that somebody planned PIECEWISE, on every backend.

It is found before a run, and where it is forced through, stopped before it reads what an earlier and
larger batch left in its padded rows.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch
from _deployments import CASES, REGISTRY, deployment, missing, small

from capture_planner.analysis.lint import Severity, lint
from capture_planner.errors import GuardError, RunError
from capture_planner.modes import Role
from capture_planner_runner.graphs.recorded import grapher_for
from capture_planner_runner.launch.launch import launch
from capture_planner_runner.launch.request import RunRequest
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.runner import Runner
from support.by_hand import with_piecewise_draft_decode

# Kernel libraries warn while they compile.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("one_thread")]
PLACES = [
    pytest.param((CASES["reference"], "cpu"), id="reference-cpu"),
    *(pytest.param((case, "cuda:0"), id=f"{case.name}-cuda") for case in CASES.values()),
]
grapher_once = functools.cache(grapher_for)


@pytest.fixture(params=PLACES)
def made(request):
    """Return a deployment whose draft decodes have graphs that pad requests."""
    case, place = request.param
    why = missing(case, torch.device(place))
    if why is not None:
        pytest.skip(why)
    device = torch.device(place)
    return deployment(
        case, small(case, 3), device, grapher_once(device), seed=0, requests=4, prompts=(1, 12), outputs=(2, 6)
    )


def by_hand(plan):
    """Return the plan with its draft decodes PIECEWISE, as vLLM would have captured them."""
    return with_piecewise_draft_decode(plan, 3, 1)


@contextmanager
def silent(what, total):
    """Show no progress."""
    yield lambda name: None


def runner_of(made, plan):
    """Put a plan together with the deployment's model and a drafter."""
    drafter = choose_drafter(
        "random", plan.speculative, made.target, num_states=plan.limits.max_num_reqs, length=300, seed=1
    )
    return Runner(plan, made.target, drafter, REGISTRY, made.grapher, pages=made.pages, device=made.device)


def bits(tensor):
    """Return a tensor's bytes."""
    return bytes(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def test_unpadded_requests_are_a_lint_finding_and_not_launched(made):
    """The plan as it was made is clean; by hand it has the rule's finding, and a launch repeats it."""
    assert not [f for f in lint(made.plan) if f.rule.severity is Severity.ERROR]
    (finding,) = [f for f in lint(by_hand(made.plan)) if f.rule.code == "CP030"]
    with pytest.raises(RunError) as caught:
        launch(by_hand(made.plan), REGISTRY, lambda _: made.requests, RunRequest(any_environment=True), silent)
    assert str(finding) in str(caught.value)


def test_unpadded_requests_forced_fail_with_the_thread_number(made):
    """Whatever the lint said: before any request is served."""
    choices = RunRequest(any_environment=True, any_plan=True, page_size=made.pages.page_size)
    with pytest.raises(GuardError, match=r"draft_decode: PIECEWISE .*vllm#39773"):
        launch(by_hand(made.plan), REGISTRY, lambda _: made.requests, choices, silent)


def test_unpadded_requests_are_refused_before_a_stale_index_is_read(made):
    """No forward of it runs, not even to warm up: its fields hold what was there, and it has no graph."""
    with runner_of(made, by_hand(made.plan)) as runner:
        role = runner.roles[Role.DRAFT_DECODE]
        role.fields.poison()
        before = {buffer.key: bits(buffer.tensor) for buffer in role.fields}
        with pytest.raises(GuardError, match=r"a PIECEWISE graph pads none"):
            runner.capture()
        assert {buffer.key: bits(buffer.tensor) for buffer in role.fields} == before
        assert not role.graphs


def test_device_captures_and_serves_after_unpadded_requests_are_refused(made):
    """What was refused left no capture open: the plan as it was made has the same kernels' tokens."""
    with runner_of(made, by_hand(made.plan)) as runner, pytest.raises(GuardError):
        runner.capture()
    graphs, same = made.serve(made.plan), made.serve(made.plan, replay=False)
    assert graphs.tokens == same.tokens
    served = {forward.role for forward in graphs.session.forwards if forward.entry is not None}
    assert Role.DRAFT_DECODE in served
