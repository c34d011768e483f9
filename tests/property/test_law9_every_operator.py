"""Law 9: padding is inert for every operator, not for attention alone: recurrences, and what couples rows."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.records._base import replace
from capture_planner_conformance import stage as stage_module
from capture_planner_conformance.deployments import scenes
from capture_planner_conformance.scene import Arrive, RunBatch
from capture_planner_conformance.shapes import SMALL
from capture_planner_conformance.steps import run_step
from support.runner_conformance import RunnerScene, RunnerStage, runner_under_test

pytestmark = pytest.mark.usefixtures("one_thread")
SCENES = scenes(SMALL[:1], kind=RunnerScene).map(lambda scene: replace(scene, recurrent=True, coupled=True))


def computed(scene, requests, garbage):
    """What a decode and a prompt compute: hidden states and recurrent states, with garbage in rows of padding."""
    k, rows = scene.drafts, range(requests)
    arrivals = [Arrive(prompt=2, computed=2) for _ in rows]
    decode = RunBatch(rows=tuple((number, 1 + k, 0) for number in rows))
    mixed = RunBatch(rows=tuple((number, 1, 0) for number in rows))
    found = []
    with mock.patch.object(stage_module, "GARBAGE", (garbage,)), RunnerStage(runner_under_test(), scene) as stage:
        for step in (*arrivals, decode, mixed):
            run_step(stage, step)
            if isinstance(step, RunBatch):
                tokens = sum(count for _, count, _ in step.rows)
                found.append(stage.runner.target.hidden[:tokens].clone())
                found += [pool.states[1:].clone() for pool in stage.world.caches[0].states]
    return found


@settings(max_examples=max(settings.default.max_examples // 20, 3))
@given(SCENES, st.data())
def test_real_rows_and_states_do_not_depend_on_rows_of_padding(scene, data):
    """Bit by bit, whatever padding holds: NaN, large numbers of either sign, or nothing out of the ordinary."""
    width = 1 + scene.drafts + scene.extra_slots
    requests = data.draw(st.integers(1, min(scene.num_reqs, scene.num_tokens // width)), label="requests")
    first, *others = (computed(scene, requests, garbage) for garbage in (None, float("nan"), 1e6, -1e6))
    assert first
    for other in others:
        for one, same in zip(first, other, strict=True):
            torch.testing.assert_close(one, same, rtol=0, atol=0, equal_nan=True)
