"""vLLM's capture under a plan: its buffers have room for every graph, and each graph's output is an eager forward's."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.plan import Plan
from capture_planner_vllm.inside import buffers, hooks
from capture_planner_vllm.inside.captures import CaptureLog
from engines.generators.vllm_plans import random_plans
from support.vllm_module import MANAGERS, CUDAGraphMode, capture, config_for, manager_for, model, vllm_modules

PLAN = codec.load_plan(Path(__file__).parents[2] / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml")


@contextmanager
def captured(plan: Plan, role: Role = Role.TARGET):
    """A role's manager, made and captured under a plan."""
    with vllm_modules() as modules, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "current_plan", lambda: plan)
        patch.setattr(hooks, "decisions", {})
        hooks.apply_to_config(modules[hooks.CONFIG])
        hooks.apply_to_managers(modules[MANAGERS])
        config = config_for(modules, plan)
        config._set_cudagraph_sizes()
        manager = manager_for(modules, config, plan, role)
        capture(manager)
        yield manager


def test_decode_may_be_larger_than_every_mixed_batch() -> None:
    """The plan under which vLLM did not start: mixed batches up to 512 tokens, decodes up to 256 requests of 4."""
    target = PLAN.role(Role.TARGET)
    mixed = Entry(mode=GraphMode.PIECEWISE, num_tokens=512)
    decodes = [Entry(mode=GraphMode.FULL, num_tokens=4 * count, num_reqs=count, query_len=4) for count in (1, 256)]
    with captured(replace(PLAN, roles=(replace(target, entries=(mixed, *decodes)), *PLAN.roles[1:]))) as manager:
        assert manager.hidden_states.shape[0] == 1024
        assert [desc.num_tokens for desc in manager.graphs] == [512, 1024, 4]


@given(random_plans(), st.randoms(use_true_random=False))
def test_every_full_graph_gives_what_an_eager_forward_gives(plan: Plan, random) -> None:
    """Also where a decode is larger than the largest graph of mixed batches, whose warm-up comes first in vLLM."""
    with captured(plan) as manager:
        ids = manager.input_buffers.input_ids
        for desc in random.sample(list(manager.graphs), len(manager.graphs)):
            if desc.cg_mode is CUDAGraphMode.FULL:
                ids[: desc.num_tokens] = torch.tensor([random.randrange(1 << 20) for _ in range(desc.num_tokens)])
                assert torch.equal(manager.run_fullgraph(desc), model(ids[: desc.num_tokens]))


@given(random_plans(), st.sampled_from(Role))
def test_warm_up_adds_no_graph(plan: Plan, role: Role) -> None:
    """Order and graphs are the plan's, with or without it."""
    if role in plan.planned:
        with captured(plan, role) as manager:
            listed = [
                desc for mode in ("PIECEWISE", "FULL") for desc in manager._capture_descs.get(CUDAGraphMode[mode], ())
            ]
            assert list(manager.graphs) == listed


def described(*sizes):
    """Descriptors of those numbers of tokens."""
    return [SimpleNamespace(num_tokens=size, cg_mode=CUDAGraphMode.FULL) for size in sizes]


@given(st.lists(st.integers(1, 9), max_size=4), st.lists(st.integers(1, 9), max_size=4))
def test_largest_is_warmed_up_first_and_once(piecewise: list[int], full: list[int]) -> None:
    """Before anything else, with the words of the first call, and not where the first is the largest."""
    listed = {"PIECEWISE": described(*piecewise), "FULL": described(*full)}
    manager, ran = SimpleNamespace(_capture_descs=listed), []

    def create(desc, warmup):
        return lambda mode: ran.append((desc.num_tokens, warmup, mode.name))

    @buffers.largest_first
    def whole_capture(_, create_forward_fn):
        for desc in [*listed["PIECEWISE"], *listed["FULL"]]:
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
            create_forward_fn(desc, warmup=False)(CUDAGraphMode.NONE)

    whole_capture(manager, create)
    sizes = piecewise + full
    expected = [(size, warmup, "NONE") for size in sizes for warmup in (True, False)]
    extra = [(max(sizes), True, "NONE")] if sizes and max(sizes) > sizes[0] else []
    assert ran == extra + expected


def test_observed_graphs_are_those_that_are_captured(monkeypatch) -> None:
    """The warm-up counts to the first graph, whose seconds and memory have vLLM's buffers in them anyway."""
    monkeypatch.setattr("capture_planner_vllm.inside.device.free_memory", lambda: 0)
    listed = {"PIECEWISE": described(2), "FULL": described(8, 4)}
    manager = SimpleNamespace(_capture_descs=listed)
    logs = []

    def vllms(_, create_forward_fn):
        for desc in [*listed["PIECEWISE"], *listed["FULL"]]:
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)

    def observed(manager, create_forward_fn):
        logs.append(CaptureLog(create_forward_fn))
        vllms(manager, logs[-1].create_forward)
        logs[-1].end()

    buffers.largest_first(observed)(manager, lambda desc, warmup: lambda mode: None)
    assert [graph.descriptor.num_tokens for graph in logs[0].graphs] == [2, 8, 4]
