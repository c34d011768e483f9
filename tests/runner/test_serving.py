"""A step ahead of its tokens: what is launched when, and what is copied."""

import pytest
import torch

from capture_planner import load_backends
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records.model import DataType, Model
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner_runner.capture.variants import without_graphs
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.inputs import LOOKAHEAD
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.steps import copy_to_host
from capture_planner_runner.serving.workload import Request
from support.runs import CPU

MODEL = Model(
    name="tiny",
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    hidden_size=8,
    vocab_size=32,
    max_model_len=512,
    dtype=DataType.FLOAT64,
)


@pytest.fixture(scope="module")
def deployment():
    """A plan with full decode graphs, and a model for it."""
    spec = Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=4, max_num_tokens=64),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend="reference",
        sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(8, 64), num_reqs=(1, 4)),
    )
    plan = make_plan(spec, CPU, load_backends())
    return plan, load_target(None, plan.model, device=torch.device("cpu"), dtype=torch.float64)


def runner_of(deployment, plan=None, **options):
    """A runner that is captured."""
    made = Runner(
        plan or deployment[0],
        deployment[1],
        None,
        load_backends(),
        RecordedGraphs(),
        pages=PageFormat(page_size=4, num_pages=1 + 4 * 128),
        options=Options(**options),
    )
    made.capture()
    return made


def request(name, prompt, tokens, stop=()):
    """A request that is there from the start."""
    return Request(name=name, arrival=0.0, prompt=prompt, max_new_tokens=tokens, stop=frozenset(stop))


def answers(deployment, requests, **options):
    """What each request is told, eager and one step at a time unless the options say otherwise."""
    plan = None if options else without_graphs(deployment[0])
    with runner_of(deployment, plan, **options) as runner:
        return {done.name: done.tokens for done in runner.serve(requests)}


def test_a_step_is_launched_before_the_tokens_of_the_last_are_read(deployment):
    """One step is always under way; without running ahead none is when ``step`` returns."""
    for ahead in (True, False):
        with runner_of(deployment, run_ahead=ahead) as runner:
            serving = runner.start()
            serving.scheduler.submit(request("r", (1, 2, 3), 4), 0.0)
            forwards = []
            while serving.step():
                forwards.append(len(runner.session.forwards) - len(runner.session.steps))
            assert forwards == ([1, 1, 1, 1, 0] if ahead else [0] * 4)
            assert serving.done
            assert [done.output_tokens for done in serving.served] == [4]


def test_a_decode_that_goes_on_copies_nothing(deployment):
    """The graph brings its fields to the next token: they are written anew when the batch or its pages change."""
    requests = [request(f"r{i}", tuple(range(1, 4 + i)), 3 * LOOKAHEAD) for i in range(3)]
    with runner_of(deployment, run_ahead=True) as runner:
        role, written = runner.roles[Role.TARGET], []
        apply = role._apply
        role._apply = lambda writes: (written.append(len(runner.session.forwards)), apply(writes))[1]
        told = {done.name: done.tokens for done in runner.serve(requests)}
        steps = len(runner.session.steps)
    assert steps > 3 * LOOKAHEAD - 3
    assert 3 <= len(written) <= 8
    assert told == answers(deployment, requests)


def test_a_stop_token_ends_a_request_with_a_step_under_way(deployment):
    """The surplus step is nobody's: the place goes to the next request, whose tokens are its own."""
    prompts = [(5, 9, 20, 31), (7,), (3, 3, 8), (1, 2), (30, 4, 4), (11, 12, 13), (2,), (29, 1)]
    plain = answers(deployment, [request(str(i), prompt, 24) for i, prompt in enumerate(prompts)])
    requests = []
    for number, prompt in enumerate(prompts):
        told = plain[str(number)]
        requests.append(request(str(number), prompt, 24, stop={told[number % 7]} if number % 2 else ()))
    expected = {r.name: r.cut(plain[r.name]) for r in requests}
    assert any(len(tokens) < 24 for tokens in expected.values())
    for options in ({"run_ahead": True}, {"run_ahead": True, "poison": True}, {"run_ahead": False}):
        assert answers(deployment, requests, **options) == expected


def test_what_is_cut_off_has_no_token_that_is_copy_to_host(deployment):
    """An interruption leaves the tokens that were read, and no sign for one that was not."""
    with runner_of(deployment, run_ahead=True) as runner:
        serving = runner.start()
        serving.scheduler.submit(request("r", (1, 2, 3), 9), 0.0)
        for _ in range(4):
            serving.step()
        serving.cut_off()
        (done,) = serving.served
    assert done.finished is None
    assert done.tokens == answers(deployment, [request("r", (1, 2, 3), 9)])["r"][:3]


def test_values_that_are_read_are_not_those_of_the_next_step():
    """A buffer may be written again while its values are on their way."""
    tensor = torch.arange(3)
    arrived = copy_to_host(tensor)
    tensor.zero_()
    assert arrived().tolist() == [0, 1, 2]


def test_nothing_is_captured_and_nobody_else_served_meanwhile(deployment):
    """Both write what the steps under way go on from; when those are over, or cut off, it is in order."""
    with runner_of(deployment, run_ahead=True) as runner:
        serving = runner.start()
        serving.scheduler.submit(request("r", (1, 2, 3), 9), 0.0)
        for _ in range(4):
            serving.step()
        for what in (runner.capture, runner.start):
            with pytest.raises(RunError, match="called while requests are served"):
                what()
        serving.cut_off()
        with pytest.raises(RunError, match="was cut off"):
            serving.step()
        with pytest.raises(RunError, match="has captured already"):
            runner.capture()
        again = {done.name: done.tokens for done in runner.serve([request("r", (1, 2, 3), 9)])}
    assert again == answers(deployment, [request("r", (1, 2, 3), 9)])


@pytest.mark.parametrize(
    ("prompt", "tokens", "says"),
    [((), 4, "needs one to begin with"), ((1,) * 500, 20, "has room for 512"), ((1,) * 400, 9, "103 pages")],
)
def test_a_request_that_can_never_be_served_is_refused(deployment, prompt, tokens, says):
    """It would never get a place, and be in the way of all behind it."""
    with runner_of(deployment, without_graphs(deployment[0])) as runner:
        runner.pages = PageFormat(page_size=4, num_pages=100)
        asked = request("long", prompt, tokens)
        with pytest.raises(RunError, match=says):
            runner.start([asked])
        serving = runner.start()
        with pytest.raises(RunError, match=f"the request long .*{says}"):
            serving.scheduler.submit(asked, 0.0)
        assert serving.done


@pytest.mark.parametrize("ahead", [True, False])
def test_a_step_that_cannot_be_launched_loses_none_before_it(deployment, ahead, monkeypatch):
    """Where a backend breaks, what was under way is still read when the next step is."""
    asked = request("r", (1, 2, 3), 6)
    with runner_of(deployment, run_ahead=ahead) as runner:
        serving = runner.start()
        serving.scheduler.submit(asked, 0.0)
        for _ in range(3):
            serving.step()
        with monkeypatch.context() as patch:
            patch.setattr(serving.scheduler, "schedule", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                serving.step()
        while serving.step():
            pass
        (done,) = serving.served
    assert done.tokens == answers(deployment, [asked])["r"]
    assert [step.index for step in runner.session.steps] == list(range(6))
