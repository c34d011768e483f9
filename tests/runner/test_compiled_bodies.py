"""Compiled bodies: what is served is what is served without them, to the bit, whatever the plan."""

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from capture_planner import load_backends
from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner.records.spec import Limits, Lora, Policy, Roles, Sizes, Spec
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.assembly import dtype_of
from capture_planner_runner.launch.request import drafter_of
from capture_planner_runner.models.adapters import LoraAdapters, random_adapters
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.workload import generated, with_adapters
from support.runs import CPU, pages_for, requests_for, runnable_specs

pytestmark = pytest.mark.usefixtures("one_thread")
REGISTRY = load_backends()
FEW = settings(max_examples=min(settings.default.max_examples // 6, 100))
OPTIONS = st.fixed_dictionaries(
    {
        "poison": st.booleans(),
        "replay": st.sampled_from((True, True, True, False)),
        "run_ahead": st.booleans(),
        "drafts_on_device": st.booleans(),
    }
)


def served(plan, target, adapters, requests, **options):
    """Return each request's tokens, and the bits that the last forwards of target and drafter left."""
    drafter = drafter_of(plan, target, "random")
    pages = pages_for(plan)
    loaded = LoraAdapters(target.linears(), adapters) if adapters else None
    with Runner(
        plan, target, drafter, REGISTRY, RecordedGraphs(), pages=pages, options=Options(**options), adapters=loaded
    ) as runner:
        runner.capture()
        tokens = {done.name: done.tokens for done in runner.serve(requests)}
        state = runner.draft_state
        left = [runner.target.hidden, *([] if state is None else [state.hidden, state.proposed])]
    return tokens, [tensor.nan_to_num(0.0) if tensor.is_floating_point() else tensor for tensor in left], runner


@settings(FEW)
@given(st.data(), OPTIONS)
def test_a_compiled_run_has_the_bits_of_one_that_is_not(data, options):
    """All modes, drafters and adapters, from graphs and without; padded and poisoned."""
    spec = data.draw(runnable_specs(dtype=DataType.FLOAT32))
    requests = data.draw(requests_for(spec))
    lora = data.draw(st.sampled_from((None, None, Lora(max_active=2))))
    try:
        plan = make_plan(replace(spec, lora=lora, roles=Roles() if lora else spec.roles), CPU, REGISTRY)
    except PlanningError:
        plan = None
    assume(plan is not None)
    target = load_target(None, plan.model, device=torch.device("cpu"), dtype=dtype_of(plan.model.dtype), seed=5)
    adapters = ()
    if lora is not None:
        adapters = random_adapters(target.linears(), 2, seed=3)
        requests = with_adapters(requests, 2, seed=3)
    tokens, left, runner = served(plan, target, adapters, requests, compile=True, **options)
    assert not runner.compilation.not_compiled
    expected, bits, _ = served(plan, target, adapters, requests, **options)
    assert tokens == expected
    assert all(map(torch.equal, left, bits))
    event(f"{plan.speculative and plan.speculative.method}, {spec.mode}, lora {lora is not None}")


def test_a_model_that_cannot_be_compiled_runs_as_it_is_and_the_report_says_why():
    """Its drafter is compiled all the same. Graphs hold what no compiler takes for any number of tokens."""
    spec = Spec(
        model=Model(
            name="tiny", num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, max_model_len=24, vocab_size=61
        ),
        limits=Limits(max_num_reqs=3, max_num_tokens=12),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend="reference",
        speculative=Speculative(method=Method.EAGLE, num_tokens=2),
        sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(12,), num_reqs=(2,)),
    )
    plan = make_plan(replace(spec, model=replace(spec.model, dtype=DataType.FLOAT32)), CPU, REGISTRY)
    target = load_target(None, plan.model, device=torch.device("cpu"), dtype=torch.float32, seed=5)
    doubled = next(iter(target.linears().values()))
    doubled.register_forward_hook(lambda module, args, out: out * (1 if out.shape[-2] > 4 else 2))
    requests = generated(5, seed=1, rate=None, prompt_tokens=(1, 9), output_tokens=(2, 9), vocab_size=61)
    tokens, left, runner = served(plan, target, (), requests, compile=True)
    expected, bits, _ = served(plan, target, (), requests)
    assert tokens == expected
    assert all(map(torch.equal, left, bits))
    (reason,) = runner.compilation.not_compiled
    assert reason.startswith("target: its forward takes other paths for other numbers of tokens: it checks")
    assert runner.compilation.facts()["not compiled"] == reason
    assert runner.compilation.kinds > 0
