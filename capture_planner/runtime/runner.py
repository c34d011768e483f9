"""The runner: execute a plan. Reserve, capture, serve a stream of requests, report.

Nothing is decided here: the plan says what is captured, the dispatcher which graph serves a batch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch

from capture_planner.dispatch.dispatcher import AnyDispatcher, Dispatcher
from capture_planner.errors import RunError
from capture_planner.plugins.registry import Registry
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.plan import Plan
from capture_planner.runtime.assembly import assemble
from capture_planner.runtime.capture import Order, capture_all, session
from capture_planner.runtime.compilation.forwards import Compilation
from capture_planner.runtime.compiling import compile_bodies, compiled_seconds
from capture_planner.runtime.execution.role import ForwardObserver
from capture_planner.runtime.first_use import FirstUse
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.ledger import GraphCapture, LazyCaptures, RequestResult, Wait, WarmUp
from capture_planner.runtime.models.protocols import Adapters, Drafter, TargetModel
from capture_planner.runtime.options import ExecutionPolicy, Options
from capture_planner.runtime.plan_variants import as_captured, without_graphs
from capture_planner.runtime.ranks.peers import ALONE, Peers
from capture_planner.runtime.serving.acceptance import SyntheticAcceptance
from capture_planner.runtime.serving.agreement import OneReplica, Replicas, StepRanks
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.launching import StepLauncher
from capture_planner.runtime.serving.scheduler import Scheduler
from capture_planner.runtime.serving.serving import Answers, LateCaptures, Serving
from capture_planner.runtime.serving.warming import WarmUpLauncher
from capture_planner.runtime.serving.workload import Request
from capture_planner.runtime.session import Session

WARM_UP = 60.0
"""Seconds for which steps are warmed up at most."""


class Runner(contextlib.AbstractContextManager["Runner"]):
    """Executes one plan on one model. Use it as a context: leaving releases the backends.

    :param session: where forwards, steps and requests are noted; one that keeps all rows by default.
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
        session: Session | None = None,
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
        self.session = session or Session()
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
        self.compilation = compilation or Compilation(peers, model.among)
        """What was compiled, and what could not be."""
        if self.policy.compile:
            self._compile()
        self._dispatcher = Dispatcher(without_graphs(plan))
        self._first_use: FirstUse | None = None
        self._grapher = grapher
        self._serving: Serving | None = None
        self._started: Scheduler | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        """Says which graph serves a batch: none before ``capture``, and of a lazy plan more as they are used."""
        return self._dispatcher if self._first_use is None else self._first_use.dispatcher

    @property
    def lazy(self) -> LazyCaptures | None:
        """What was captured on first use, and what is left of the budget for it; None: nothing is."""
        return None if self._first_use is None else self._first_use.record()

    def fingerprint(self, done: GraphCapture) -> Fingerprint | None:
        """Return that of a captured graph; None where it is not kept, or has none. Raises ``CaptureError``."""
        graph = self.parts.roles[done.role].graphs.get(done.entry)
        return None if graph is None else graph.fingerprint()

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
        """Capture every entry but those on first use; what does not fit into memory is waived from here on.

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
            self._dispatcher = Dispatcher(self.plan)
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
        self._dispatcher, self._first_use = Dispatcher(as_captured(self.plan, self.session.captured)), None

    def first_use(self) -> FirstUse | None:
        """Return what captures graphs on first use, one for all requests of this runner; None: nothing is captured so.

        ``serve`` asks it. Callers that run forwards themselves dispatch by it, tell it of each (``ask``), and let it
        capture between two of them.
        Of several replicas one that has captured nothing has it too, for all of them ask together.
        """
        if self._first_use is None and self.plan.num_lazy and self.policy.options.replay:
            roles, peers = self.parts.roles, self.peers
            if peers.place.data_size > 1 or all(role.pool is not None for role in roles.values()):
                self._first_use = FirstUse(self.plan, roles, self._grapher, self.session, peers, self.model.among)
        return self._first_use

    def serve(
        self,
        requests: Sequence[Request],
        *,
        answers: Answers | None = None,
        step_seconds: float = 0.01,
        progress: Callable[[RequestResult], None] | None = None,
    ) -> list[RequestResult]:
        """Serve all requests and return them in the order in which they finished; the last, if the session keeps fewer.

        Arrivals are on a clock of steps: each step takes ``step_seconds`` of it, and idle time is skipped, so that the
        same requests make the same batches on any machine. ``answers`` are for drafters that copy or miss the target.
        """
        serving = self.start(requests, answers=answers, progress=progress)
        with contextlib.ExitStack() as end:
            end.callback(serving.cut_off)
            end.enter_context(self.session.serving())
            for _ in _steps(serving, step_seconds):
                pass
        return list(serving.served)

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
        scheduler, count = self._scheduler(requests), self.session.tally.steps
        self._started = scheduler
        first_use = self.first_use()
        dispatcher: AnyDispatcher | Replicas = first_use or self.dispatcher
        ranks: StepRanks = OneReplica()
        if self.peers.place.data_size > 1:
            # The same on every rank, also on one that has no graphs: what it lacks, no rank uses.
            planned = first_use or Dispatcher(as_captured(self.plan, self.session.captured))
            captured = planned.plan.num_graphs == 0 or not self.policy.options.replay
            captured = captured or any(role.graphs for role in self.parts.roles.values())
            rows = self.parts.draft_rows
            dispatcher = ranks = Replicas(planned, self.peers, self.session, scheduler.states, rows, captured=captured)
        launcher = StepLauncher(
            scheduler,
            self.parts,
            dispatcher,
            ranks,
            self.pages,
            self.session,
            count,
            acceptance=self._acceptance,
            asks=first_use,
        )
        return self._begin(launcher, scheduler, ranks, self.session, answers, progress, first_use)

    def warm_up(self, requests: Sequence[Request], *, step_seconds: float = 0.01, limit: float = WARM_UP) -> WarmUp:
        """Run a step of each shape that serving these requests will have and no FULL graph serves, and one at least.

        Nothing of it is in the session. Where tokens decide shapes (drafts that are accepted, stop tokens), the shapes
        are those without. After ``limit`` seconds the rest is left out, with the reason. Raises ``RunError`` as
        ``start`` does.
        """
        self._refuse_while_serving("warm_up")
        started, session, scheduler, ranks = perf_counter(), Session(most=0), self._scheduler(requests), OneReplica()
        launcher = WarmUpLauncher(
            scheduler,
            self.parts,
            self.dispatcher,
            ranks,
            self.pages,
            session,
            0,
            acceptance=self._acceptance,
            deadline=started + limit,
            tokens=_unused_tokens(requests),
        )
        serving = self._begin(launcher, scheduler, ranks, session, None, None)
        reason = ""
        with compiled_seconds() as compiled, contextlib.ExitStack() as end:
            end.callback(serving.cut_off)
            for _ in _steps(serving, step_seconds):
                if perf_counter() > started + 2 * limit:
                    reason = f"the workload is longer than {2 * limit:g} s could go through"
                    break
        if launcher.ran < len(launcher.shapes):
            reason = reason or f"{limit:g} s were over"
        return WarmUp(
            shapes=len(launcher.shapes),
            ran=launcher.ran,
            seconds=perf_counter() - started,
            compiled=tuple(compiled),
            reason=reason,
        )

    def unadmitted(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Wait | None]]:
        """Yield the requests that were not admitted, with what they wait for: all of them before ``start``."""
        if self._started is None:
            return ((request, None) for request in requests)
        return self._started.unadmitted

    @property
    def _acceptance(self) -> SyntheticAcceptance | None:
        options = self.policy.options
        return SyntheticAcceptance(options.acceptance, options.seed) if options.acceptance else None

    def _scheduler(self, requests: Sequence[Request]) -> Scheduler:
        plan = self.plan
        return Scheduler(
            requests,
            limits=plan.limits,
            speculative=plan.speculative,
            pages=self.pages,
            max_model_len=plan.model.max_model_len,
            pool_rows=None if plan.states is None else plan.states.rows,
            lora=plan.lora,
            num_adapters=0 if self.adapters is None else len(self.adapters.names),
        )

    def _begin(
        self,
        launcher: StepLauncher,
        scheduler: Scheduler,
        ranks: StepRanks,
        session: Session,
        answers: Answers | None,
        progress: Callable[[RequestResult], None] | None,
        late: LateCaptures | None = None,
    ) -> Serving:
        drafter, ahead, options = self.drafter, self.policy.run_ahead, self.policy.options
        # Another seed than the acceptance has, so that a draft is not accepted because it was proposed.
        proposals = SyntheticAcceptance(options.proposals, options.seed + 1) if options.proposals else None
        self._serving = Serving(
            scheduler, launcher, ranks, session, drafter, answers or {}, progress, ahead, proposals=proposals, late=late
        )
        return self._serving

    def _refuse_while_serving(self, what: str) -> None:
        if self._serving is not None and not (self._serving.done or self._serving.is_over):
            raise RunError(
                f"{what} was called while requests are served; finish them, or cut them off (Serving.cut_off)"
            )


def _steps(serving: Serving, step_seconds: float) -> Iterator[None]:
    """Step until all is served, on a clock of steps; idle time is skipped."""
    scheduler, now = serving.scheduler, 0.0
    while not serving.done:
        scheduler.arrive(now, perf_counter())
        if not serving.step() and scheduler.next_arrival is not None:
            now = scheduler.next_arrival
        else:
            now += step_seconds
        yield


def _unused_tokens(requests: Sequence[Request]) -> tuple[int, int]:
    """Return two tokens that end no request."""
    stops = frozenset[int]().union(*(request.stop for request in requests))
    first = next(token for token in itertools.count() if token not in stops)
    return first, next(token for token in itertools.count(first + 1) if token not in stops)
