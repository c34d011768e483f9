"""Mutants of LoRA: requests get another adapter than their own, or padding gets one."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np

from capture_planner.analysis.lint.core import BugClass
from capture_planner_runner.execution.inputs import Array, StepInputs
from capture_planner_runner.execution.padding import Write
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.serving import inputs, steps
from capture_planner_runner.serving.states import RequestStates, ScheduledBatch
from gallery.core import Mutant
from gallery.patching import Patch, patched
from support.runner_conformance.adapter_rows import check_adapters

Lanes = Callable[[ScheduledBatch, RequestStates], tuple[Array | None, Array | None]]
Writes = Callable[[RoleRun, StepInputs], list[Write]]


def _padded_with_the_first(original: Writes) -> Writes:
    """Pad the tokens' places with 0, the first active adapter's, instead of none."""

    def writes(run: RoleRun, inputs: StepInputs) -> list[Write]:
        found = original(run, inputs)
        for write in found:
            if write.buffer.field.name == "adapter_lanes":
                write.fill = 0
        return found

    return writes


def _stale(original: Writes) -> Writes:
    """Leave the map as it is where the batch has as many tokens as the last one."""
    last: WeakKeyDictionary[RoleRun, int] = WeakKeyDictionary()

    def writes(run: RoleRun, inputs: StepInputs) -> list[Write]:
        before, last[run] = last.get(run), inputs.num_tokens
        found = original(run, inputs)
        if before != inputs.num_tokens:
            return found
        return [write for write in found if write.buffer.field.name not in ("adapter_lanes", "active_adapters")]

    return writes


def _one_at_most(original: Callable[[ScheduledBatch, RequestStates], Array]) -> Callable[..., Array]:
    return lambda scheduled, states: original(scheduled, states)[:1]


def _null_adapter_left_out(original: Callable[[ScheduledBatch, RequestStates], Array]) -> Callable[..., Array]:
    """Count the adapters that there are, and let requests without one have the first of them."""

    def active(scheduled: ScheduledBatch, states: RequestStates) -> Array:
        found = original(scheduled, states)
        return found[found > 0]

    return active


def _in_order_of_states(original: Lanes) -> Lanes:
    """Assign adapters in state order instead of batch order."""

    def lanes(scheduled: ScheduledBatch, states: RequestStates) -> tuple[Array | None, Array | None]:
        _, active = original(scheduled, states)
        if active is None:
            return None, None
        places = np.searchsorted(active, states.adapter[np.sort(scheduled.state_indices)]).astype(np.int32)
        return np.repeat(places, scheduled.counts), active

    return lanes


def _mutant(name: str, thread: str | None, bug_class: BugClass, says: str, patch: Patch) -> Mutant:
    def check(seed: int) -> str | None:
        with patch():
            return check_adapters(seed)

    return Mutant(name=name, threads=(thread,) if thread else (), bug_class=bug_class, says=says, adapters=check)


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "padding-has-an-adapter",
        "vllm#15090",
        BugClass.D,
        "Padded tokens have the first active adapter instead of none",
        patched((RoleRun, "writes", _padded_with_the_first)),
    ),
    _mutant(
        "adapter-map-stale",
        "sglang#28371",
        BugClass.F,
        "A batch with as many tokens as the last one keeps its map of adapters",
        patched((RoleRun, "writes", _stale)),
    ),
    _mutant(
        "adapters-of-the-capture",
        "sglang#28371",
        BugClass.C,
        "A batch of several adapters replays a graph that was captured for one, and the others are skipped",
        patched((steps, "active_adapters", _one_at_most)),
    ),
    _mutant(
        "null-adapter-left-out",
        None,
        BugClass.D,
        "Requests without an adapter, next to others that have one, get the first of them",
        patched(
            (inputs, "active_adapters", _null_adapter_left_out), (steps, "active_adapters", _null_adapter_left_out)
        ),
    ),
    _mutant(
        "adapters-in-order-of-states",
        None,
        BugClass.D,
        "Adapters are assigned to rows in state order instead of batch order",
        patched((inputs, "adapter_lanes", _in_order_of_states)),
    ),
)
