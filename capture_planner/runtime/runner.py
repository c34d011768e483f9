"""The runner: execute a plan. Reserve, capture, serve a stream of requests, report.

Nothing is decided here: the plan says what is captured, the dispatcher which graph serves a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import RunError
from capture_planner.plugins.registry import Registry
from capture_planner.records.plan import Plan
from capture_planner.runtime.assembly import assemble
from capture_planner.runtime.capture import Order, capture_all, session
from capture_planner.runtime.compilation.forwards import Compilation
from capture_planner.runtime.compiling import compile_bodies
from capture_planner.runtime.execution.role import ForwardObserver
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.ledger import GraphCapture, RequestResult, Session
from capture_planner.runtime.models.protocols import Adapters, Drafter, TargetModel
from capture_planner.runtime.options import ExecutionPolicy, Options
from capture_planner.runtime.plan_variants import as_captured, without_graphs
from capture_planner.runtime.ranks.peers import ALONE, Peers
from capture_planner.runtime.serving.agreement import OneReplica, Replicas, StepRanks
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.launching import StepLauncher
from capture_planner.runtime.serving.scheduler import Scheduler
from capture_planner.runtime.serving.serving import Answers, Serving
from capture_planner.runtime.serving.workload import Request


class Runner(contextlib.AbstractContextManager["Runner"]):
    """Executes one plan on one model. Use it as a context: leaving releases the backends.

    :param observer: watches the forwards of all roles, see ``runtime.execution.role.ForwardObserver``. With
        ``Options.compare``, which is an observer itself, only its ``batch`` and ``forward`` are called.
    :param compilation: what other runners of the same model compiled; gets what this one compiles.
    """

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
        observer: ForwardObserver | None = None,
        adapters: Adapters | None = None,
        compilation: Compilation | None = None,
        peers: Peers = ALONE,
    ) -> None:
        options = options or Options()
        if (plan.speculative is None) != (drafter is None):
            raise RunError(
                "the plan has a drafter and none was given"
                if drafter is None
                else "a drafter was given, and the plan has none"
            )
        if adapters is not None and plan.lora is None:
            raise RunError("adapters were given, and the plan has none; plan with lora: {max_active: N}")
        self.plan, self.model, self.drafter = plan, model, drafter
        self.adapters, self.peers = adapters, peers
        self.pages = pages
        self.device = device or torch.device("cpu")
        self.session = Session()
        self.parts = assemble(
            plan,
            model,
            drafter,
            registry,
            grapher,
            pages=pages,
            device=self.device,
            options=options,
            observer=observer or ForwardObserver(),
            adapters=adapters,
        )
        self.compilation = compilation or Compilation()
        """What was compiled, and what could not be."""
        if self.policy.compile:
            self._compile()
        self.dispatcher = Dispatcher(without_graphs(plan))
        """Says which graph serves a batch: none before ``capture``."""
        self._grapher = grapher
        self._serving: Serving | None = None

    @property
    def policy(self) -> ExecutionPolicy:
        """What was decided for all steps before anything was built."""
        return self.parts.policy

    def _compile(self) -> None:
        with contextlib.ExitStack() as release:
            release.push(self)
            compile_bodies(tuple(self.parts.roles.values()), self.device, self.compilation)
            release.pop_all()

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as releases:
            for role in reversed(tuple(self.parts.roles.values())):
                releases.callback(role.release)

    def capture(
        self,
        *,
        memory: int | None = None,
        progress: Callable[[GraphCapture], None] | None = None,
        order: Order | None = None,
    ) -> None:
        """Capture every entry; what does not fit into memory is waived from here on.

        ``memory`` bounds each pool, in bytes; ``order`` arranges the captures, which need least memory in their
        own order. Before this is called, everything runs eager, and again after an error, which names the entry
        and leaves no graph: then it may be called once more. Raises ``RunError`` while requests are served: captures
        write the fields that their steps go on from. Also after a complete capture: the pool would hold the
        graphs of both, and only one set is used.
        """
        self._refuse_while_serving("capture")
        if any(role.pool is not None for role in self.parts.roles.values()):
            raise RunError("this runner has captured already; make another one to capture again")
        if not self.policy.options.replay:
            self.dispatcher = Dispatcher(self.plan)
            return
        roles, strict = tuple(self.parts.roles.values()), self.policy.options.strict
        self.session.captured.clear()
        # Not inference_mode: tensors made in it, as backends make them, could not be changed outside of it. A replay,
        # which dispatches no operator, would gain nothing from it.
        with self.session.capturing(), torch.no_grad(), session(roles):
            captures = capture_all(
                self.plan,
                roles,
                self._grapher,
                strict=strict,
                memory=memory,
                order=order,
                peers=self.peers,
                among=self.model.among,
            )
            for done in captures:
                self.session.captured.append(done)
                if progress is not None:
                    progress(done)
        self.dispatcher = Dispatcher(as_captured(self.plan, self.session.captured))

    def serve(
        self,
        requests: Sequence[Request],
        *,
        answers: Answers | None = None,
        step_seconds: float = 0.01,
        progress: Callable[[RequestResult], None] | None = None,
    ) -> list[RequestResult]:
        """Serve all requests and return them in the order in which they finished.

        Arrivals are on a clock of steps: each step takes ``step_seconds`` of it, and idle time is skipped, so that the
        same requests make the same batches on any machine. ``answers`` are for drafters that copy or miss the target.
        """
        serving = self.start(requests, answers=answers, progress=progress)
        scheduler = serving.scheduler
        now = 0.0
        with contextlib.ExitStack() as end:
            end.callback(serving.cut_off)
            end.enter_context(self.session.serving())
            while not serving.done:
                scheduler.arrive(now, perf_counter())
                if not serving.step() and scheduler.next_arrival is not None:
                    now = scheduler.next_arrival
                else:
                    now += step_seconds
        return serving.served

    def start(
        self,
        requests: Sequence[Request] = (),
        *,
        answers: Answers | None = None,
        progress: Callable[[RequestResult], None] | None = None,
    ) -> Serving:
        """Begin to serve, for callers that step by hand; ``serve`` does it to the end.

        Raises ``RunError`` while others are served (there is one KV cache), and for a request that
        cannot be: without a prompt, longer than the model, or than all pages together.
        """
        self._refuse_while_serving("start")
        plan, longest = self.plan, self.plan.model.max_model_len
        scheduler = Scheduler(
            requests,
            limits=plan.limits,
            speculative=plan.speculative,
            pages=self.pages,
            max_model_len=longest,
            pool_rows=None if plan.states is None else plan.states.rows,
            lora=plan.lora,
            num_adapters=0 if self.adapters is None else len(self.adapters.names),
        )
        count = len(self.session.steps)
        dispatcher: Dispatcher | Replicas = self.dispatcher
        ranks: StepRanks = OneReplica()
        if self.peers.place.data_size > 1:
            # The same on every rank, also on one that has no graphs: what it lacks, no rank uses.
            planned = Dispatcher(as_captured(plan, self.session.captured))
            captured = planned.plan.num_graphs == 0 or not self.policy.options.replay
            captured = captured or any(role.graphs for role in self.parts.roles.values())
            rows = self.parts.draft_rows
            dispatcher = ranks = Replicas(planned, self.peers, self.session, scheduler.states, rows, captured=captured)
        launcher = StepLauncher(scheduler, self.parts, dispatcher, ranks, self.pages, self.session, count)
        self._serving = Serving(
            scheduler, launcher, ranks, self.session, self.drafter, answers or {}, progress, self.policy.run_ahead
        )
        return self._serving

    def _refuse_while_serving(self, what: str) -> None:
        if self._serving is not None and not (self._serving.done or self._serving.is_over):
            raise RunError(
                f"{what} was called while requests are served; finish them, or cut them off (Serving.cut_off)"
            )
