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
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from capture_planner.measuring.recorder import Recorder
    from capture_planner.modes import Role
    from capture_planner.records.observation import EagerCost
    from capture_planner.records.plan import Plan
    from capture_planner_vllm.captures import Captures
    from capture_planner_vllm.watch import Drafts, Watch

OBSERVE = "CAPTURE_PLANNER_OBSERVE"
SECONDS = "CAPTURE_PLANNER_OBSERVE_SECONDS"
PROFILE = "CAPTURE_PLANNER_PROFILE"
STRICT = "CAPTURE_PLANNER_STRICT"

GPU = "vllm.v1.worker.gpu"
MANAGERS = f"{GPU}.cudagraph_utils"
RUNNER = f"{GPU}.model_runner"
RANKS = f"{GPU}.dp_utils"
OUTPUTS = f"{GPU}.async_utils"
DRAFTERS = f"{GPU}.spec_decode.target_dependent_ar.cudagraph_utils"

MOST_OUTPUTS = 256
"""Most steps whose output is on the way to the host."""

_LOG = logging.getLogger("capture_planner.vllm")
_MARK = "_capture_planner_observes"


@attrs.frozen
class Seam:
    """One function of vLLM that is wrapped, and the parameters that the wrapper relies on."""

    module: str
    name: str
    """``function`` or ``Class.method``."""
    parameters: tuple[str, ...]
    part: str
    """What is not observed without it."""

    def owner(self, module: ModuleType | None = None) -> tuple[Any, str]:
        """Return what has the function as an attribute, and the attribute's name.

        :param module: the module, if it is not the imported one of that name.
        :raises LookupError: it is not as the wrapper needs it; the text says what is wrong.
        """
        owner: Any = module or sys.modules.get(self.module)
        *path, name = self.name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        function = getattr(owner, name, None)
        if function is None:
            raise LookupError(f"{self.module} has no {self.name}")
        has = tuple(inspect.signature(function).parameters)
        if has[: len(self.parameters)] != self.parameters:
            expected = ", ".join(self.parameters)
            raise LookupError(f"{self.module}.{self.name} takes ({', '.join(has)}), expected ({expected}, ...)")
        return owner, name


_BATCH = ("cudagraph_manager", "num_reqs", "num_tokens", "uniform_token_count")

INIT = Seam(MANAGERS, "CudaGraphManager.__init__", ("self", "vllm_config"), "everything")
CAPTURE = Seam(MANAGERS, "CudaGraphManager.capture", ("self", "create_forward_fn"), "seconds and memory of graphs")
DISPATCH = Seam(
    MANAGERS,
    "CudaGraphManager.dispatch",
    ("self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len"),
    "answers of the dispatcher",
)
CAPTURE_MODEL = Seam(RUNNER, "GPUModelRunner.capture_model", ("self", "profile_only"), "everything")
DUMMY = Seam(RUNNER, "GPUModelRunner._dummy_run", ("self", "num_tokens"), "counts, times and drafts")
EXECUTE = Seam(RUNNER, "GPUModelRunner.execute_model", ("self", "scheduler_output"), "counts, times and drafts")
STEP = Seam(RANKS, "dispatch_cg_and_sync_dp", _BATCH, "counts and times")
SAMPLE = Seam(RUNNER, "GPUModelRunner.sample_tokens", ("self",), "drafts, and times of drafters")
SHUTDOWN = Seam(RUNNER, "GPUModelRunner.shutdown", ("self",), "the last counts before a shutdown")
FORWARD = Seam(OUTPUTS, "StepTimingCollector.forward_start", ("self",), "times of the target")
OUTPUT = Seam(OUTPUTS, "AsyncOutput.get_output", ("self",), "drafts")
SPECIALIZE = Seam(
    DRAFTERS,
    "SpeculatorCudaGraphManager.specialize_spec_tokens",
    ("self", "desc", "num_speculative_tokens"),
    "counts of draft decodes",
)

SEAMS = (INIT, CAPTURE, DISPATCH, CAPTURE_MODEL, DUMMY, EXECUTE, STEP, SAMPLE, SHUTDOWN, FORWARD, OUTPUT, SPECIALIZE)


def attach(module: ModuleType, plan: Plan | None = None) -> None:
    """Observe the graph managers of a module where ``CAPTURE_PLANNER_OBSERVE`` names a folder; again, do nothing.

    :param module: ``vllm.v1.worker.gpu.cudagraph_utils``, executed.
    :param plan: the plan that is applied in this process.
    :raises RunError: with ``CAPTURE_PLANNER_STRICT=1``, where a function of vLLM is not as expected.
    """
    folder = os.environ.get(OBSERVE)
    if folder:
        seconds = float(os.environ.get(SECONDS) or 30)
        observer = Observer(Path(folder), seconds, profile=os.environ.get(PROFILE) == "1", plan=plan)
        observer.watch_managers(module)


class Observer:
    """Observes the model runner of one process."""

    def __init__(self, folder: Path, seconds: float, *, profile: bool, plan: Plan | None) -> None:
        self._folder, self._seconds, self._profile, self._plan = folder, seconds, profile, plan
        self._active: Watch | None = None
        self._captures: Captures | None = None
        self._recorder: Recorder | None = None
        self._runners = 0
        self._attached = False
        self._asks = True
        self._drafts: Mapping[str, list[int]] = {}
        self._outputs: dict[int, Drafts] = {}
        self._notes: list[str] = []

    # Attaching.

    def watch_managers(self, module: ModuleType) -> None:
        """Wrap the managers, and wait for the first to be made."""
        if self._wrap(INIT, self._init, module):
            self._wrap(CAPTURE, self._capture, module)
            self._asks = self._fits(DISPATCH, module)

    def _watch_runner(self) -> None:
        """Wrap what has been imported by the time that a manager is made."""
        if self._attached:
            return
        self._attached = True
        if not self._wrap(CAPTURE_MODEL, self._capture_model):
            return
        if not self._wrap(DUMMY, self._dummy_run):
            # Without it, dummy runs would count as steps.
            return
        self._wrap(EXECUTE, self._execute_model)
        self._wrap_step()
        self._wrap(FORWARD, self._forward_start)
        self._wrap(SAMPLE, self._sample_tokens)
        self._wrap(OUTPUT, self._get_output)
        self._wrap(SHUTDOWN, self._shutdown)
        if DRAFTERS in sys.modules:
            self._wrap(SPECIALIZE, self._specialize)

    def _wrap(
        self, seam: Seam, make: Callable[[Callable[..., Any]], Callable[..., Any]], module: ModuleType | None = None
    ) -> bool:
        """Wrap one function; return whether it is wrapped, now or before."""
        if not self._fits(seam, module):
            return False
        owner, name = seam.owner(module)
        original = getattr(owner, name)
        if not hasattr(original, _MARK):
            wrapper = functools.wraps(original)(make(original))
            setattr(wrapper, _MARK, True)
            setattr(owner, name, wrapper)
        return True

    def _fits(self, seam: Seam, module: ModuleType | None = None) -> bool:
        """Return whether a function is as the wrapper needs it; note where not."""
        try:
            seam.owner(module)
        except LookupError as error:
            self._note(f"not observed: {seam.part}, as {error}")
            return False
        return True

    def _wrap_step(self) -> None:
        """Wrap the function that dispatches, in its module and where it was imported by name."""
        module = sys.modules.get(RANKS)
        original = getattr(module, STEP.name, None)
        if self._wrap(STEP, self._dispatch_step):
            wrapper = getattr(module, STEP.name)
            for name, other in list(sys.modules.items()):
                if name.startswith(GPU) and getattr(other, STEP.name, None) is original:
                    setattr(other, STEP.name, wrapper)

    def _note(self, text: str, error: Exception | None = None) -> None:
        """Keep a note for the file and log it, once; in strict mode, raise it where vLLM is not as expected."""
        if text in self._notes:
            return
        self._notes.append(text)
        _LOG.warning("%s", text)
        if error is None and os.environ.get(STRICT) == "1":
            from capture_planner.errors import RunError

            raise RunError(text)

    def _failed(self, doing: str, error: Exception) -> None:
        """Stop observing steps after an error of ours; vLLM goes on."""
        self._active = None
        reason = " ".join(str(error).split())
        self._note(f"an error while {doing} ended the observation: {type(error).__name__}: {reason}", error)

    # Capture.

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(manager: Any, *args: Any, **kwargs: Any) -> None:
            self._watch_runner()
            original(manager, *args, **kwargs)

        return init

    def _capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture(manager: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
            captures = self._captures
            if captures is None:  # memory profiling, whose graphs are thrown away
                return original(manager, create_forward_fn, *args, **kwargs)
            log = captures.begin(manager, create_forward_fn)
            result = original(manager, log.create_forward, *args, **kwargs)
            try:
                log.end()
                if self._profile:
                    captures.replay(manager, log)
            except Exception as error:
                self._failed("profiling graphs", error)
            return result

        return capture

    def _capture_model(self, original: Callable[..., int]) -> Callable[..., int]:
        def capture_model(runner: Any, *args: Any, profile_only: bool = False, **kwargs: Any) -> int:
            if profile_only:
                return original(runner, *args, profile_only=True, **kwargs)
            from capture_planner_vllm.captures import Captures

            self._active = None
            captures = self._captures = Captures()
            start = time.perf_counter()
            try:
                size = original(runner, *args, **kwargs)
            finally:
                self._captures = None
            self._begin(runner, captures, time.perf_counter() - start, size)
            return size

        return capture_model

    def _begin(self, runner: Any, captures: Captures | None, seconds: float | None, size: int | None) -> None:
        """Write the first observation, and count from now on."""
        from capture_planner.errors import CapturePlannerError
        from capture_planner.measuring.recorder import Recorder

        try:
            from capture_planner_vllm import device, facts, profile
            from capture_planner_vllm.watch import Watch

            tracks = facts.tracks(runner, captures)
            eager: Mapping[Role, tuple[EagerCost, ...]] = {}
            if self._profile and captures is not None:
                eager = profile.eager_costs(runner, tracks, self._watching)
            base = facts.observation(runner, tracks, eager, self._plan, self._note, self._notes)
            if captures is not None and seconds is not None and size is not None:
                base = facts.with_capture(base, max(seconds - captures.replaying, 0), size)
            self._finish()
            self._runners += 1
            again = "" if self._runners == 1 else f".{self._runners}"
            name = f"vllm.rank{base.rank}.{os.getpid()}{again}"
            recorder = self._recorder = Recorder(self._folder, name, self._seconds)
            recorder.begin(base)
            if self._runners == 1:
                atexit.register(self._finish)  # before the recorder's own, which was registered earlier
            self._active = Watch(tracks, recorder, device.event, bonus=facts.bonus_tokens(runner))
            _LOG.info("observing: %s", recorder.path)
        except CapturePlannerError as error:
            if os.environ.get(STRICT) == "1":
                raise
            self._failed("describing what was captured", error)
        except Exception as error:
            self._failed("describing what was captured", error)

    def _begin_eager(self, runner: Any, kwargs: Mapping[str, Any]) -> None:
        """Begin at the first real step where vLLM captures nothing."""
        if not kwargs.get("dummy_run") and runner.vllm_config.model_config.enforce_eager:
            self._begin(runner, None, None, None)
            self._runners = self._runners or 1

    @contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        """Let ``watch`` follow the steps for a while."""
        self._active = watch
        try:
            yield
        finally:
            self._active = None

    def _finish(self) -> None:
        """Write the last observation."""
        watch, self._active = self._active, None
        try:
            if watch is not None:
                watch.read()
                watch.flush()
            if self._recorder is not None:
                self._recorder.close()
        except Exception as error:
            self._failed("ending the observation", error)

    # Steps: the hot path. Each wrapper is written out, without a layer in between.

    def _dummy_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _dummy_run(runner: Any, *args: Any, **kwargs: Any) -> Any:
            active = self._active
            if active is None or active.dummies:
                return original(runner, *args, **kwargs)
            self._active = None
            try:
                return original(runner, *args, **kwargs)
            finally:
                self._active = active

        return _dummy_run

    def _execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._active is None and self._runners == 0:
                self._begin_eager(runner, kwargs)
            watch = self._active
            if watch is None:
                return original(runner, scheduler_output, *args, **kwargs)
            try:
                watch.begin()
                self._drafts = scheduler_output.scheduled_spec_decode_tokens
            except Exception as error:
                self._failed("beginning a step", error)
            result = original(runner, scheduler_output, *args, **kwargs)
            try:
                watch.forward_end()
            except Exception as error:
                self._failed("timing a forward", error)
            return result

        return execute_model

    def _dispatch_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch_cg_and_sync_dp(
            cudagraph_manager: Any, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *a: Any, **k: Any
        ) -> Any:
            answer = original(cudagraph_manager, num_reqs, num_tokens, uniform_token_count, *a, **k)
            watch = self._active
            if watch is not None:
                try:
                    watch.dispatched(cudagraph_manager, num_reqs, num_tokens, uniform_token_count, k, answer[0])
                except Exception as error:
                    self._failed("counting a dispatch", error)
            return answer

        return dispatch_cg_and_sync_dp

    def _specialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def specialize_spec_tokens(manager: Any, desc: Any, num_speculative_tokens: int) -> Any:
            answer = original(manager, desc, num_speculative_tokens)
            watch = self._active
            if watch is not None:
                try:
                    watch.specialized(answer, num_speculative_tokens)
                except Exception as error:
                    self._failed("counting a draft decode", error)
            return answer

        return specialize_spec_tokens

    def _forward_start(self, original: Callable[..., None]) -> Callable[..., None]:
        def forward_start(collector: Any) -> None:
            original(collector)
            watch = self._active
            if watch is not None:
                try:
                    watch.forward()
                except Exception as error:
                    self._failed("timing a forward", error)

        return forward_start

    def _sample_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(runner, *args, **kwargs)
            watch = self._active
            if watch is not None:
                try:
                    watch.end()
                    drafts, self._drafts = watch.drafts(self._drafts), {}
                    if drafts is not None:
                        if len(self._outputs) > MOST_OUTPUTS:  # outputs that never came to the host
                            self._outputs.clear()
                        self._outputs[id(output)] = drafts
                except Exception as error:
                    self._failed("ending a step", error)
            return output

        return sample_tokens

    def _get_output(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_output(output: Any) -> Any:
            result = original(output)
            drafts = self._outputs.pop(id(output), None)
            watch = self._active
            if drafts is not None and watch is not None:
                try:
                    watch.accepted(drafts, result.req_ids, result.sampled_token_ids)
                except Exception as error:
                    self._failed("counting drafts", error)
            return result

        return get_output

    def _shutdown(self, original: Callable[..., None]) -> Callable[..., None]:
        def shutdown(runner: Any) -> None:
            self._finish()
            original(runner)

        return shutdown
