"""SGLang executes a plan: hooks of its own registry give each role's runner the plan's sizes.

    Scheduler.__init__          before it: SGLang's resolved values must agree with the plan
    each runner's __init__      says which role is built
    get_batch_sizes_to_capture  inside it, sees the role's sizes in place of the flag's; SGLang still checks them
    capture_decode_graph        leaves out a target, and _select_spec_graph_runner_cls a drafter, that is eager

Where SGLang is not what the plugin knows, or does not agree with the plan, it is left alone, with one error line.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from capture_planner.codec import load_plan
from capture_planner.engines.inside import EVERY, SECONDS, file_name, is_strict, report, resolve, seconds_of
from capture_planner.engines.launch import PROFILE, mark_started
from capture_planner.errors import RunError
from capture_planner.measuring.recorder import Recorder
from capture_planner.modes import Role
from capture_planner.records.plan import Decision, Plan
from capture_planner_sglang.emulation.export import decode_sizes_of
from capture_planner_sglang.inside import seam
from capture_planner_sglang.inside.agreement import ResolvedFacts, disagreements
from capture_planner_sglang.inside.observe import SglangObserver
from capture_planner_sglang.inside.observed_facts import observation_of
from capture_planner_sglang.inside.seam import LOG


def register(path: str | None, folder: str | None) -> None:
    """Register the hooks that apply a plan and observe; raises ``RunError`` where SGLang is not as they know it.

    :param path: the plan's file; None: no plan is applied.
    :param folder: where observations go; None: nothing is observed.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found, unused-ignore]

    plan = None if not path else load_plan(path)
    # Of each use only its own functions are checked: a strange one of the other is no obstacle.
    wanted = (*(seam.APPLY if plan is not None else ()), *(seam.OBSERVE if folder else ()))
    strange = [*dict.fromkeys(seam.unknown(wanted))]
    # Before anything is registered: SGLang gets all hooks or none.
    if strange:
        raise RunError("; ".join(strange))
    hooks = None if plan is None else PlanHooks(plan, str(path))
    if hooks is not None:
        hooks.register(HookRegistry, HookType)
    if folder:
        _observer(folder, hooks).register(HookRegistry, HookType)


def _observer(folder: str, hooks: PlanHooks | None) -> SglangObserver:
    """Return the observer of this process, which writes ``FOLDER/sglang.rank<R>.<pid>.yaml``."""
    import torch

    seconds = seconds_of(SECONDS, EVERY, "observations are written every", LOG.warning)

    def begin(observer: SglangObserver, scheduler: Any) -> Recorder:
        plan, decisions, notes = (None, (), ()) if hooks is None else hooks.outcome
        base = observation_of(observer, scheduler, plan=plan, decisions=decisions, notes=notes)
        recorder = Recorder(Path(folder), file_name(base), seconds)
        recorder.begin(base)
        return recorder

    return SglangObserver(
        begin,
        event=functools.partial(torch.cuda.Event, enable_timing=True),
        free=lambda: int(torch.cuda.mem_get_info()[0]),
        strict=is_strict(),
        profile=os.environ.get(PROFILE) == "1",
    )


class PlanHooks:
    """The hooks that apply one plan in one process."""

    def __init__(self, plan: Plan, path: str) -> None:
        self._plan, self._path = plan, path
        self._planned = decode_sizes_of(plan)
        self._roles: dict[str, Role] = {runner: role for role, runner in seam.RUNNERS.items()}
        self._sizes: dict[Role, tuple[int, ...]] = {}
        """Decode sizes by role, in requests; empty until SGLang agrees with the plan."""
        self._building: list[Role | None] = []
        self._refused: list[str] = []

    @property
    def outcome(self) -> tuple[Plan | None, tuple[Decision, ...], tuple[str, ...]]:
        """The plan where it is applied, what SGLang cannot take of it, and why it is not applied."""
        return (self._plan if self._sizes else None), self._planned.decisions, tuple(self._refused)

    def register(self, registry: Any, kinds: Any) -> None:
        """Register the hooks with SGLang's ``HookRegistry``; ``kinds`` is its ``HookType``."""
        registry.register(seam.SCHEDULER, self.agree, kinds.BEFORE)
        registry.register(seam.SIZES, self.sizes, kinds.AROUND)
        registry.register(seam.CAPTURE, self.capture_target, kinds.AROUND)
        registry.register(seam.DRAFT_CLASS, self.draft_class, kinds.AROUND)
        # get_batch_sizes_to_capture is not told for whom it is asked; the __init__ around it is.
        for runner in seam.RUNNERS.values():
            registry.register(f"{runner}.__init__", self.build, kinds.AROUND)

    def agree(self, *args: Any, **kwargs: Any) -> None:
        """Check SGLang's values before the scheduler is made, and set the sizes that its buffers are made for."""
        context = seam.context()
        lines = [*disagreements(self._plan, ResolvedFacts.read(context))]
        # No role has sizes from here on, so all other hooks leave SGLang alone.
        if lines:
            self._refuse("; ".join(lines))
            return
        decode = context.get_exec().graph.cuda_graph_config.decode
        own = tuple(decode.bs or ())
        self._sizes = {role: own if sizes is None else sizes for role, sizes in self._planned.by_role.items()}
        everything = self._planned.all(own)
        # SGLang makes its buffers for the largest of the list, before any runner is built.
        if everything:
            decode.bs, decode.max_bs = list(everything), everything[-1]
        # SGLang would size the request pool by its memory, and drop the plan's sizes above it.
        if context.get_schedule().max_running_requests is None:
            most = self._plan.limits.max_num_reqs * context.get_parallel().attn_dp_size
            context.get_context().override("capture_planner", max_running_requests=most)
        for decision in self._planned.decisions:
            LOG.info("%s: %s (%s)", decision.role.value, decision.message, self._path)

    def build(self, original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
        """Run the ``__init__`` of a runner, which captures: the sizes asked for inside are those of its role."""
        kind = type(runner)
        # By the exact class, as a subclass may capture other shapes.
        role = self._roles.get(f"{kind.__module__}.{kind.__qualname__}")
        # A role that keeps SGLang's own sizes has none to compare: SGLang bounds them by its request pool.
        wanted = self._planned.by_role.get(role) if self._sizes and role is not None else None
        if self._sizes and role is None:
            LOG.warning(
                "%s.%s keeps SGLang's own sizes: it is no runner that a plan has", kind.__module__, kind.__name__
            )
        self._building.append(role)
        try:
            original(runner, *args, **kwargs)
        finally:
            self._building.pop()
        # launch --auto takes a run without the mark for one that failed under its plan.
        mark_started()
        if role is None or not wanted:
            return
        captured = tuple(runner.capture_bs)
        # SGLang drops sizes without a word, and their batches would run eager or padded.
        if captured != wanted:
            self._refuse(
                f"{role.value}: SGLang captures {_written(captured)} of the planned {_written(wanted)}: "
                "the others exceed its request pool, or its attention ranks do not divide their tokens"
            )
            return
        LOG.info("%s: SGLang captures the plan's %d sizes, up to %d requests", role.value, len(wanted), wanted[-1])

    def sizes(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``get_batch_sizes_to_capture``, which filters the sizes, on those of the role that is built."""
        role = self._building[-1] if self._building else None
        wanted = self._sizes.get(role) if role is not None else None
        if not wanted:
            return original(*args, **kwargs)
        decode = seam.context().get_exec().graph.cuda_graph_config.decode
        everything = decode.bs
        # For this call only: other runners find the list of all roles.
        decode.bs = list(wanted)
        try:
            return original(*args, **kwargs)
        finally:
            decode.bs = everything

    def capture_target(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``capture_decode_graph``; where the plan's target is eager, answer as SGLang does without graphs."""
        runner = kwargs.get("model_runner", args[0] if args else None)
        # A drafter's decodes may come this way too, and have a role of their own.
        if self._sizes.get(Role.TARGET) != () or runner is None or runner.is_draft_worker:
            return original(*args, **kwargs)
        # As capture_decode_graph names what it did not capture; metrics are kept by these names.
        phase = "target_verify" if runner.spec_algorithm.is_speculative() else "decode"
        module = resolve(seam.CAPTURE.rpartition(".")[0])
        return module.GraphCapture(runner=None, memory_phase=phase, memory_usage_gb=0, capture_time=0)

    def draft_class(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the class of a drafter's runner; where the plan's role is eager, None, as SGLang itself does."""
        kind = original(*args, **kwargs)
        role = None if kind is None else self._roles.get(f"{kind.__module__}.{kind.__qualname__}")
        return None if role is not None and self._sizes.get(role) == () else kind

    def _refuse(self, text: str) -> None:
        self._refused.append(f"the plan is not applied: {text}")
        report(LOG, logging.ERROR, [f"the plan is not applied: {text} ({self._path})"])


def _written(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
