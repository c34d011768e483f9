"""Runners whose graphs spoil what is not theirs (K), whose capture sessions are not closed (P, Q), or miskeyed (R)."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from capture_planner.analysis.lint.core import BugClass
from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Entry
from capture_planner_runner.capture import sessions as capture_module
from capture_planner_runner.execution.bodies import DraftDecodeBody, DraftPrefillBody, TargetBody
from capture_planner_runner.execution.fields import Extents
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import ForwardTimes, RoleRun
from capture_planner_runner.execution.role_graphs import RoleGraphs
from capture_planner_runner.execution.updates import DraftState
from capture_planner_runner.graphs.graph import Graph
from capture_planner_runner.ledger.rows import GraphCapture
from capture_planner_runner.serving.serving import Serving
from capture_planner_runner.serving.steps import PlannedStep
from gallery.core import Mutant
from gallery.patching import Change, patched

_targets: WeakKeyDictionary[DraftState, TargetBody] = WeakKeyDictionary()


def _remembering_target(original: Callable[..., None]) -> Callable[..., None]:
    """Remember the target of a drafter: its prefill knows it."""

    def per_token(body: DraftPrefillBody, extents: Extents, attend: Any) -> None:
        _targets[body.state] = body.target
        original(body, extents, attend)

    return per_token


REMEMBERING: Change = (DraftPrefillBody, "per_token", _remembering_target)


# K: what belongs to another.


def _into_the_targets_output(original: Callable[..., None]) -> Callable[..., None]:
    def per_token(body: DraftDecodeBody, extents: Extents, attend: Any) -> None:
        original(body, extents, attend)
        if (target := _targets.get(body.state)) is not None:
            rows = extents.reqs
            target.hidden[:rows].copy_(body.state.hidden[:1].expand(rows, -1)[:, : target.hidden.shape[1]])

    return per_token


def _moves_the_targets_fields(original: Callable[..., None]) -> Callable[..., None]:
    def per_token(body: DraftDecodeBody, extents: Extents, attend: Any) -> None:
        original(body, extents, attend)
        if (target := _targets.get(body.state)) is not None:
            target.fields["seq_lens"][:1].add_(1)

    return per_token


# P: the session.


def _swallowed(original: Callable[..., GraphCapture]) -> Callable[..., GraphCapture]:
    def run(capture: capture_module._Capture, **strict: bool) -> GraphCapture:
        try:
            return original(capture, **strict)
        except RuntimeError:
            return GraphCapture(role=capture.role.role, entry=capture.entry, seconds=0.0, memory=0, alone=0)

    return run


def _registered_as_far_as_it_came(original: Callable[[RoleGraphs], None]) -> Callable[[RoleGraphs], None]:
    def abandon(graphs: RoleGraphs) -> None:
        graphs.end()

    return abandon


def _splitting_after_an_error(original: Callable[..., Graph]) -> Callable[..., Graph]:
    def capture(run: RoleRun, entry: Entry) -> Graph:
        try:
            return original(run, entry)
        except RuntimeError:
            run.graphs._is_splitting = entry.mode is GraphMode.PIECEWISE
            raise

    return capture


def _replayed_at_once(original: Callable[..., Graph]) -> Callable[..., Graph]:
    def capture(run: RoleRun, entry: Entry) -> Graph:
        graph = original(run, entry)
        graph.replay()
        return graph

    return capture


# Q: what padding needs.


def _dummy_on_demand(original: Callable[..., PlannedStep]) -> Callable[..., PlannedStep]:
    def plan(serving: Serving) -> PlannedStep:
        planned = original(serving)
        if serving.scheduler._pool.free:
            return planned
        entries = {role.role: role.entries for role in serving._planner._dispatcher.plan.roles}
        dispatches = dict(planned.dispatches)
        for role, batch in planned.batches.items():
            is_exact = any(entry.num_reqs == batch.num_reqs for entry in entries[role])
            if role is not Role.DRAFT_DECODE and not is_exact:
                dispatches[role] = Dispatch(None, reason=Reason.MEMORY)
        return attrs.evolve(planned, dispatches=dispatches)

    return plan


# R: the key.


def _looked_up_by_number(original: Callable[..., ForwardTimes]) -> Callable[..., ForwardTimes]:
    def execute(run: RoleRun, step: ForwardStep, started: float) -> ForwardTimes:
        if step.entry is None or step.real != step.extents:
            return original(run, step, started)
        with run._observer.forward(run, step):
            run._forward(step.extents, step.entry)
            if not step.is_full:
                run.body.per_request(step.extents, None)
        seconds = perf_counter() - started
        return ForwardTimes(seconds, seconds, seconds)

    return execute


SESSION_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="drafts-over-the-targets-output",
        threads=("vllm#53520", "vllm#53488"),
        bug_class=BugClass.K,
        says="Draft decodes write where the target's hidden states are, before prompt log-probabilities are read there",
        patch=patched(REMEMBERING, (DraftDecodeBody, "per_token", _into_the_targets_output)),
    ),
    Mutant(
        name="drafts-move-the-targets-fields",
        threads=("aiter#5393",),
        bug_class=BugClass.K,
        says="A draft decode advances a buffer that graphs of the target read",
        patch=patched(REMEMBERING, (DraftDecodeBody, "per_token", _moves_the_targets_fields)),
    ),
    Mutant(
        name="capture-errors-swallowed",
        threads=("sglang#11275",),
        bug_class=BugClass.P,
        says="An error inside the capture session is hidden, and the graph that broke is dispatched to",
        patch=patched((capture_module._Capture, "run", _swallowed)),
    ),
    Mutant(
        name="graphs-of-a-broken-session",
        threads=("sglang#11275",),
        bug_class=BugClass.P,
        says="After an error inside the capture session the graphs of before it stay registered",
        patch=patched((RoleGraphs, "abandon", _registered_as_far_as_it_came)),
    ),
    Mutant(
        name="splits-after-an-error",
        threads=("sglang#11275",),
        bug_class=BugClass.P,
        says="A capture that breaks off leaves its role splitting, and eager steps after it break",
        patch=patched((RoleRun, "capture", _splitting_after_an_error)),
    ),
    Mutant(
        name="replayed-inside-the-session",
        threads=("vllm#28334",),
        bug_class=BugClass.P,
        says="Each graph is replayed as soon as it is captured, before the capture session has ended",
        patch=patched((RoleRun, "capture", _replayed_at_once)),
    ),
    Mutant(
        name="dummy-request-on-demand",
        threads=("TRT-LLM#16072",),
        bug_class=BugClass.Q,
        says="Padding needs a free page, and while the cache is full padded batches run eager",
        patch=patched((Serving, "_plan", _dummy_on_demand)),
    ),
    Mutant(
        name="exact-sizes-looked-up-by-number",
        threads=("sglang#30752",),
        bug_class=BugClass.R,
        says="A batch of exactly a captured size is looked up by its number among keys of another type, and runs "
        "eager without a word",
        patch=patched((RoleRun, "execute", _looked_up_by_number)),
    ),
)
