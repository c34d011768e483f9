"""Runners that lose, mix up or overwrite the states of recurrent layers: padding (D), capacity (E), baked state (F)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.plugins.backend import NULL_STATE
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner_runner.execution import attention as recurrent
from capture_planner_runner.execution.attention import Segments, StateCache
from capture_planner_runner.execution.inputs import StepInputs
from capture_planner_runner.launch import assembly
from capture_planner_runner.serving import launching
from capture_planner_runner.serving.states import PageFormat, RequestStates, ScheduledBatch
from gallery.core import Mutant
from gallery.patching import Patch, patched
from gallery.runner_padding import filled, tail_left

Recurrence = Callable[..., torch.Tensor]


def _segments(change: Callable[[Segments], Segments]) -> Patch:
    """Return a patch that changes where the tokens of any batch but a uniform decode are."""

    def make(original: Callable[..., Segments]) -> Callable[..., Segments]:
        return lambda *given: change(original(*given))

    return patched((recurrent, "ragged_segments", make))


def _not_reset(segments: Segments) -> Segments:
    return attrs.evolve(segments, begins=None)


def _first_write_lost(segments: Segments) -> Segments:
    assert segments.begins is not None
    return attrs.evolve(segments, state=torch.where(segments.begins, NULL_STATE, segments.state))


def _last_state_everywhere(original: Recurrence) -> Recurrence:
    def recurrence(cache: StateCache, segments: Segments, *given: torch.Tensor) -> torch.Tensor:
        states = original(cache, segments, *given)
        tokens = torch.arange(len(states), device=states.device)
        rows = torch.where(tokens == segments.end - 1, segments.state, NULL_STATE).long()
        for position in range(cache.positions):
            cache.states[:, position].index_copy_(0, rows, states.to(cache.states.dtype))
        return states

    return recurrence


def _clamped(original: Callable[..., Segments]) -> Callable[..., Segments]:
    return lambda indices, *given: original(indices.clamp(min=1), *given)


def _without_null_row(original: Callable[..., tuple[StateCache, ...]]) -> Callable[..., tuple[StateCache, ...]]:
    def state_caches(plan: Plan, *given: Any) -> tuple[StateCache, ...]:
        if plan.states is None:
            return original(plan, *given)
        return original(replace(plan, states=replace(plan.states, rows=plan.states.rows - 1)), *given)

    return state_caches


def _of_the_last_batch(original: Callable[..., StepInputs]) -> Callable[..., StepInputs]:
    last: WeakKeyDictionary[RequestStates, np.ndarray[Any, Any]] = WeakKeyDictionary()

    def target_inputs(scheduled: ScheduledBatch, states: RequestStates, pages: PageFormat) -> StepInputs:
        inputs = original(scheduled, states, pages)
        assert inputs.state_indices is not None
        if len(last.get(states, ())) != inputs.num_reqs:
            last[states] = inputs.state_indices
        return attrs.evolve(inputs, state_indices=last[states])

    return target_inputs


D, E, F = BugClass.D, BugClass.E, BugClass.F

RECURRENT_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="first-state-lost",
        threads=("vllm#53051", "vllm#49918"),
        bug_class=F,
        says="The state after a request's first chunk is not stored, so that its next step goes on from another's",
        patch=_segments(_first_write_lost),
    ),
    Mutant(
        name="state-not-reset",
        threads=("vllm#56524",),
        bug_class=F,
        says="A request begins with the recurrent state that the row's last request left",
        patch=_segments(_not_reset),
    ),
    Mutant(
        name="state-not-rolled-back",
        threads=("vllm-project/tpu-inference#3178",),
        bug_class=F,
        says="Of the states after each draft the last one is stored, and the next step goes on from rejected drafts",
        patch=patched((recurrent, "recurrence", _last_state_everywhere)),
    ),
    Mutant(
        name="state-indices-stale",
        threads=("TRT-LLM#13151",),
        bug_class=D,
        says="Padded requests keep the rows of an earlier, larger batch, and overwrite the states of its requests",
        patch=filled(tail_left, ("state_indices",)),
    ),
    Mutant(
        name="padded-state-clamped",
        threads=("tokenspeed#700",),
        bug_class=D,
        says="The row of padded requests is clamped to the first one of requests, whose state they overwrite",
        patch=patched((recurrent, "uniform_segments", _clamped)),
    ),
    Mutant(
        name="states-without-padding",
        threads=("vllm#34094", "TRT-LLM#13151"),
        bug_class=E,
        says="The pool of recurrent states is allocated without the row of padded requests, so that the last is past "
        "its end",
        patch=patched((assembly, "state_caches", _without_null_row)),
    ),
    Mutant(
        name="state-rows-of-the-last-batch",
        threads=("vllm#53142",),
        bug_class=F,
        says="The rows of states are made when the number of requests changes, and are those of other requests later",
        patch=patched((launching, "target_inputs", _of_the_last_batch)),
    ),
)
