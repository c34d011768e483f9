"""SGLang observed: what each role captured, which graph served each step, how long steps took, which drafts held.

The hooks of one process. Graphs are counted where a runner's ``execute`` replays one, eager steps where
``EagerRunner.execute`` runs a batch; a chain of eager draft decodes is one step. Nothing is counted before the
scheduler is made, as capturing runs both. What a hook adds to a step is one append to a queue, and for one step in
``_EVERY`` two CUDA events. What a step of the target takes in the scheduler's loop, the host's work and the wait for
its result, is measured of every step (``pace``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from capture_planner.engines.inside import PassClock
from capture_planner.measuring.coarsening import Outcome
from capture_planner.measuring.recorder import Recorder
from capture_planner.modes import Reason, Role
from capture_planner_sglang.inside import seam
from capture_planner_sglang.inside.observed_runners import CapturedRunner, Shape, lora_count
from capture_planner_sglang.inside.pace import LoopPace
from capture_planner_sglang.inside.seam import LOG

_EVERY = 32
"""Number of steps of a role of which one, the first, is timed."""

T = TypeVar("T")


class SglangObserver:
    """The hooks that observe one process; where one of them fails, SGLang goes on and is observed no more.

    :param begin: called with the observer and the scheduler, once that is made; returns a recorder that has begun.
    :param event: makes an event with ``record``, ``query`` and ``elapsed_time``: ``torch.cuda.Event``.
    :param free: returns the device's free memory, in bytes.
    :param profile: time each full graph once all are captured.
    :param strict: raise into SGLang what fails here.
    """

    def __init__(
        self,
        begin: Callable[[SglangObserver, Any], Recorder],
        event: Callable[[], Any],
        free: Callable[[], int],
        *,
        strict: bool = False,
        profile: bool = False,
    ) -> None:
        self.runners: dict[tuple[Role, bool], CapturedRunner] = {}
        """Runners by role, and by whether they run prompts."""
        self._begin, self._event, self._free = begin, event, free
        self._clock: PassClock[Shape] = PassClock(event)
        self._strict, self._profile = strict, profile
        self._costs: dict[int, dict[Any, tuple[float, float]]] = {}
        self._known: dict[int, tuple[CapturedRunner, Mapping[Any, int]]] = {}
        """Runners with graphs by id, each with the indices of its graphs by SGLang's key."""
        self._recorder: Recorder | None = None
        """The recorder, once all graphs are captured."""
        self._ended = False
        """True after an error of ours."""
        self._in_chain = False
        self._calls: Counter[Role] = Counter()
        self._pace = LoopPace()
        self._target: Outcome | None = None
        """The target's last step in the batch that is launched."""

    def register(self, registry: Any, kinds: Any) -> None:
        """Register the hooks with SGLang's ``HookRegistry``; ``kinds`` is its ``HookType``."""
        runners = [(role, path, False) for role, path in seam.RUNNERS.items()]
        # One class has the prompts' graphs of target and drafter; its runner says whose they are.
        for role, path, prompts in (*runners, (None, seam.PREFILL_RUNNER, True)):
            registry.register(f"{path}.__init__", partial(self.built, role, prompts), kinds.AFTER)
            registry.register(f"{path}.capture_one_shape", self.captured, kinds.AROUND)
            registry.register(f"{path}.execute", self.replayed, kinds.AROUND)
        registry.register(seam.EAGER, self.eager, kinds.AROUND)
        registry.register(seam.DRAFT_CHAIN, self.chain, kinds.AROUND)
        registry.register(seam.ACCEPTED, self.accepted, kinds.AFTER)
        registry.register(seam.SCHEDULER, self.begin, kinds.AFTER)
        registry.register(seam.RUN_BATCH, self.launched, kinds.AROUND)
        registry.register(seam.PROCESS_RESULT, self.processed, kinds.AFTER)

    def built(self, role: Role | None, prompts: bool, result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Keep a runner after its ``__init__``, with what its graphs cost. The last of a role counts."""
        self._safely(self._keep, role, prompts, runner)

    def _keep(self, role: Role | None, prompts: bool, runner: Any) -> None:
        kind = f"{type(runner).__module__}.{type(runner).__qualname__}"
        drafter = bool(runner.model_runner.is_draft_worker)
        if role is None:
            role = Role.DRAFT_PREFILL if drafter else Role.TARGET
        # A runner of another class, or a drafter in the target's class, has no role in an observation.
        if kind in (*seam.RUNNERS.values(), seam.PREFILL_RUNNER) and role.is_drafter is drafter:
            self.runners[role, prompts] = CapturedRunner(
                role=role, runner=runner, prompts=prompts, costs=self._costs.pop(id(runner), {})
            )

    def captured(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the capture of one shape; its seconds and its memory are shared by the graphs that it made."""
        before = self._safely(self._before_capture, runner)
        result = original(runner, *args, **kwargs)
        if before is not None:
            self._safely(self._after_capture, runner, *before)
        return result

    def _before_capture(self, runner: Any) -> tuple[set[Any], int, float]:
        return set(runner.backend._graphs), self._free(), time.perf_counter()

    def _after_capture(self, runner: Any, before: set[Any], free: int, started: float) -> None:
        # Free memory can grow meanwhile, where the allocator gives back what it cached.
        seconds, memory = time.perf_counter() - started, max(free - self._free(), 0) / (1 << 20)
        made = [key for key in runner.backend._graphs if key not in before]
        costs = self._costs.setdefault(id(runner), {})
        # One call may make two graphs, with adapters and without.
        costs.update((key, (seconds / len(made), memory / len(made))) for key in made)

    def begin(self, result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Begin to record after the scheduler is made, as all graphs are captured then."""
        self._recorder = self._safely(self._recording, scheduler)

    def _recording(self, scheduler: Any) -> Recorder:
        if self._profile:
            self.runners = {key: runner.timed(self._event) for key, runner in self.runners.items()}
        # After timing, which makes new values of the runners.
        self._known = {id(each.runner): (each, table) for each, table in self.tables().items()}
        return self._begin(self, scheduler)

    def tables(self) -> dict[CapturedRunner, dict[Any, int]]:
        """Return the index of each graph in its role's list, by SGLang's key: prompts first, then decodes."""
        found: dict[CapturedRunner, dict[Any, int]] = {}
        for role in Role:
            first = 0
            for prompts in (True, False):
                each = self.runners.get((role, prompts))
                if each is not None:
                    found[each] = {key: first + place for place, key in enumerate(each.keys)}
                    first += len(each.keys)
        return found

    def launched(self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the launch of a batch by the scheduler, and take its time."""
        started, self._target = time.perf_counter(), None
        result = original(scheduler, batch, *args, **kwargs)
        if self._recorder is not None:
            self._safely(self._paced, self._recorder, batch, started)
        return result

    def _paced(self, recorder: Recorder, batch: Any, started: float) -> None:
        ended, idle = time.perf_counter(), bool(batch.after_idle_gap)
        for outcome, seconds in self._pace.launched(batch.forward_iter, self._target, started, ended, after_idle=idle):
            recorder.interval(outcome, seconds * 1e3)

    def processed(self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Take the time at which the scheduler has a batch's result on the host."""
        if self._recorder is not None:
            self._safely(lambda: self._pace.processed(batch.forward_iter, time.perf_counter()))

    def replayed(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``execute`` of a runner with graphs, and count the step."""
        run = partial(original, runner, batch, *args, **kwargs)
        # None: a class that is not counted, or one that was made later.
        known = self._known.get(id(runner))
        if self._recorder is None or known is None or batch.forward_mode.is_idle():
            return run()
        each, table = known
        shape = self._safely(each.shape, batch)
        result = self._step(shape, run)
        if shape is not None:
            self._count(shape, lambda: (table[each.replayed_key(shape)], None))
        return result

    def eager(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``EagerRunner.execute``, and count the step: it has no graph, whatever its role."""
        run = partial(original, runner, batch, *args, **kwargs)
        # An idle rank runs along with the others, without a batch; a chain counts as a whole.
        if self._recorder is None or self._in_chain or batch.forward_mode.is_idle():
            return run()
        return self._eager_step(self._safely(_eager_shape, runner, batch), run)

    def chain(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a chain of draft decodes, which comes here only where it is eager, and count it as one step."""
        run = partial(original, worker, batch, *args, **kwargs)
        # With one step the draft prefill makes the only draft.
        if self._recorder is None or self._in_chain or batch.forward_mode.is_idle() or worker.speculative_num_steps < 2:
            return run()
        num_reqs, width = batch.batch_size, worker.topk
        # Its eager forwards are parts of this one step.
        self._in_chain = True
        try:
            return self._eager_step((Role.DRAFT_DECODE, num_reqs, num_reqs * width, width, True, 0), run)
        finally:
            self._in_chain = False

    def accepted(self, result: Any, processor: Any, output: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Count accepted drafts once SGLang has the number of each request on the host."""
        if self._recorder is not None and output.num_correct_drafts_per_req_cpu:
            self._safely(self._accept, self._recorder, output.num_correct_drafts_per_req_cpu)

    def _accept(self, recorder: Recorder, correct: list[int]) -> None:
        drafts, counts = seam.context().get_spec().speculative_num_steps, Counter(correct)
        # Draft i of a request held where more than i of its drafts did.
        held = [sum(count for most, count in counts.items() if most > place) for place in range(drafts)]
        recorder.draft([len(correct)] * drafts, held)

    def _eager_step(self, shape: Shape | None, run: Callable[[], Any]) -> Any:
        result = self._step(shape, run)
        if shape is not None:
            each = self.runners.get((shape[0], not shape[4]))
            self._count(shape, lambda: (None, Reason.MODE if each is None else each.reason(shape)))
        return result

    def _count(self, shape: Shape, answer: Callable[[], tuple[int | None, Reason | None]]) -> None:
        found = self._safely(answer)
        if found is not None and self._recorder is not None:
            outcome = (*shape, *found)
            self._recorder.count(*outcome)
            # The scheduler's loop has one turn for each batch of the target.
            if shape[0] is Role.TARGET:
                self._target = outcome

    def _step(self, shape: Shape | None, run: Callable[[], Any]) -> Any:
        """Run a step, and time one of so many."""
        if shape is None:
            return run()
        self._calls[shape[0]] += 1
        # The first of so many, so that a role that seldom runs has a time as well.
        if self._calls[shape[0]] % _EVERY != 1:
            return run()
        self._safely(self._start, shape)
        result = run()
        self._safely(self._stop)
        return result

    def _start(self, shape: Shape) -> None:
        self._clock.drop()  # of a step that ended in an error of the engine
        self._clock.start(shape)

    def _stop(self) -> None:
        self._clock.stop()
        for shape, milliseconds in self._clock.passed():
            if self._recorder is not None:
                self._recorder.sample(*shape, milliseconds)

    def _safely(self, function: Callable[..., T], *args: Any) -> T | None:
        if self._ended:
            return None
        try:
            return function(*args)
        except Exception:
            # The recorder goes on writing what it has.
            self._recorder, self._ended = None, True
            if self._strict:
                raise
            LOG.exception("SGLang is not observed any more")
            return None


def _eager_shape(runner: Any, batch: Any) -> Shape:
    mode, drafter, tokens = batch.forward_mode, runner.model_runner.is_draft_worker, len(batch.input_ids)
    # In these modes all requests have the same number of tokens; the others run prompts.
    decode = mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()
    role = Role.TARGET if not drafter else Role.DRAFT_DECODE if mode.is_decode() else Role.DRAFT_PREFILL
    width = tokens // batch.batch_size if decode else None
    return role, batch.batch_size, tokens, width, decode, lora_count(runner.model_runner, batch)
