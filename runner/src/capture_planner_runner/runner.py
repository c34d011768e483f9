"""The runner: execute a plan. Reserve, capture, serve a stream of requests, report.

Nothing is decided here: the plan says what is captured, the dispatcher which graph serves a batch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import cast

import torch

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import RunError
from capture_planner.plugins.registry import Registry
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.plan import Plan
from capture_planner_runner.capture.first_use import FirstUse
from capture_planner_runner.capture.sessions import Order, capture_all, session
from capture_planner_runner.capture.variants import as_captured, without_graphs
from capture_planner_runner.compilation.forwards import Compilation, Inputs, compiled_seconds, compiler_for
from capture_planner_runner.execution.fields import Extents
from capture_planner_runner.execution.role import ForwardObserver, RoleRun
from capture_planner_runner.execution.updates import DraftState
from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.launch.assembly import assemble
from capture_planner_runner.ledger.rows import GraphCapture, LazyCaptures, RequestResult, Wait, WarmUp
from capture_planner_runner.ledger.session import Session
from capture_planner_runner.models.protocols import Adapters, Drafter, TargetModel
from capture_planner_runner.options import Options
from capture_planner_runner.ranks.peers import ALONE, Peers
from capture_planner_runner.serving.inputs import DraftRows
from capture_planner_runner.serving.launching import StepLauncher, WarmUpLauncher
from capture_planner_runner.serving.scheduler import Scheduler
from capture_planner_runner.serving.serving import Answers, Serving
from capture_planner_runner.serving.speculative import SyntheticAcceptance
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.steps import ReplicaPlanner, StepPlanner
from capture_planner_runner.serving.workload import Request

WARM_UP = 60.0
"""Seconds for which steps are warmed up at most."""


class Runner(contextlib.AbstractContextManager["Runner"]):
    """Executes one plan on one model. Use it as a context: leaving releases the backends.

    :param grapher: captures graphs. Where an engine offloads weights, ``graphs.offloading.with_offloader`` makes one.
    :param session: where forwards, steps and requests are noted; one that keeps all rows by default.
    :param observer: watches the forwards of all roles, see ``execution.role.ForwardObserver``. With
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
        self.observer = observer or ForwardObserver()
        assembly = assemble(
            plan,
            model,
            drafter,
            registry,
            grapher,
            pages=pages,
            device=self.device,
            options=options or Options(),
            observer=self.observer,
            adapters=adapters,
        )
        self.policy = assembly.policy
        """Decided for all steps before anything was built."""
        self.roles, self.target, self.drafting = assembly.roles, assembly.target, assembly.drafting
        self.comparison = assembly.comparison
        """Notes comparisons of graphs with eager forwards; None: nothing is compared."""
        self.compilation = compilation or Compilation(peers, model.among)
        """The compiled forwards, and what could not be compiled."""
        if self.policy.compile:
            with contextlib.ExitStack() as release:
                # No caller has entered the runner yet: if compiling fails, the backends are released here.
                release.push(self)
                compile_bodies(tuple(self.roles.values()), self.device, self.compilation)
                release.pop_all()
        self._dispatcher = Dispatcher(without_graphs(plan))
        self._first_use: FirstUse | None = None
        self._grapher = grapher
        self._serving: Serving | None = None
        self._started: Scheduler | None = None

    @property
    def draft_state(self) -> DraftState | None:
        """The state that draft steps hand on; None without a drafter."""
        return None if self.drafting is None else self.drafting.state

    @property
    def dispatcher(self) -> Dispatcher:
        """Says which graph serves a batch: none before ``capture``, and of a lazy plan more as they are used."""
        return self._dispatcher if self._first_use is None else self._first_use.dispatcher

    @property
    def lazy(self) -> LazyCaptures | None:
        """Captures on first use, and what is left of their budget; None: nothing is captured so."""
        return None if self._first_use is None else self._first_use.record()

    def fingerprint(self, done: GraphCapture) -> Fingerprint | None:
        """Return that of a captured graph; None where it is not kept, or has none. Raises ``CaptureError``."""
        graph = self.roles[done.role].graphs.get(done.entry)
        return None if graph is None else graph.fingerprint()

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as releases:
            # ExitStack calls back in reverse order, and calls every one even if another raises.
            for role in reversed(tuple(self.roles.values())):
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
        if any(role.graphs.pool is not None for role in self.roles.values()):
            raise RunError("this runner has captured already; make another one to capture again")
        if not self.policy.options.replay:
            # Batches run at the padded sizes of their entries, and nothing is captured.
            self._dispatcher = Dispatcher(self.plan)
            return
        roles, strict = tuple(self.roles.values()), self.policy.options.strict
        # An earlier session may have broken off, and its graphs are gone.
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
        """Return the capturer of graphs on first use, one for all requests of this runner; None: none are captured so.

        ``serve`` uses it. Callers that run forwards themselves dispatch by it, call ``request_capture`` for each
        forward, and let it capture between two of them.
        """
        if self._first_use is None and self.plan.num_lazy and self.policy.options.replay:
            roles, peers = self.roles, self.peers
            # A replica that has captured nothing has one too, since all replicas request captures together.
            if peers.place.data_size > 1 or all(role.graphs.pool is not None for role in roles.values()):
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
            # After an error too: requests that are not finished are noted as cut off.
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
        serving = self._serve(
            requests, self.session, StepLauncher, first_use=self.first_use(), answers=answers, progress=progress
        )
        # Kept for the report, which names the requests that were never admitted.
        self._started = serving.scheduler
        return serving

    def warm_up(self, requests: Sequence[Request], *, step_seconds: float = 0.01, limit: float = WARM_UP) -> WarmUp:
        """Run a step of each shape that serving these requests will have and no FULL graph serves, and one at least.

        Nothing of it is in the session. Where tokens decide shapes (drafts that are accepted, stop tokens), the shapes
        are those without. After ``limit`` seconds the rest is left out, with the reason. Raises ``RunError`` as
        ``start`` does.
        """
        self._refuse_while_serving("warm_up")
        started = perf_counter()
        kind = functools.partial(WarmUpLauncher, deadline=started + limit, tokens=_unused_tokens(requests))
        serving = self._serve(requests, Session(most=0), kind)
        launcher = cast("WarmUpLauncher", serving.launcher)
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
    def draft_rows(self) -> DraftRows | None:
        """The rows of the first draft pass; None without a drafter."""
        return None if self.drafting is None else self.drafting.rows

    def _serve(
        self,
        requests: Sequence[Request],
        session: Session,
        kind: Callable[..., StepLauncher],
        *,
        first_use: FirstUse | None = None,
        answers: Answers | None = None,
        progress: Callable[[RequestResult], None] | None = None,
    ) -> Serving:
        """Begin to serve, with a launcher of this kind. Only the run's own session is served with other replicas."""
        plan, options, pages = self.plan, self.policy.options, self.pages
        scheduler = Scheduler(
            requests,
            limits=plan.limits,
            speculative=plan.speculative,
            pages=pages,
            max_model_len=plan.model.max_model_len,
            pool_rows=None if plan.states is None else plan.states.rows,
            lora=plan.lora,
            num_adapters=0 if self.adapters is None else len(self.adapters.names),
            is_sampled=options.temperature > 0,
        )
        planner = StepPlanner(first_use or self.dispatcher, scheduler.states, self.policy, self.draft_rows)
        if self.peers.place.data_size > 1 and session is self.session:
            # The same dispatcher on every rank, also on one that has no graphs: what it lacks, no rank uses.
            dispatcher = first_use or Dispatcher(as_captured(self.plan, self.session.captured))
            is_eager = dispatcher.plan.num_graphs == 0 or not self.policy.options.replay
            planner = ReplicaPlanner(
                dispatcher,
                scheduler.states,
                self.policy,
                self.draft_rows,
                self.peers,
                self.session,
                captured=is_eager or any(role.graphs for role in self.roles.values()),
            )
        launcher = kind(
            scheduler=scheduler,
            roles=self.roles,
            target=self.target,
            drafting=self.drafting,
            pages=pages,
            session=session,
            observer=self.observer,
            comparison=self.comparison,
            acceptance=SyntheticAcceptance(options.acceptance, options.seed) if options.acceptance else None,
            first_use=first_use,
            # Steps are counted on over several loads of one session.
            count=session.tally.steps,
        )
        self._serving = Serving(
            scheduler,
            launcher,
            planner,
            session,
            self.drafter,
            answers or {},
            progress,
            self.policy.run_ahead,
            # Another seed than the acceptance has, so that a draft is not accepted because it was proposed.
            proposals=SyntheticAcceptance(options.proposals, options.seed + 1) if options.proposals else None,
            first_use=first_use,
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
        # Nothing to run: the clock goes on to the next arrival.
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


def compile_bodies(roles: Sequence[RoleRun], device: torch.device, compilation: Compilation) -> None:
    """Compile the bodies of all roles. What cannot be compiled runs as it is; ``compilation`` has the reason.

    All of its ranks do so together, and what one of them cannot compile runs as it is on all.
    """
    weights = [weight for role in roles for weight in role.body.weights()]  # a drafter may read the target's
    compiler = compiler_for(device, compilation.peers.place)
    with torch.no_grad():
        for role, variant, inputs in _variants(roles):
            body, label = role.body, f"{role.role.value}{f' ({variant})' if variant else ''}"
            body.forwards.compile(body.forward, body.network, variant, inputs, weights, compiler, compilation, label)


def _variants(roles: Sequence[RoleRun]) -> Iterator[tuple[RoleRun, int, Inputs]]:
    """Yield each variant of a forward that graphs hold, and the one without adapters, with inputs for it."""
    for role in roles:
        for adapters in sorted({0} | {role.adapters_of(entry) for entry in role.plan.entries}):
            # One token will do: a compiled forward is for any number of them.
            extents = Extents(tokens=1, reqs=1, pages=role.fields.capacity.pages, adapters=adapters)
            yield from ((role, *example) for example in role.body.examples(extents))
