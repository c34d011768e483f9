"""The runner: execute a plan. Reserve, capture, serve a stream of requests, report.

Nothing is decided here: the plan says what is captured, the dispatcher which graph serves a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from time import perf_counter

import attrs
import torch

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import RunError
from capture_planner.plugins.registry import Registry
from capture_planner.records.plan import Plan
from capture_planner.runtime.assembly import Parts, assemble
from capture_planner.runtime.eager_check.role import comparing
from capture_planner.runtime.execution.capture import as_captured, capture_all, without_graphs
from capture_planner.runtime.execution.role import Options
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.ledger import Captured, Forward, Served, Step
from capture_planner.runtime.models.protocols import Drafter, TargetModel
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.scheduler import Scheduler
from capture_planner.runtime.serving.serving import Answers, Serving
from capture_planner.runtime.serving.workload import Request


@attrs.define(eq=False)
class Session:
    """What has happened so far; complete at every moment, so that an interruption loses nothing."""

    captured: list[Captured] = attrs.Factory(list)
    forwards: list[Forward] = attrs.Factory(list)
    steps: list[Step] = attrs.Factory(list)
    served: list[Served] = attrs.Factory(list)
    capture_seconds: float = 0.0
    serve_seconds: float = 0.0
    interrupted: bool = False


class Runner:
    """Executes one plan on one model. Use it as a context: leaving releases the backends."""

    def __init__(
        self,
        plan: Plan,
        model: TargetModel,
        drafter: Drafter | None,
        registry: Registry,
        grapher: Grapher,
        *,
        pages: PageFormat,
        device: torch.device | None = None,
        options: Options | None = None,
    ) -> None:
        if (plan.speculative is None) != (drafter is None):
            raise RunError(
                "the plan has a drafter and none was given"
                if drafter is None
                else "a drafter was given, and the plan has none"
            )
        self.plan, self.model, self.drafter = plan, model, drafter
        options = options or Options()
        self.pages, self.options = pages, comparing(options) if options.compare else options
        self.session = Session()
        self._grapher, self.device = grapher, device or torch.device("cpu")
        self.parts: Parts = assemble(
            plan,
            model,
            drafter,
            registry,
            grapher,
            pages=pages,
            device=self.device,
            options=self.options,
        )
        self._serving: Serving | None = None
        self._dispatch_by(without_graphs(plan))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as releases:
            for role in reversed(tuple(self.parts.roles.values())):
                releases.callback(role.release)

    def capture(
        self, *, memory: int | None = None, progress: Callable[[Captured], None] | None = None
    ) -> None:
        """Capture every entry; what does not fit into memory is waived from here on.

        ``memory`` bounds each pool, in bytes. Before this is called, everything runs eager. Raises
        ``RunError`` while requests are served: captures write the fields that their steps go on from.
        """
        self._refuse_while_serving("capture")
        if not self.options.replay:
            self._dispatch_by(self.plan)
            return
        started = perf_counter()
        try:
            with torch.no_grad():
                for done in capture_all(
                    self.plan,
                    tuple(self.parts.roles.values()),
                    self._grapher,
                    self.options,
                    memory=memory,
                ):
                    self.session.captured.append(done)
                    if progress is not None:
                        progress(done)
        finally:
            self.session.capture_seconds = perf_counter() - started
        self._dispatch_by(as_captured(self.plan, self.session.captured))

    def _dispatch_by(self, plan: Plan) -> None:
        dispatcher = Dispatcher(plan)
        for role in self.parts.roles.values():
            role.dispatcher = dispatcher

    def serve(
        self,
        requests: Sequence[Request],
        *,
        answers: Answers | None = None,
        step_seconds: float = 0.01,
        progress: Callable[[Served], None] | None = None,
    ) -> list[Served]:
        """Serve all requests and return them in the order in which they finished.

        Arrivals are on a clock of steps: each step takes ``step_seconds`` of it, and idle time is
        skipped, so that the same requests make the same batches on any machine. ``answers`` are for
        drafters that copy or miss the target.
        """
        serving = self.start(requests, answers=answers, progress=progress)
        scheduler = serving.scheduler
        started = perf_counter()
        now = 0.0
        try:
            while not serving.done:
                scheduler.arrive(now, perf_counter())
                if not serving.step() and scheduler.next_arrival is not None:
                    now = scheduler.next_arrival
                else:
                    now += step_seconds
        finally:
            self.session.serve_seconds += perf_counter() - started
            serving.cut_off()
        return serving.served

    def start(
        self,
        requests: Sequence[Request] = (),
        *,
        answers: Answers | None = None,
        progress: Callable[[Served], None] | None = None,
    ) -> Serving:
        """Begin to serve, for whoever steps by hand; ``serve`` does it to the end.

        Raises ``RunError`` while others are served (there is one KV cache), and for a request that
        cannot be: without a prompt, longer than the model, or than all pages together.
        """
        self._refuse_while_serving("start")
        scheduler = Scheduler(
            requests,
            limits=self.plan.limits,
            speculative=self.plan.speculative,
            pages=self.pages,
            max_model_len=self.plan.model.max_model_len,
        )
        self._serving = serving = Serving(self, scheduler, answers or {}, progress)
        return serving

    def _refuse_while_serving(self, what: str) -> None:
        if self._serving is not None and not (self._serving.done or self._serving.is_over):
            raise RunError(
                f"{what} was called while requests are served; finish them, or cut them off (Serving.cut_off)"
            )
