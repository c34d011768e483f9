"""Launch: from a plan and a request to a report, in five stages. Everything that can be refused is, before capture."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import torch

from capture_planner.analysis.data_parallel import Vector
from capture_planner.errors import CaptureError, DifferenceError, RunError
from capture_planner.modes import Role
from capture_planner.plugins.profiler import Progress
from capture_planner.plugins.registry import Registry
from capture_planner.records.plan import Plan
from capture_planner_runner import host
from capture_planner_runner.capture.variants import without_graphs, without_speculation
from capture_planner_runner.compilation.forwards import Compilation, compiled_seconds
from capture_planner_runner.execution.fields import tensor_of
from capture_planner_runner.execution.role import ForwardObserver
from capture_planner_runner.graphs.graph import Grapher, dump_graphs
from capture_planner_runner.graphs.recorded import grapher_for
from capture_planner_runner.launch import cache_memory
from capture_planner_runner.launch.assembly import buffer_bytes, kv_cache_bytes, kv_dtype_of
from capture_planner_runner.launch.request import (
    ORACLES,
    RunRequest,
    adapters_of,
    drafter_of,
    model_of,
    refuse_backends,
    refuse_contradictions,
    refuse_plan,
    request_facts,
    start_facts,
)
from capture_planner_runner.ledger.rows import (
    CacheMemory,
    RankRecord,
    RankRow,
    RequestResult,
    VectorCount,
    Wait,
    WarmUp,
)
from capture_planner_runner.ledger.session import MOST_ROWS, RunReport, Session
from capture_planner_runner.models.protocols import Adapters, Drafter, LayeredModel
from capture_planner_runner.numerics.record import OutputCheck
from capture_planner_runner.numerics.verification import RowKeeper, check_output, refuse_infinite, weight_sums
from capture_planner_runner.options import Options
from capture_planner_runner.ranks.collectives import collectives_of
from capture_planner_runner.ranks.outcomes import refuse_differences
from capture_planner_runner.ranks.peers import ALONE, Peers, Plain
from capture_planner_runner.report.timeline import Events, events_of
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.serving import Answers
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.steps import vectors_of
from capture_planner_runner.serving.workload import Decode, Request, admit, with_adapters

ROW = ("steps", "idle_steps", "eager_by_others", "larger_by_others")
"""Counts of a tally in the row of a rank."""

MOST_VECTORS = 200
"""Limit of different vectors in a report."""

RankCounts = Mapping[str, Any]


def with_ranks(
    report: RunReport, session: Session, peers: Peers, events: Events = ()
) -> tuple[RunReport, tuple[Events, ...]]:
    """Return the first rank's report with the rows of all ranks and the requests of all replicas; others unchanged.

    Requests and drafts are summed over the replicas. Forwards and steps are the first rank's, because replicas run them
    together. Also returns the events of each rank.
    """
    place, counts = peers.place, report.counts
    if place.size == 1:
        return report, (events,)
    counted: dict[str, Plain] = {
        "host": place.host,
        **{name: getattr(counts, name) for name in ROW},
        "requests": counts.request_counts,
        "mismatched_requests": report.mismatched_requests,
        "seconds": report.serve_seconds,
        "events": list(events),
        "agreed": [round(step.seconds, 7) for step in session.rank_steps],
        # Tensor-parallel ranks serve the same requests: the first of each replica sends them.
        "served": [attrs.asdict(served) for served in report.served] if place.data and not place.tensor else None,
    }
    collected = peers.collect("the report", counted, interrupted=report.interrupted)
    if place.rank:
        return report, ()
    by_rank = {rank: cast("RankCounts", each) for rank, each in enumerate(collected) if each is not None}
    replicas = [each for each in by_rank.values() if each["served"] is not None]
    served = [_request(each) for replica in replicas for each in replica["served"]]
    tally = copy.deepcopy(counts)
    for other in replicas:
        tally.add_request_counts(other["requests"])
    complete = attrs.evolve(
        report,
        served=(*report.served, *served),
        tally=tally,
        mismatched_requests=report.mismatched_requests + sum(other["mismatched_requests"] for other in replicas),
        serve_seconds=max(each["seconds"] for each in by_rank.values()),
        ranks=_record(report, session, peers, by_rank),
    )
    return complete, tuple(each["events"] for each in by_rank.values())


def _request(fields: dict[str, Any]) -> RequestResult:
    waited = fields["waited_for"]
    return RequestResult(
        **fields | {"tokens": tuple(fields["tokens"]), "waited_for": None if waited is None else Wait(waited)}
    )


def _record(report: RunReport, session: Session, peers: Peers, by_rank: Mapping[int, RankCounts]) -> RankRecord:
    place, roles = peers.place, tuple(role.role for role in report.plan.roles)
    counts = Counter(step.numbers for step in session.rank_steps)
    # Aligned at the last step, because ranks forget their first steps in long runs.
    steps = min((len(each["agreed"]) for each in by_rank.values()), default=0)
    times = [[each["agreed"][-step] for each in by_rank.values()] for step in range(steps, 0, -1)]
    least = [min(each) for each in times]
    rows = []
    for at, (rank, each) in enumerate(by_rank.items()):
        data, tensor = divmod(rank, place.tensor_size)
        waits = [mine[at] - short for mine, short in zip(times, least, strict=True)]
        rows.append(
            RankRow(
                rank=rank,
                host=each["host"],
                data=data,
                tensor=tensor,
                **{name: each[name] for name in ROW},
                output_tokens=each["requests"]["output_tokens"],
                seconds=each["seconds"],
                waited=sum(waits),
                last=sum(wait == 0.0 for wait in waits),
            )
        )
    vectors = sorted(_vectors(counts, roles), key=lambda each: -each.steps)
    return RankRecord(
        rows=tuple(rows),
        agreements=report.counts.agreements,
        skews=tuple(max(each) - short for each, short in zip(times, least, strict=True)),
        vectors=tuple(vectors[:MOST_VECTORS]),
        vectors_dropped=max(0, len(vectors) - MOST_VECTORS),
    )


def _vectors(counts: Mapping[tuple[tuple[int, ...], ...], int], roles: Sequence[Role]) -> Iterator[VectorCount]:
    """Yield the vectors of each role, each once, although their steps may differ in other roles."""
    found: Counter[Vector] = Counter()
    for numbers, steps in counts.items():
        for vector in vectors_of(roles, numbers).values():
            if vector.joint() is not None:
                found[vector] += steps
    for vector, steps in found.items():
        yield VectorCount(
            role=vector.role,
            batches=tuple(submitted.batch for submitted in vector.ranks),
            captured=tuple(submitted.captured for submitted in vector.ranks),
            steps=steps,
        )


Workload = Callable[[int], Sequence[Request]]
"""Returns the requests, given the size of the vocabulary."""

MakeReport = Callable[[str], RunReport | None]
"""Makes a report of what has run so far, given the fault that ended it; None: nothing can be reported yet."""


@attrs.frozen(kw_only=True)
class Outcome:
    """A report, and the requests that failed verification."""

    report: RunReport
    differing: tuple[str, ...] | None = None
    """Names of the requests with a wrong token or row; None: not verified."""
    not_dumped: str = ""
    """Reason why graphs that were captured on first use could not be dumped; empty: none failed."""
    events: tuple[Events, ...] = ()
    """Events of each rank for a timeline, on the first rank."""


def launch(
    plan: Plan,
    registry: Registry,
    workload: Workload,
    asked: RunRequest,
    progress: Progress,
    *,
    decode: Decode | None = None,
    peers: Peers = ALONE,
    offer: Callable[[MakeReport], None] = lambda make: None,
) -> Outcome:
    """Execute a plan, and return its report.

    Of several ranks, each calls it with its ``peers``: those of one replica share a model, and replicas take turns with
    requests. An interruption ends in a report of what was done.

    :param decode: turns tokens into text for the report.
    :param offer: receives, before anything runs, what makes a partial report at any time, from any thread.
    :raises RunError: (or ``BackendError``) the plan cannot be executed here, on this model or for these requests. It is
        raised before anything is captured, and where plan and backends alone show it, before a model is loaded.
    """
    run = _Launch(plan, registry, asked, progress, decode, peers)
    offer(run.so_far)
    run.refuse()
    run.load(workload)
    if run.rehearse():
        run.serve()
        run.verify()
    return run.outcome()


@attrs.define(eq=False)
class _Launch:
    """One run in five stages, each of which adds the values that the next ones need."""

    plan: Plan
    registry: Registry
    asked: RunRequest
    progress: Progress
    decode: Decode | None
    peers: Peers

    device: torch.device = attrs.field(init=False)
    model: LayeredModel = attrs.field(init=False)
    drafter: Drafter | None = attrs.field(init=False)
    adapters: Adapters | None = attrs.field(init=False)
    requests: tuple[Request, ...] = attrs.field(init=False)
    """The requests of this replica."""
    grapher: Grapher = attrs.field(init=False)
    compilation: Compilation = attrs.field(init=False)
    variant: Plan = attrs.field(init=False)
    """The plan as it is captured: without graphs for an eager run."""
    pages: PageFormat = attrs.field(init=False)
    cache: CacheMemory = attrs.field(init=False)
    answers: Answers | None = None
    """Each prompt with its plain greedy answer; None: the drafter needs none."""
    session: Session = attrs.Factory(lambda: Session(most=MOST_ROWS))
    keeper: RowKeeper | None = None
    sums: dict[str, int] = attrs.Factory(dict)
    """Checksums of the weights before serving."""
    mismatched: int = 0
    warmed: WarmUp | None = None
    compiled: list[float] = attrs.Factory(list)
    stage: str = ""
    """The name of the stage in reports; empty: everything was served."""
    runner: Runner | None = None
    report: RunReport | None = None
    differing: tuple[str, ...] | None = None
    not_dumped: str = ""

    # The stages ---------------------------------------------------------------------------------

    def refuse(self) -> None:
        """Check everything that needs no model."""
        plan, registry, asked, peers = self.plan, self.registry, self.asked, self.peers
        refuse_plan(plan, any_environment=asked.any_environment, any_plan=asked.any_plan, size=peers.place.size)
        self.device = host.device_of(plan.environment)
        refuse_differences(peers, "what the ranks run", start_facts(plan, registry, asked))
        refuse_contradictions(plan, registry, asked, self.device)
        refuse_backends(plan, registry, self.device, asked.page_size)

    def load(self, workload: Workload) -> None:
        """Load model, drafter, adapters and requests, and size the KV cache for them."""
        plan, asked, place = self.plan, self.asked, self.peers.place
        among = collectives_of(self.peers, self.device, asked.all_reduce)
        self.model = model = model_of(plan, asked.model, device=self.device, seed=asked.seed, among=among)
        if asked.verify:
            refuse_infinite(model)
        requests = admit(
            workload(model.vocab_size),
            max_model_len=plan.model.max_model_len,
            vocab_size=model.vocab_size,
            clip=asked.clip,
        )
        self.adapters = adapters_of(plan, model, asked.adapters, seed=asked.seed)
        if self.adapters is not None:
            requests = with_adapters(requests, len(self.adapters.names), seed=asked.seed)
        refuse_differences(self.peers, "the requests", request_facts(requests))
        self.drafter = drafter_of(plan, model, asked.drafter, chance=asked.chance, seed=asked.seed)
        # One compilation for all runners of the run, so that nothing is compiled twice.
        self.grapher, self.compilation = grapher_for(self.device), Compilation(self.peers, among)
        self.variant = without_graphs(plan) if asked.eager else plan
        # Sized for the requests of all replicas, so that each has as many pages.
        self.pages, self.cache = self._pages(requests)
        self.requests = requests[place.data :: place.data_size]

    def rehearse(self) -> bool:
        """Serve plain greedy where the drafter copies or misses the answers; return False if it was interrupted."""
        if self.asked.drafter not in ORACLES:
            return True  # a real drafter needs no answers
        self.stage = "rehearsal"
        plain, options = without_speculation(self.plan, self.registry), Options(compile=self.asked.options.compile)
        try:
            # Without the other replicas: each rehearses its own requests, and agrees with none on steps.
            self.answers = self._plain_answers(self._runner_of(plain, self.pages, options, peers=ALONE))
        finally:
            # The device has room for one KV cache: this one is given back before the next is reserved.
            host.give_back(self.device)
        return self.answers is not None

    def serve(self) -> None:
        """Capture, warm up and serve; Ctrl-C ends it early, with a report all the same."""
        asked = self.asked
        if asked.verify:
            adapted = () if self.adapters is None else self.adapters.weights()
            self.keeper, self.sums = RowKeeper(), weight_sums([*self.model.weights(), *adapted])
        with self._runner_of(self.variant, self.pages, asked.options, self.keeper, self.session) as runner:
            self.runner, self.stage = runner, "capture"
            try:
                label = f"Capturing {'CUDA' if self.device.type == 'cuda' else 'recorded'} graphs"
                with self.progress("capture", runner.plan.num_graphs - runner.plan.num_lazy) as advance:
                    runner.capture(memory=self._graph_memory, progress=lambda done: advance(f"{label} {done}"))
                self._dump(runner)
                self.stage = "warm-up"
                self.warmed = self._warm_up(runner)
                self.stage = "serving"
                self._serve(runner)
                self.stage = ""
            # `stage` says where it was stopped, and the report below what ran until then.
            except KeyboardInterrupt:
                pass
            except Exception:
                # Reported here, where the graphs are still there; a device that has failed cannot be read.
                self.report = None
                with contextlib.suppress(RuntimeError):
                    self.report = self._report_of(runner)
                self.runner = None
                raise
            self.report, self.runner = self._report_of(runner), None
        self.stage = self.stage or ("verification" if asked.verify else "report")

    def verify(self) -> None:
        """Compare what was served with the model in a higher precision, where that was asked for.

        Sampled tokens are compared with those of an eager run, at the same padded sizes.
        """
        report = self.report
        if self.keeper is None or report is None or not any(served.tokens for served in report.served):
            return
        try:
            sampled = self._sampled_eagerly() if self.asked.options.temperature else None
            verification = self._verified(self.keeper, report.served, sampled)
        except KeyboardInterrupt:
            self.report = attrs.evolve(report, interrupted=True, stage="verification")
            return
        self.report, self.differing = attrs.evolve(report, verification=verification), verification.differing

    def outcome(self) -> Outcome:
        """Return the report with those of the other ranks, once all collectives are over."""
        self.model.among.release()
        assert self.report is not None, "a run that ends without an error has a report"
        events = events_of(self.report, self.peers.place) if self.asked.timeline else []
        report, by_rank = with_ranks(self.report, self.session, self.peers, events)
        return Outcome(report=report, differing=self.differing, not_dumped=self.not_dumped, events=by_rank)

    # Parts of the stages ------------------------------------------------------------------------

    def _pages(self, requests: Sequence[Request]) -> tuple[PageFormat, CacheMemory]:
        """Return the KV cache's pages, and the reason for their number: as asked for, or as far as memory allows."""
        asked, plan = self.asked, self.plan
        needed = cache_memory.PageRange.of(plan, self.model, requests, asked.page_size)
        if asked.pages is not None:
            return cache_memory.stated_pages(asked.pages, needed, requests)
        if self.device.type != "cuda":
            return cache_memory.host_pages(needed)
        share = cache_memory.SHARE if asked.memory_utilization is None else asked.memory_utilization
        make = functools.partial(self._runner_of, options=attrs.evolve(asked.options, compare=False, poison=False))
        return cache_memory.device_pages(
            self.variant, needed, share, make, cache_memory.Gauge(), self._graph_memory, self.peers
        )

    @property
    def _graph_memory(self) -> int | None:
        """Limit of each graph pool in bytes: as asked for, or the plan's budget."""
        return self.plan.budget.memory if self.asked.graph_memory is None else self.asked.graph_memory

    def _runner_of(
        self,
        plan: Plan,
        pages: PageFormat,
        options: Options,
        observer: ForwardObserver | None = None,
        session: Session | None = None,
        peers: Peers | None = None,
    ) -> Runner:
        """Assemble a runner of the plan or a variant."""
        return Runner(
            plan,
            self.model,
            None if plan.speculative is None else self.drafter,
            self.registry,
            self.grapher,
            pages=pages,
            device=self.device,
            options=options,
            observer=observer,
            adapters=self.adapters,
            compilation=self.compilation,
            session=session,
            peers=peers or self.peers,
        )

    def _plain_answers(self, runner: Runner) -> Answers | None:
        """Return each prompt with its answer, served eager and without a drafter; None: it was interrupted."""
        # A report of nothing: it has the requests, and is shown if the rehearsal ends the run.
        self.report = self._report_of(runner)
        # A drafter copies answers past their end too, up to the drafts of a step.
        more = self.plan.speculative.num_tokens if self.plan.speculative else 0
        longer = [each.lengthened(more, self.plan.model.max_model_len) for each in self.requests]
        prompts = {request.name: request.prompt for request in self.requests}
        try:
            with runner, self.progress("plain greedy", len(longer)) as advance:
                seconds = self.asked.step_seconds
                served = runner.serve(longer, step_seconds=seconds, progress=lambda done: advance(done.name))
        except KeyboardInterrupt:
            return None
        return {done.name: prompts[done.name] + done.tokens for done in served}

    def _warm_up(self, runner: Runner) -> WarmUp | None:
        """Run steps of the workload's shapes, where times are of use; or say why not."""
        asked = self.asked
        if not (self.device.type == "cuda" if asked.warm_up is None else asked.warm_up):
            return None
        reason = "ranks step together, and are not warmed up" if self.peers.place.size > 1 else ""
        if asked.verify or asked.options.compare:
            reason = "steps are verified or compared, and times are not quoted"
        # Said in the report, because warm-up was asked for or is usual here.
        if reason:
            return WarmUp(shapes=0, ran=0, seconds=0.0, reason=reason)
        with self.progress("warm up", 1) as advance:
            done = runner.warm_up(self.requests, step_seconds=asked.step_seconds)
            advance("warm up")
        return done

    def _serve(self, runner: Runner) -> None:
        answers = self.answers
        # A comparison that found a difference has it in the report.
        with (
            contextlib.suppress(DifferenceError),
            compiled_seconds() as self.compiled,
            self.progress("serve", len(self.requests)) as advance,
        ):

            def served(done: RequestResult) -> None:
                self.mismatched += answers is not None and not done.repeats(answers[done.name])
                advance(done.name)

            runner.serve(self.requests, answers=answers, step_seconds=self.asked.step_seconds, progress=served)
        if runner.lazy is not None:
            # Once more, with the graphs of first uses; a failure must not cost the report.
            try:
                self._dump(runner)
            except RunError as error:
                self.not_dumped = str(error)

    def _dump(self, runner: Runner) -> None:
        """Write the contents of each captured graph, where that was asked for."""
        if self.asked.dump_graphs is not None:
            graphs = ((role.role.value, *pair) for role in runner.roles.values() for pair in role.graphs.items())
            dump_graphs(graphs, self.asked.dump_graphs)

    def _sampled_eagerly(self) -> Answers:
        """Serve the requests again without graphs, and return the output of each."""
        host.give_back(self.device)  # as after a rehearsal
        # Eager, but at the padded sizes of the graphs: only a capture can then be the cause of another token.
        options = attrs.evolve(self.asked.options, replay=False, compare=False)
        with self._runner_of(self.variant, self.pages, options) as runner:
            runner.capture()
            with self.progress("sample eagerly", len(self.requests)) as advance:
                seconds = self.asked.step_seconds
                served = runner.serve(self.requests, step_seconds=seconds, progress=lambda done: advance(done.name))
        return {done.name: done.tokens for done in served}

    def _verified(self, keeper: RowKeeper, served: Sequence[RequestResult], sampled: Answers | None) -> OutputCheck:
        by_name = {request.name: request for request in self.requests}
        served = [each for each in served if each.tokens]
        incomplete = [
            each.name
            for each in served
            if not by_name[each.name].is_answered(each.tokens, is_cut_off=each.finished is None)
        ]
        with self.progress("verify", 3 + self.model.num_layers) as advance:
            return check_output(
                self.model,
                self.adapters,
                {name: request.prompt for name, request in by_name.items()},
                served,
                keeper,
                incomplete=incomplete,
                sampled=sampled,
                sums=self.sums,
                device=self.device,
                kv_dtype=kv_dtype_of(self.plan.model),
                progress=advance,
            )

    # Reports ------------------------------------------------------------------------------------

    def so_far(self, fault: str) -> RunReport | None:
        """Return what has run so far, as ended by a fault; None: nothing can be reported."""
        report = self.report if self.runner is None else self._report_of(self.runner)
        return None if report is None else attrs.evolve(report, interrupted=True, stage=self.stage, fault=fault)

    def _report_of(self, runner: Runner) -> RunReport:
        """Return what has run so far; nothing of the session changes."""
        session, roles, drafter = runner.session.copied(), runner.roles.values(), self.drafter
        weights = [tensor_of(held) for role in roles for held in role.body.weights()]
        used = {group.backend for role in self.plan.roles for group in role.groups}
        # Requests that were never admitted are in no row of the session.
        for each, waits_for in runner.unadmitted(self.requests):
            session.add_request(
                RequestResult(
                    name=each.name,
                    prompt_tokens=len(each.prompt),
                    output_tokens=0,
                    first_token=None,
                    finished=None,
                    adapter=each.adapter,
                    waited_for=waits_for,
                )
            )
        served = session.served
        facts = host.facts()
        if deviations := (*host.differences(self.plan.environment), *host.remarks(self.plan.environment)):
            facts["not as planned"] = "; ".join(deviations)
        captured = tuple(session.captured)
        try:
            captured = tuple(attrs.evolve(done, fingerprint=runner.fingerprint(done)) for done in captured)
        except CaptureError as error:
            facts["no fingerprints"] = str(error)
        facts |= runner.compilation.facts()
        if runner.policy.behind:
            facts["not ahead"] = runner.policy.behind
        if self.decode is not None:
            served = [attrs.evolve(done, text=self.decode(done.tokens)) for done in served]
        return RunReport(
            plan=self.plan,
            model=self.model.name if drafter is None else f"{self.model.name}, drafts by {drafter.name}",
            backends={name: self.registry[name].version for name in sorted(used)},
            adapters=() if self.adapters is None else self.adapters.names,
            host={**facts, **self.asked.facts, **self.model.among.facts},
            captured=captured,
            forwards=tuple(session.forwards),
            steps=tuple(session.steps),
            served=tuple(served),
            every_step=session.every_step,
            every_request=session.every_request,
            tally=session.tally,
            acceptance=self.asked.options.acceptance,
            buffers=buffer_bytes(roles),
            kv_cache=kv_cache_bytes(roles),
            workspaces=sum(group.workspace.nbytes for role in roles for group in role.groups),
            # Those that target and drafter share count once.
            weights=sum({tensor.data_ptr(): tensor.nbytes for tensor in weights}.values()),
            served_reading=self.grapher.reading(),
            lazy=runner.lazy,
            capture_seconds=session.capture_seconds,
            serve_seconds=session.serve_seconds,
            interrupted=bool(self.stage),
            stage=self.stage,
            comparison=runner.comparison.report() if runner.comparison is not None else None,
            mismatched_requests=self.mismatched,
            cache_memory=self.cache,
            warm_up=self.warmed,
            compiled=tuple(self.compiled),
            slower=self.asked.slower,
        )
