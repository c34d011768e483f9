"""Captures between the steps of requests, on a GPU: tokens stay, and memory stays within its reservation."""

from __future__ import annotations

import pytest
import torch

from capture_planner import load_backends
from capture_planner.modes import GraphMode, Pool
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import CapturePolicy, CaptureTiming, Limits, Policy, Sizes, Spec
from capture_planner_runner.capture.variants import all_at_start
from capture_planner_runner.host import this_environment
from capture_planner_runner.ledger.rows import GraphCapture
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import generated

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAZY = CaptureTiming(policy=CapturePolicy.LAZY, memory=1 << 28, seconds_per_minute=1e6)


def plan_of(k: int, timing: CaptureTiming, pool: Pool) -> Plan:
    """Return a plan in float64, where a sum in another order changes no likeliest token."""
    spec = Spec(
        model=Model(
            name="small",
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            hidden_size=128,
            vocab_size=512,
            max_model_len=128,
            dtype=DataType.FLOAT64,
        ),
        limits=Limits(max_num_reqs=8, max_num_tokens=128),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend="reference",
        speculative=Speculative(method=Method.EAGLE, num_tokens=k) if k else None,
        sizes=Sizes(policy=Policy.POWERS_OF_TWO),
        capture=timing,
        pool=pool,
    )
    return make_plan(spec, this_environment("here"), load_backends())


def served(plan: Plan, rounds: int = 2) -> tuple[list[dict[str, tuple[int, ...]]], list[GraphCapture]]:
    """Serve the same requests so often; return their tokens, and what was captured."""
    from capture_planner_runner.graphs.cuda import CudaGraphs

    device, stream = torch.device("cuda:0"), torch.cuda.current_stream()
    target = load_target(None, plan.model, device=device, dtype=torch.float64, seed=1)
    drafter = None
    if plan.speculative is not None:
        drafter = choose_drafter("random", plan.speculative, target, num_states=8, length=140, seed=2)
    requests = generated(
        12, seed=3, rate=200, prompt_tokens=(1, 40), output_tokens=(4, 24), vocab_size=target.vocab_size
    )
    pages, options = PageFormat(page_size=16, num_pages=65), Options(compile=False)
    try:
        with Runner(
            plan, target, drafter, load_backends(), CudaGraphs(device), pages=pages, device=device, options=options
        ) as runner:
            runner.capture()
            tokens = [{done.name: done.tokens for done in runner.serve(requests)} for _ in range(rounds)]
            return tokens, list(runner.session.captured)
    finally:
        torch.cuda.set_stream(stream)


@pytest.mark.parametrize("pool", list(Pool))
@pytest.mark.parametrize("k", [0, 2])
def test_tokens_are_those_with_all_graphs_at_start_and_memory_is_within_its_reservation(k: int, pool: Pool) -> None:
    """Run ahead without drafts, on the device with them; a graph is captured once."""
    plan = plan_of(k, LAZY, pool)
    expected, _ = served(all_at_start(plan))
    tokens, captured = served(plan)
    assert tokens == expected
    late = [done for done in captured if done.step is not None]
    assert late
    assert len({(done.role, done.entry) for done in late}) == len(late)
    assert all(done.readings is not None and done.waiver is None for done in late)
    assert sum(done.taken for done in late) <= (LAZY.memory or 0)


@pytest.mark.parametrize("memory", [0, 1])
def test_without_memory_what_takes_some_is_refused_and_tokens_stay(memory: int) -> None:
    """A refused graph has its reason, and leaves what was captured as it was."""
    expected, _ = served(all_at_start(plan_of(2, LAZY, Pool.SHARED)), rounds=1)
    tokens, captured = served(plan_of(2, replace(LAZY, memory=memory), Pool.SHARED), rounds=1)
    assert tokens == expected
    late = [done for done in captured if done.step is not None]
    assert late
    assert all(done.waiver is not None or done.taken <= 0 for done in late)
    assert any(done.tried for done in late) == bool(memory)
