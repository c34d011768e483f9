"""Observes a running vLLM in its own process: what it captures, dispatches, takes and accepts.

``attach`` is called once ``vllm.v1.worker.gpu.cudagraph_utils`` has been executed, and does something only where
``CAPTURE_PLANNER_OBSERVE`` names a folder. It wraps the graph managers at once; when the first of them is made, the
model runner and the drafter have been imported, and their functions are wrapped, too. Each function is checked
before: one that is missing, or has other parameters, turns one part of the observation off, with a log line and a
note in the file. vLLM's answers and metrics stay as they are, and no error of ours reaches it.

Follows vLLM 0.33, model runner V2.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from capture_planner.engines.inside import EVERY, SECONDS, file_name, seconds_of
from capture_planner.engines.launch import OBSERVE, PROFILE
from capture_planner.errors import class_and_message
from capture_planner.modes import Role
from capture_planner.records._base import digest, replace
from capture_planner.records.observation import EagerCost, Observation
from capture_planner.records.plan import Decision, Plan
from capture_planner_vllm.inside import device, facts, workers
from capture_planner_vllm.inside import observe_seams as seams
from capture_planner_vllm.inside import profile as costs
from capture_planner_vllm.inside.captures import Captures
from capture_planner_vllm.inside.dummy_rows import DummyRows
from capture_planner_vllm.inside.log import LOG, report
from capture_planner_vllm.inside.observe_seams import ObservedFields, Seam
from capture_planner_vllm.inside.observe_steps import StepHooks
from capture_planner_vllm.inside.pace import steps_ahead
from capture_planner_vllm.inside.seam import wrap
from capture_planner_vllm.inside.steps import Track
from capture_planner_vllm.inside.trials import Trials
from capture_planner_vllm.inside.watch import StepRecorder, StepWatch

PROFILE_SECONDS = "CAPTURE_PLANNER_PROFILE_SECONDS"

TRIALS = 10.0
"""Default of the most seconds for throw-away captures."""


def attach(
    module: ModuleType,
    plan: Callable[[], Plan | None] = lambda: None,
    decisions: Mapping[Role, tuple[Decision, ...]] | None = None,
) -> None:
    """Observe the graph managers of a module where ``CAPTURE_PLANNER_OBSERVE`` names a folder; again, do nothing.

    :param module: ``vllm.v1.worker.gpu.cudagraph_utils``, executed.
    :param plan: gives the plan that the environment names.
    :param decisions: gets a key for each role to which the plan is applied, as its manager is made.
    :raises RunError: with ``CAPTURE_PLANNER_STRICT=1``, where a function of vLLM is not as expected.
    """
    if os.environ.get(OBSERVE):
        Observer(plan, {} if decisions is None else decisions).watch_managers(module)
    elif os.environ.get(PROFILE) == "1":
        _warn(f"nothing is profiled: {PROFILE} needs a folder, give one with {OBSERVE}")


def _warn(line: str) -> None:
    report(logging.WARNING, [line])


class Observer(StepHooks):
    """Observes the model runners of one process, each as the environment says when it captures."""

    def __init__(self, plan: Callable[[], Plan | None], decisions: Mapping[Role, tuple[Decision, ...]]) -> None:
        self._plan, self._decisions = plan, decisions
        self._base: Observation | None = None
        self._captures: Captures | None = None
        self._rows: DummyRows | None = None
        self._recorder: StepRecorder | None = None
        self._attached = False
        self._asks = self._reads_drafts = True
        self._starting = False
        """True while vLLM compiles and warms up, by requests of its own, too."""
        self._tracks: tuple[Track, ...] = ()
        self._notes: list[str] = []

    def watch_managers(self, module: ModuleType) -> None:
        """Wrap the managers, and wait for the first to be made."""
        # Without these two nothing of a capture can be read, so nothing else is wrapped.
        if self._fits(seams.DESCRIPTOR, module) and self._wrap(seams.INIT, self._init, module):
            self._wrap(seams.CAPTURE, self._capture, module)
            self._asks = self._fits(seams.DISPATCH, module)

    def _watch_runner(self) -> None:
        """Wrap what has been imported by the time that a manager is made."""
        if self._attached:
            return
        self._attached = True
        if not self._wrap(seams.CAPTURE_MODEL, self._capture_model):
            return
        if not self._wrap(seams.DUMMY, self._dummy_run):  # without it, dummy runs would count as steps
            return
        self._wrap(seams.WARM_UP, self._warm_up)
        self._wrap(seams.EXECUTE, self._execute_model)
        # Other modules imported the function by name, so their copies are replaced as well.
        original = getattr(sys.modules.get(seams.RANKS), seams.STEP.name, None)
        if self._wrap(seams.STEP, self._dispatch_step):
            seams.replace_copies(original, getattr(sys.modules[seams.RANKS], seams.STEP.name))
        self._wrap(seams.RANK_GROUP, self._rank_group)
        self._wrap(seams.FORWARD, self._forward_start)
        self._wrap(seams.SAMPLE, self._sample_tokens)
        self._reads_drafts = self._fits(seams.SCHEDULED) and self._fits(seams.SAMPLED)
        self._reads_joins = self._fits(seams.JOINED)
        self._wrap(seams.OUTPUT, self._get_output)
        self._wrap(seams.SHUTDOWN, self._shutdown)
        # vLLM imports the module for a drafter only; without one nothing is missing.
        if seams.DRAFTERS in sys.modules:
            self._wrap(seams.SPECIALIZE, self._specialize)

    def _wrap(
        self, seam: Seam, make: Callable[[Callable[..., Any]], Callable[..., Any]], module: ModuleType | None = None
    ) -> bool:
        """Wrap one function; return whether it is wrapped, now or before."""
        fits = self._fits(seam, module)
        if fits:
            wrap(*seam.owner(module), make)
        return fits

    def _fits(self, known: Seam | ObservedFields, module: ModuleType | None = None) -> bool:
        """Return whether a part of vLLM is as it is known; note where not."""
        try:
            known.check(module)
        except LookupError as error:
            self._note(f"not observed: {known.part}, as {error}")
            return False
        return True

    def _note(self, text: str) -> None:
        """Keep a note for the file and log it, once; an error in strict mode."""
        if text not in self._notes:
            self._notes.append(text)
            _warn(text)

    def _failed(self, doing: str, error: Exception) -> None:
        """Stop observing after an error of ours, and say so in the log and in the file; vLLM goes on."""
        # First, so that no step logs any more.
        self._active = None
        LOG.error("%s", self._end(doing, error))
        try:
            if self._recorder is not None and self._base is not None:
                self._recorder.begin(replace(self._base, notes=tuple(self._notes)))
        except Exception as second:
            LOG.error("the file of the observation does not say so: %s", second)

    def _end(self, doing: str, error: Exception) -> str:
        reason = class_and_message(error)
        self._notes.append(f"an error while {doing} ended the observation: {reason}")
        return self._notes[-1]

    # Capture.

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(manager: Any, *args: Any, **kwargs: Any) -> None:
            self._watch_runner()
            original(manager, *args, **kwargs)

        return init

    def _capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture(manager: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
            captures = self._captures
            if captures is None:  # memory profiling, whose graphs are thrown away
                return original(manager, create_forward_fn, *args, **kwargs)
            log = captures.begin(manager, create_forward_fn)
            result = original(manager, log.create_forward, *args, **kwargs)
            try:
                log.end()
                if captures.profiles:
                    captures.replay(manager, log)
                    captures.try_others(manager, log, original)
            except Exception as error:
                self._failed("profiling graphs", error)
            return result

        return capture

    def _capture_model(self, original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def capture_model(runner: Any, *args: Any, profile_only: bool = False, **kwargs: Any) -> int:
            # vLLM estimates the memory of graphs, and drops those that it makes for it.
            if profile_only:
                return original(runner, *args, profile_only=True, **kwargs)
            # A process that captures again gets another file, and the earlier one its last counts.
            self._finish()
            trials = None
            if self._profiles():
                self._rows = self._dummy_rows(runner)
                seconds = seconds_of(PROFILE_SECONDS, TRIALS, "graphs are tried for", _warn)
                trials = Trials(runner, seconds, self._note)
            captures = self._captures = Captures(trials, self._rows)
            start = time.perf_counter()
            try:
                # Without what trials left: vLLM advises a size of the KV cache by it.
                size = original(runner, *args, **kwargs) - captures.left
            finally:
                self._captures = None
            seconds = time.perf_counter() - start - captures.replaying
            self._begin(runner, captures, (seconds, size), profile=captures.profiles)
            return size

        return capture_model

    def _profiles(self) -> bool:
        """Return whether to profile: where the variables ask every worker to."""
        asked = bool(os.environ.get(OBSERVE)) and os.environ.get(PROFILE) == "1"
        agreed = workers.all_profile(profiles=asked)
        if asked and not agreed:
            self._note(f"not profiled: not every worker is; set {OBSERVE} and {PROFILE}=1 on each host")
        return agreed

    def _dummy_rows(self, runner: Any) -> DummyRows | None:
        try:
            return DummyRows.of(runner, self._note)
        except Exception as error:
            # Graphs that are timed on padding are still worth their times.
            reason = class_and_message(error)[:200]
            self._note(f"graphs were timed on padding, which the experts of a mixture skip: {reason}")
            return None

    def _begin(
        self, runner: Any, captures: Captures | None = None, capture: tuple[float, int] | None = None, *, profile: bool
    ) -> None:
        """Write the first observation, and count from now on.

        :param capture: seconds and bytes of the capture, excluding replays and trials.
        :param profile: whether to run eager steps, in which all ranks take part.
        """
        if not os.environ.get(OBSERVE):  # it named a folder for an earlier engine of this process
            return
        try:
            drafts = self._drafts(runner)
            self._record(runner, self._described(runner, captures, capture, profile=profile), drafts)
        except Exception as error:
            report(logging.ERROR, [self._end("describing what was captured", error)], error)

    def _drafts(self, runner: Any) -> int:
        """Return the most drafts of a request that a step verifies; 0 where they cannot be counted."""
        if getattr(runner, "adaptive_verification", None) is not None:
            self._note("drafts are not counted: adaptive verification drops some of those that are scheduled")
            return 0
        return int(runner.num_speculative_steps) if self._reads_drafts else 0

    def _record(self, runner: Any, base: Observation, drafts: int) -> None:
        """Write a file for a model runner, and count into it."""
        self._base = base
        self._runners += 1
        name = file_name(base, self._runners)
        bonus, ahead = facts.bonus_tokens(runner), steps_ahead(runner.vllm_config)
        watch = functools.partial(StepWatch, self._tracks, event=device.event, bonus=bonus, drafts=drafts, ahead=ahead)
        seconds = seconds_of(SECONDS, EVERY, "observations are written every", _warn)
        recorder = StepRecorder(Path(os.environ[OBSERVE]), name, seconds, watch, self._failed)
        recorder.begin(base)
        if self._runners == 1:
            atexit.register(self._finish)  # before the recorder's own, which was registered earlier
        self._recorder, self._active = recorder, recorder.watch
        LOG.info("observing: %s", recorder.path)

    def _described(
        self, runner: Any, captures: Captures | None, capture: tuple[float, int] | None, *, profile: bool
    ) -> Observation:
        self._tracks = facts.tracks(runner, captures, self._note)
        eager: Mapping[Role, tuple[EagerCost, ...]] = {}
        if profile:
            try:
                eager = costs.eager_costs(runner, self._tracks, self._watching, self._rows)
            except Exception as error:
                # An observation without eager costs is still worth its file.
                costs.restore(runner)
                LOG.error("%s", self._end("profiling eager steps", error))
        base, plan = facts.observation(runner, self._tracks, self._note), self._plan()
        if self._asks:
            base = facts.with_answers(base, self._tracks)
        return replace(
            facts.with_capture(base, capture),
            # The hooks note every role that they fill, so that a plan without notes was read and not applied.
            plan=digest(plan) if plan is not None and self._decisions else None,
            decisions=tuple(each for found in self._decisions.values() for each in found),
            roles=tuple(replace(role, eager=eager.get(role.role, ())) for role in base.roles),
            notes=tuple(self._notes),
        )

    def _warm_up(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile_or_warm_up_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
            self._finish()
            self._starting = True
            try:
                result = original(worker, *args, **kwargs)
            finally:
                self._starting = False
            # Here all ranks are together. In a step those without requests would not take part in dummy runs.
            if worker.model_runner.vllm_config.model_config.enforce_eager:
                self._begin(worker.model_runner, profile=self._profiles())
            return result

        return compile_or_warm_up_model

    def _begin_eager(self, runner: Any, kwargs: Mapping[str, Any]) -> None:
        """Begin at the first real step where vLLM captures nothing, and the end of its start was not seen."""
        # Memory profiling and idle ranks run dummies, which are no requests' steps.
        starting = self._starting or kwargs.get("dummy_run")
        if not starting and runner.vllm_config.model_config.enforce_eager:
            if os.environ.get(PROFILE) == "1":
                self._note("eager steps were not profiled: the end of vLLM's start was not seen")
            self._begin(runner, profile=False)
            self._runners = self._runners or 1

    @contextmanager
    def _watching(self, watch: StepWatch) -> Iterator[None]:
        """Let ``watch`` follow the steps for a while."""
        self._active = watch
        try:
            yield
        finally:
            self._active = None

    def _finish(self) -> None:
        """Write the last observation, and keep nothing of the engine: vLLM frees what it has for the next one."""
        # No step logs from here on, so what is read below is all there is.
        watch, self._active = self._active, None
        try:
            if watch is not None:
                watch.read()
            if self._recorder is not None:
                self._recorder.close()
        except Exception as error:
            self._failed("ending the observation", error)
        self._recorder, self._rows, self._tracks = None, None, ()
