"""LoRA adapters in the runner: mixed in a batch, in graphs for so many, against models that they are merged into."""

from collections import Counter

import attrs
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from capture_planner import load_backends
from capture_planner.errors import PlanningError, RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, Model
from capture_planner.records.spec import Limits, Lora, Policy, Roles, Sizes, Spec
from capture_planner_runner.capture.variants import without_graphs, without_speculation
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.assembly import dtype_of
from capture_planner_runner.launch.request import drafter_of
from capture_planner_runner.models.adapters import LoraAdapters, random_adapters
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.workload import Request, with_adapters
from support.runs import CPU, pages_for, requests_for, runnable_specs

pytestmark = pytest.mark.usefixtures("one_thread")
REGISTRY = load_backends()
FEW = settings(max_examples=max(settings.default.max_examples // 5, 3))
SEEDS = st.integers(0, 1 << 16)


class Deployment(tuple):
    """A plan, its model, adapters and requests; without their text, which is long."""

    def __repr__(self):
        return f"{self[0].model.dtype}, {self[3]}"


@st.composite
def deployments(draw, dtype=DataType.FLOAT64):
    """Return a plan with LoRA, its model, adapters of random weights, and requests that have some of them."""
    spec = draw(runnable_specs(dtype=dtype))
    lora = Lora(max_active=draw(st.integers(1, 3)), specialize=draw(st.booleans()))
    try:
        plan = make_plan(replace(spec, lora=lora, roles=Roles()), CPU, REGISTRY)
    except PlanningError:
        plan = None
    assume(plan is not None)
    target = target_of(plan)
    adapters = random_adapters(target.linears(), draw(st.integers(1, 4)), seed=draw(SEEDS))
    requests = with_adapters(draw(requests_for(spec)), len(adapters), seed=draw(SEEDS))
    return Deployment((plan, target, adapters, requests))


def target_of(plan):
    """Return the model of a plan; always the same weights."""
    return load_target(None, plan.model, device=torch.device("cpu"), dtype=dtype_of(plan.model.dtype), seed=5)


def runner_of(plan, target, adapters, **options):
    """Return a runner with room for all requests at full length."""
    drafter = drafter_of(plan, target, "random")
    pages = pages_for(plan)
    loaded = LoraAdapters(target.linears(), adapters) if adapters else None
    return Runner(
        plan, target, drafter, REGISTRY, RecordedGraphs(), pages=pages, options=Options(**options), adapters=loaded
    )


def serve(runner, requests):
    """Capture and serve; return tokens by request."""
    with runner:
        runner.capture()
        return {done.name: done.tokens for done in runner.serve(requests)}


@torch.no_grad()
def merged(plan, adapter):
    """Return the model of a plan with an adapter added to its weights."""
    target = target_of(plan)
    for name, layer in target.linears().items():
        product = adapter.products[name]
        layer.weight += (product.up.double() @ product.down.double()).to(layer.weight)
    return target


def alone(plan, adapters, requests):
    """Return each request's tokens from the model that its adapter is merged into, eager and without a drafter."""
    plain = without_speculation(plan, REGISTRY)
    tokens = {}
    for number in range(len(adapters) + 1):
        mine = [attrs.evolve(request, adapter=0) for request in requests if request.adapter == number]
        if mine:
            target = merged(plan, adapters[number - 1]) if number else target_of(plan)
            tokens |= serve(runner_of(plain, target, ()), mine)
    return tokens


@settings(FEW)
@given(deployment=deployments(), poison=st.booleans(), ahead=st.booleans())
def test_each_request_has_the_tokens_of_the_model_that_its_adapter_is_merged_into(deployment, poison, ahead):
    """Whatever is mixed in a batch, drafted, padded, poisoned or launched ahead."""
    plan, target, adapters, requests = deployment
    runner = runner_of(plan, target, adapters, poison=poison, debug=poison, run_ahead=ahead, drafts_on_device=ahead)
    assert serve(runner, requests) == alone(plan, adapters, requests)
    active = Counter(forward.active_loras for forward in runner.session.forwards if forward.role is Role.TARGET)
    event(f"up to {max(active)} active")
    assert max(active) <= plan.lora.max_active + 1


@settings(FEW)
@given(deployments(dtype=DataType.FLOAT32))
def test_a_graph_with_adapters_computes_the_bits_of_eager_in_float32(deployment):
    """``compare`` runs each forward both ways and raises at the first tensor that differs."""
    plan, target, adapters, requests = deployment
    runner = runner_of(plan, target, adapters, compare=True)
    serve(runner, requests)
    assert runner.comparison.report().difference is None


TINY = Spec(
    model=Model(
        name="tiny",
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        hidden_size=16,
        vocab_size=61,
        max_model_len=32,
        dtype=DataType.FLOAT64,
    ),
    limits=Limits(max_num_reqs=4, max_num_tokens=32),
    mode=GraphMode.FULL_AND_PIECEWISE,
    backend="reference",
    sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=(2, 4), num_tokens=(8,)),
    lora=Lora(max_active=2, specialize=True),
)


@pytest.fixture(scope="module")
def tiny():
    """A plan for 4 requests with up to 2 adapters, each count with graphs of its own, its model and 3 adapters."""
    plan = make_plan(TINY, CPU, REGISTRY)
    target = target_of(plan)
    return plan, target, random_adapters(target.linears(), 3, seed=1)


def requests_with(*adapters):
    """Return requests that decode together for a while."""
    return [
        Request(name=f"r{number}", arrival=0.0, prompt=(7, 1 + number), max_new_tokens=6, adapter=adapter)
        for number, adapter in enumerate(adapters)
    ]


@pytest.mark.parametrize(
    ("adapters", "active", "graph"),
    [((0, 0), 0, 0), ((1, 1), 1, 1), ((1, 0), 2, 2), ((1, 2), 2, 2), ((1, 2, 0), 3, 3), ((3, 3, 0), 2, 2)],
)
def test_a_batch_is_dispatched_by_the_number_of_its_active_adapters(tiny, adapters, active, graph):
    """Rows without one count as one more next to others, as in vLLM; a graph holds as many, or more."""
    plan, target, loaded = tiny
    runner = runner_of(plan, target, loaded)
    serve(runner, requests_with(*adapters))
    decodes = [f for f in runner.session.forwards if f.query_len == 1 and f.num_reqs == len(adapters)]
    assert {(f.active_loras, f.mode, f.entry.active_loras) for f in decodes} == {(active, GraphMode.FULL, graph)}


def test_no_batch_has_more_adapters_than_the_plan_has_graphs_for(tiny):
    """A third adapter waits until one of two has left, and everything is served."""
    plan, target, loaded = tiny
    runner = runner_of(plan, target, loaded)
    requests = requests_with(1, 2, 3, 0)
    tokens = serve(runner, requests)
    assert tokens == alone(plan, loaded, requests)
    assert max(f.active_loras for f in runner.session.forwards) == 2
    assert max(step.waiting for step in runner.session.steps) == 2


def test_adapters_of_the_same_prompt_say_different_things(tiny):
    """Otherwise no test here would notice a wrong one."""
    plan, target, loaded = tiny
    requests = [attrs.evolve(each, prompt=(7, 1)) for each in requests_with(0, 1, 2)]
    assert len(set(serve(runner_of(plan, target, loaded), requests).values())) == 3


def test_what_a_run_has_no_adapters_for_is_refused(tiny):
    """An adapter that the run does not have, and adapters of a plan that has none."""
    plan, target, loaded = tiny
    with runner_of(plan, target, loaded) as runner, pytest.raises(RunError, match="has adapter 4, and the run has 3"):
        runner.start(requests_with(4))
    with pytest.raises(RunError, match=r"adapters were given, and the plan has none; plan with lora"):
        runner_of(make_plan(replace(TINY, lora=None), CPU, REGISTRY), target, loaded)


def test_eager_forwards_have_adapters_too(tiny):
    """What verifies a run is served without graphs."""
    plan, target, loaded = tiny
    requests = requests_with(1, 0, 2)
    assert serve(runner_of(without_graphs(plan), target, loaded), requests) == alone(plan, loaded, requests)


@pytest.mark.parametrize("name", ["adapter_lanes", "active_adapters"])
def test_a_stale_map_gives_wrong_tokens(tiny, name, monkeypatch):
    """Both fields are read: as they were left by the batch before, tokens are of another adapter."""
    plan, target, loaded = tiny
    requests = [attrs.evolve(each, arrival=0.02 * number) for number, each in enumerate(requests_with(1, 2, 0, 2))]
    runner = runner_of(plan, target, loaded)
    role = runner.roles[Role.TARGET]
    own = role.writes
    monkeypatch.setattr(role, "writes", lambda inputs: [w for w in own(inputs) if w.buffer.field.name != name])
    assert serve(runner, requests) != alone(plan, loaded, requests)
