"""FlashAttention's bound on splits under a plan: a full graph has it at capture and at replay, a larger batch not."""

import logging
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner_vllm.inside import hooks, splits, trials
from engines.generators.vllm_plans import random_plans
from support.vllm_module import MANAGERS, CUDAGraphMode, config_for, manager_for, vllm_modules

BOUND = 32


def attention():
    """A module with the rule of vLLM's builder: the bound for every batch up to the largest graph."""

    class FlashAttentionMetadataBuilder:
        def __init__(self, config):
            self.max_cudagraph_size = config.compilation_config.max_cudagraph_capture_size

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return BOUND if common_attn_metadata.num_actual_tokens <= self.max_cudagraph_size else 0

    module = ModuleType(splits.BACKEND)
    module.FlashAttentionMetadataBuilder = FlashAttentionMetadataBuilder
    return module


@contextmanager
def under(plan):
    """A configuration under a plan, a builder of it, and what gives the managers of the plan's roles."""
    with vllm_modules() as modules, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "current_plan", lambda: plan)
        patch.setattr(hooks, "decisions", {})
        patch.setattr(splits.FULL_GRAPHS, "tokens", None)
        backend = attention()
        hooks.apply_to_config(modules[hooks.CONFIG])
        hooks.apply_to_managers(modules[MANAGERS])
        splits.bound_splits(backend)
        config = config_for(modules, plan)
        config._set_cudagraph_sizes()
        builder = backend.FlashAttentionMetadataBuilder(config)
        yield builder, lambda role: manager_for(modules, config, plan, role)


def splits_of(builder, tokens):
    """The bound for a batch of so many tokens; 0: FlashAttention chooses."""
    return builder.build(0, common_attn_metadata=SimpleNamespace(num_actual_tokens=tokens))


@given(random_plans(), st.sampled_from((0, 8, 64, splits.OWN_BOUND)), st.randoms(use_true_random=False))
def test_full_graphs_alone_have_the_bound(plan, own, random):
    """In whatever order managers are made, and anew: at the capture of a graph and ever after it has the bound."""
    with under(plan) as (builder, make), pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "OWN_BOUND", own)
        largest, captured = builder.max_cudagraph_size, {0}
        assert splits_of(builder, largest) == BOUND  # as by itself, until a manager says which graphs are full
        for role in random.sample([*plan.planned, *plan.planned], 2 * len(plan.planned)):
            captured |= {desc.num_tokens for desc in make(role)._capture_descs.get(CUDAGraphMode.FULL, ())}
            expected = min(largest or 0, max(own, *captured))
            bounded = {tokens for tokens in range(1, plan.limits.max_num_tokens + 2) if splits_of(builder, tokens)}
            assert bounded == set(range(1, min(expected, plan.limits.max_num_tokens + 1) + 1))
            assert builder.max_cudagraph_size == largest


@given(random_plans(), st.sampled_from((CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)), st.integers(1, 2048))
def test_a_trial_of_a_full_graph_has_the_bound(plan, mode, tokens):
    """Also above every graph of the plan; a trial of a mixed batch costs what such a batch will."""
    with under(plan) as (builder, make):
        for role in plan.planned:
            make(role)
        before, descriptor = splits_of(builder, tokens), SimpleNamespace(cg_mode=mode, num_tokens=tokens)
        with trials.set_aside(SimpleNamespace(), descriptor, iter([builder])):
            assert splits_of(builder, tokens) == (BOUND if mode is CUDAGraphMode.FULL else before)
        assert splits_of(builder, tokens) == before


@given(random_plans())
def test_where_the_full_graphs_are_not_known_the_bound_is_vllms(plan):
    """Of a runner without managers, and of a manager whose tables have another name."""
    with under(plan) as (builder, make):
        make(plan.planned[0])
        splits.FULL_GRAPHS.add(SimpleNamespace())
        assert splits_of(builder, builder.max_cudagraph_size) == BOUND
        assert splits_of(builder, builder.max_cudagraph_size + 1) == 0


@pytest.mark.parametrize(
    ("builders", "line"),
    [
        ({}, f"{splits.BACKEND} has no FlashAttentionMetadataBuilder"),
        ({"build": lambda self, batch: batch}, "build lacks common_attn_metadata, common_prefix_len"),
    ],
)
def test_other_builders_are_left_alone(builders, line, caplog):
    """A release whose builder takes other arguments keeps its bound, and the log says what that costs."""
    module = ModuleType(splits.BACKEND)
    if builders:
        module.FlashAttentionMetadataBuilder = type("FlashAttentionMetadataBuilder", (), dict(builders))
    with caplog.at_level(logging.WARNING, "capture_planner.vllm"):
        splits.bound_splits(module)
    assert line in caplog.text
    assert all("keeps room for 32 splits" in message for message in caplog.messages)
    assert not builders or module.FlashAttentionMetadataBuilder.build is builders["build"]
