"""transformers' continuous batching under a plan, with the graphs of a device; tests/engines has the same on a CPU."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from capture_planner.modes import GraphMode
from capture_planner_transformers import apply
from support.continuous_batching import generated, manager_of, planned, tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
LENGTHS = (3, 30, 1, 17, 9, 22, 40, 11, 5)


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.FULL_DECODE_ONLY])
def test_graphs_of_a_device_give_the_tokens_of_eager_steps(mode: GraphMode) -> None:
    """In float32, through ``generate_batch``: no runner captures after its warm-up, or it would raise."""
    model = copy.deepcopy(tiny_model()).cuda()
    stock = generated(model, LENGTHS)
    application = apply(model, planned(mode), kv_sizes=(0, 64, 128, 256, 512), strict=True)
    assert generated(model, LENGTHS) == stock
    application.remove()


def test_every_graph_of_a_plan_is_captured_at_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    """And their memory is counted."""
    model = copy.deepcopy(tiny_model()).cuda()
    manager = manager_of(model)
    with caplog.at_level(logging.INFO, "capture_planner.transformers"):
        apply(manager, planned(), kv_sizes=(0, 512), strict=True)
        manager.warmup()
    runner = manager.batch_processor.model_runner
    assert runner.captured == set(runner.table.keys)
    assert all(pool.closed for pool in runner.pools)
    assert "graphs in" in caplog.text
