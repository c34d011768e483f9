"""Launch: from a plan and a few choices to a report. All that can be refused is, before capture."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import attrs

from capture_planner.errors import CaptureError, DifferenceError, RunError
from capture_planner.plugins.registry import Registry
from capture_planner.records.plan import Plan
from capture_planner.runtime import cache_memory, host
from capture_planner.runtime.alike import request_facts, start_facts
from capture_planner.runtime.assembly import kv_dtype_of
from capture_planner.runtime.choices import ORACLES, Choices, refuse_contradictions
from capture_planner.runtime.chosen import adapters_of, drafter_of, model_of
from capture_planner.runtime.compilation.forwards import Compilation
from capture_planner.runtime.compiling import compiled_seconds
from capture_planner.runtime.execution.fields import tensor_of
from capture_planner.runtime.execution.role import ForwardObserver
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.graphs.dump import dump_graphs
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.ledger import CacheMemory, RequestResult, WarmUp
from capture_planner.runtime.models.protocols import Adapters, Drafter, LayeredModel
from capture_planner.runtime.options import Options
from capture_planner.runtime.plan_variants import without_graphs, without_speculation
from capture_planner.runtime.rank_report import with_ranks
from capture_planner.runtime.ranks.peers import ALONE, Peers
from capture_planner.runtime.ranks.start import refuse_differences
from capture_planner.runtime.ranks.symmetric import collectives_of
from capture_planner.runtime.refusals import refuse_backends, refuse_plan
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.serving import Answers
from capture_planner.runtime.serving.workload import Decode, Request, admit, with_adapters
from capture_planner.runtime.session import MOST_ROWS, RunReport, Session
from capture_planner.runtime.verification.check import Output, check_output, refuse_infinite, weight_sums
from capture_planner.runtime.verification.record import OutputCheck
from capture_planner.runtime.verification.rows import RowKeeper

Offer = Callable[[Callable[[str], RunReport | None]], None]
"""Takes what makes a report of what has run so far, from the fault that ended it; None: no report can be made."""


class Progress(Protocol):
    """Shows how far a run is."""

    def __call__(self, task: str, total: int) -> AbstractContextManager[Callable[[str], None]]:
        """Show a task of ``total`` parts; what it yields is called after each, with its name."""


@attrs.frozen(kw_only=True)
class Outcome:
    """A report, and where a verification found other tokens."""

    report: RunReport
    differing: tuple[str, ...] | None = None
    """Names of the requests with a wrong token or row; None: not verified."""
    not_dumped: str = ""
    """Why graphs that were captured on first use could not be dumped; empty: they were, or were not to be."""


def launch(
    plan: Plan,
    registry: Registry,
    workload: Callable[[int], Sequence[Request]],
    choices: Choices,
    progress: Progress,
    *,
    decode: Decode | None = None,
    peers: Peers = ALONE,
    offer: Offer = lambda make: None,
) -> Outcome:
    """Execute a plan. ``workload`` returns the requests for a vocabulary of so many tokens.

    Of several ranks, each calls it with its ``peers``: those of one replica share a model, and replicas take turns with
    requests.

    Raises ``RunError`` or ``BackendError`` where the plan cannot be executed here, on this model or for
    these requests: before anything is captured, and where plan and backends say so before a model is
    loaded. An interruption ends in a report of what was done.
    """
    refuse_plan(plan, any_environment=choices.any_environment, any_plan=choices.any_plan, size=peers.place.size)
    device = host.device_of(plan.environment)
    refuse_differences(peers, "what the ranks run", start_facts(plan, registry, choices))
    refuse_contradictions(plan, registry, choices, device)
    refuse_backends(plan, registry, device, choices.page_size)
    among = collectives_of(peers, device, choices.all_reduce)
    model = model_of(plan, choices.model, device=device, seed=choices.seed, among=among)
    if choices.verify:
        refuse_infinite(model)
    requests = admit(
        workload(model.vocab_size),
        max_model_len=plan.model.max_model_len,
        vocab_size=model.vocab_size,
        clip=choices.clip,
    )
    adapters = adapters_of(plan, model, choices.adapters, seed=choices.seed)
    if adapters is not None:
        requests = with_adapters(requests, len(adapters.names), seed=choices.seed)
    refuse_differences(peers, "the requests", request_facts(requests))
    drafter = drafter_of(plan, model, choices.drafter, chance=choices.chance, seed=choices.seed)
    variant = without_graphs(plan) if choices.eager else plan
    run = _Run(
        plan, variant, model, drafter, adapters, registry, requests, choices, progress, grapher_for(device), peers
    )
    pages, cache = run.pages()
    run = attrs.evolve(run, requests=requests[peers.place.data :: peers.place.data_size])
    answers: Answers | None = None
    if choices.drafter in ORACLES:
        answers, unserved = run.rehearsed(pages, cache, decode, offer)
        if answers is None:
            return run.with_ranks(Outcome(report=unserved), Session())
    keeper = RowKeeper() if choices.verify else None
    weights = [*model.weights(), *(() if adapters is None else adapters.weights())]
    sums = weight_sums(weights) if choices.verify else {}
    session, otherwise, warm, late = Session(most=MOST_ROWS), 0, None, list[float]()
    stage, not_dumped = "capture", ""
    with run.runner(variant, pages, choices.options, keeper, session) as runner:

        def so_far(stopped_in: str, fault: str = "") -> RunReport:
            """Return what has run so far; where it is not over, say in what it was stopped."""
            return attrs.evolve(
                run.report(runner, decode, stage=stopped_in, fault=fault),
                otherwise=otherwise,
                cache_memory=cache,
                warm_up=warm,
                compiled=tuple(late),
                slower=choices.slower,
            )

        offer(lambda fault: so_far(stage, fault))
        try:
            label = f"Capturing {'CUDA' if device.type == 'cuda' else 'recorded'} graphs"
            with progress("capture", runner.plan.num_graphs - runner.plan.num_lazy) as advance:
                runner.capture(memory=run.graph_memory, progress=lambda done: advance(f"{label} {done}"))
            run.dump(runner)
            stage = "warm-up"
            warm = run.warm_up(runner)
            stage = "serving"
            # Where a comparison found a difference, the report has it.
            with (
                contextlib.suppress(DifferenceError),
                compiled_seconds() as late,
                progress("serve", len(run.requests)) as served_one,
            ):

                def served(done: RequestResult) -> None:
                    nonlocal otherwise
                    otherwise += answers is not None and not done.repeats(answers[done.name])
                    served_one(done.name)

                runner.serve(run.requests, answers=answers, step_seconds=choices.step_seconds, progress=served)
            if runner.lazy is not None:
                not_dumped = run.dump_late(runner)
            stage = ""
        except KeyboardInterrupt:
            pass
        except Exception:
            # Made here, where the graphs are still there; a device that has failed cannot be read.
            partial_report = None
            with contextlib.suppress(RuntimeError):
                partial_report = so_far(stage)
            offer(lambda fault: partial_report and attrs.evolve(partial_report, fault=fault))
            raise
        report = so_far(stage)
    last = stage or ("report" if keeper is None else "verification")
    offer(lambda fault: attrs.evolve(report, interrupted=True, stage=last, fault=fault))
    return run.with_ranks(attrs.evolve(run.outcome(report, keeper, sums), not_dumped=not_dumped), session)


def _output(request: Request, served: RequestResult) -> Output:
    is_whole = request.is_answered(served.tokens, is_cut_off=served.finished is None)
    return Output.of(request.prompt, served, is_whole=is_whole)


@attrs.frozen
class _Run:
    """The parts of one launch."""

    plan: Plan
    variant: Plan
    """What is captured of it."""
    model: LayeredModel
    drafter: Drafter | None
    adapters: Adapters | None
    registry: Registry
    requests: tuple[Request, ...]
    choices: Choices
    progress: Progress
    grapher: Grapher
    peers: Peers
    compilation: Compilation = attrs.Factory(lambda run: Compilation(run.peers, run.model.among), takes_self=True)

    def pages(self) -> tuple[PageFormat, CacheMemory]:
        """Return the KV cache's pages, and why so many: as chosen, or as far as memory allows."""
        choices, plan = self.choices, self.plan
        needed = cache_memory.PageRange.of(plan, self.model, self.requests, choices.page_size)
        if choices.pages is not None:
            return cache_memory.stated_pages(choices.pages, needed, self.requests)
        if host.device_of(plan.environment).type != "cuda":
            return cache_memory.host_pages(needed)
        share = cache_memory.SHARE if choices.memory_utilization is None else choices.memory_utilization
        make = functools.partial(self.runner, options=attrs.evolve(choices.options, compare=False, poison=False))
        return cache_memory.device_pages(
            self.variant, needed, share, make, cache_memory.DeviceGauge(), self.graph_memory, self.peers
        )

    @property
    def graph_memory(self) -> int | None:
        """Bytes that a pool of graphs may hold: as chosen, or the plan's budget."""
        return self.plan.budget.memory if self.choices.graph_memory is None else self.choices.graph_memory

    def runner(
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
            device=host.device_of(plan.environment),
            options=options,
            observer=observer,
            adapters=self.adapters,
            compilation=self.compilation,
            session=session,
            peers=self.peers if peers is None else peers,
        )

    def dump(self, runner: Runner) -> None:
        """Write what each captured graph holds, where that was chosen."""
        if self.choices.dump_graphs is not None:
            graphs = ((role.role.value, *pair) for role in runner.parts.roles.values() for pair in role.graphs.items())
            dump_graphs(graphs, self.choices.dump_graphs)

    def dump_late(self, runner: Runner) -> str:
        """Dump once more, when all was served; return why that failed, which must not cost the report."""
        try:
            self.dump(runner)
        except RunError as error:
            return str(error)
        return ""

    def warm_up(self, runner: Runner) -> WarmUp | None:
        """Run steps of the workload's shapes, where that is of use; or say why not."""
        choices, is_gpu = self.choices, runner.device.type == "cuda"
        if not (is_gpu if choices.warm_up is None else choices.warm_up):
            return None
        reason = "ranks step together, and are not warmed up" if self.peers.place.size > 1 else ""
        if choices.verify or choices.options.compare:
            reason = "steps are verified or compared, and times are not quoted"
        if reason:
            return WarmUp(shapes=0, ran=0, seconds=0.0, reason=reason)
        with self.progress("warm up", 1) as advance:
            done = runner.warm_up(self.requests, step_seconds=choices.step_seconds)
            advance("warm up")
        return done

    def rehearsed(
        self, pages: PageFormat, cache: CacheMemory, decode: Decode | None, offer: Offer
    ) -> tuple[Answers | None, RunReport]:
        """Serve everything eager and without a drafter; return each prompt with its answer, and a report of nothing.

        None in place of the answers: it was interrupted. Answers go on for a step's drafts past their end, where a
        drafter copies them too. The device has room for one cache, so this one is given back before the next.
        """
        plain, options = without_speculation(self.plan, self.registry), Options(compile=self.choices.options.compile)
        try:
            return self._rehearse(self.runner(plain, pages, options, peers=ALONE), cache, decode, offer)
        finally:
            host.give_back(host.device_of(self.plan.environment))

    def _rehearse(
        self, runner: Runner, cache: CacheMemory, decode: Decode | None, offer: Offer
    ) -> tuple[Answers | None, RunReport]:
        unserved = attrs.evolve(self.report(runner, decode, stage="rehearsal"), cache_memory=cache)
        offer(lambda fault: attrs.evolve(unserved, fault=fault))
        more = self.plan.speculative.num_tokens if self.plan.speculative else 0
        longer = [each.lengthened(more, self.plan.model.max_model_len) for each in self.requests]
        prompts = {request.name: request.prompt for request in self.requests}
        try:
            with runner, self.progress("plain greedy", len(longer)) as advance:
                seconds = self.choices.step_seconds
                served = runner.serve(longer, step_seconds=seconds, progress=lambda done: advance(done.name))
        except KeyboardInterrupt:
            return None, unserved
        return {done.name: prompts[done.name] + done.tokens for done in served}, unserved

    def with_ranks(self, outcome: Outcome, session: Session) -> Outcome:
        """Return the outcome with the report of all ranks, whose collectives are over."""
        self.model.among.release()
        return attrs.evolve(outcome, report=with_ranks(outcome.report, session, self.peers))

    def outcome(self, report: RunReport, keeper: RowKeeper | None, sums: Mapping[str, int]) -> Outcome:
        """Verify what was served, where that was asked for and anything was."""
        if keeper is None or not any(served.tokens for served in report.served):
            return Outcome(report=report)
        try:
            verification = self.verify(report.served, keeper, sums)
        except KeyboardInterrupt:
            return Outcome(report=attrs.evolve(report, interrupted=True, stage="verification"))
        return Outcome(report=attrs.evolve(report, verification=verification), differing=verification.differing)

    def verify(self, served: Sequence[RequestResult], keeper: RowKeeper, sums: Mapping[str, int]) -> OutputCheck:
        """Hold what was served against the model in a higher precision."""
        by_name = {request.name: request for request in self.requests}
        answers = {each.name: _output(by_name[each.name], each) for each in served if each.tokens}
        model = self.plan.model
        with self.progress("verify", 3 + self.model.num_layers) as advance:
            return check_output(
                self.model,
                self.adapters,
                answers,
                keeper,
                sums=sums,
                device=host.device_of(self.plan.environment),
                kv_dtype=kv_dtype_of(model),
                progress=advance,
            )

    def report(self, runner: Runner, decode: Decode | None, *, stage: str = "", fault: str = "") -> RunReport:
        """Return what has run so far; nothing of the session changes.

        :param stage: what was under way when it was stopped; empty: it was not.
        """
        session, roles, drafter = runner.session.copied(), runner.parts.roles.values(), self.drafter
        weights = [tensor_of(held) for role in roles for held in role.body.weights()]
        used = {group.backend for role in self.plan.roles for group in role.groups}
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
        if decode is not None:
            served = [attrs.evolve(done, text=decode(done.tokens)) for done in served]
        return RunReport(
            plan=self.plan,
            model=self.model.name if drafter is None else f"{self.model.name}, drafts by {drafter.name}",
            backends={name: self.registry[name].version for name in sorted(used)},
            adapters=() if self.adapters is None else self.adapters.names,
            host=facts | {"seed": str(self.choices.seed), **self.choices.drawn, **self.model.among.facts},
            captured=captured,
            forwards=tuple(session.forwards),
            steps=tuple(session.steps),
            served=tuple(served),
            every_step=session.every_step,
            every_request=session.every_request,
            tally=session.tally,
            acceptance=self.choices.options.acceptance,
            buffers=runner.parts.buffers,
            kv_cache=runner.parts.kv_cache,
            workspaces=sum(group.workspace.nbytes for role in roles for group in role.groups),
            # Those that target and drafter share count once.
            weights=sum({tensor.data_ptr(): tensor.nbytes for tensor in weights}.values()),
            served_reading=self.grapher.reading(),
            lazy=runner.lazy,
            capture_seconds=session.capture_seconds,
            serve_seconds=session.serve_seconds,
            interrupted=bool(stage),
            stage=stage,
            fault=fault,
            comparison=runner.parts.comparison.report() if runner.parts.comparison is not None else None,
        )
