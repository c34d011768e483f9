"""Launch: from a plan and a few choices to a report. All that can be refused is, before capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import attrs
import torch

from capture_planner.errors import CaptureError, DifferenceError, RankError, RunError
from capture_planner.plugins.registry import Registry
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner.runtime import host
from capture_planner.runtime.assembly import kv_dtype_of
from capture_planner.runtime.chosen import Drafting, adapters_of, drafter_of, model_of, page_memory
from capture_planner.runtime.compilation.forwards import Compilation
from capture_planner.runtime.execution.fields import tensor_of
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.graphs.dump import dump_graphs
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.ledger import GraphCapture, RequestResult, RunReport
from capture_planner.runtime.models.protocols import Adapters, Drafter, LayeredModel, TargetModel
from capture_planner.runtime.options import Options
from capture_planner.runtime.plan_variants import without_graphs, without_speculation
from capture_planner.runtime.ranks.peers import ALONE, Peers
from capture_planner.runtime.ranks.symmetric import AllReduce, collectives_of
from capture_planner.runtime.refusals import refuse_backends, refuse_plan
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.workload import Decode, Request, admit, with_adapters
from capture_planner.runtime.verification.check import Output, check_output, weight_sums
from capture_planner.runtime.verification.record import OutputCheck
from capture_planner.runtime.verification.rows import RowKeeper

CACHE_MEMORY = 1 << 30
"""Most bytes of the KV cache where its number of pages is not given."""


class Progress(Protocol):
    """Shows how far a run is."""

    def __call__(self, task: str, total: int) -> AbstractContextManager[Callable[[str], None]]:
        """Show a task of ``total`` parts; what it yields is called after each, with its name."""


@attrs.frozen(kw_only=True)
class Choices:
    """What a person chooses about a run; the plan says everything else."""

    model: Path | None = None
    """Folder or configuration; None: a Llama of the plan's numbers with random weights."""
    drafter: Drafting = "random"
    chance: float = 0.5
    """How often the drafter ``chance`` is right."""
    adapters: int | tuple[Path, ...] = ()
    """LoRA adapters that requests have by turns: so many of random weights, or folders that peft saved; none."""
    seed: int = 0
    page_size: int = 16
    pages: int | None = None
    """Pages of the KV cache; None: for ``max_num_reqs`` requests of full length, within ``CACHE_MEMORY``."""
    graph_memory: int | None = None
    """Bytes that a pool of graphs may hold; None: the plan's budget, if it has one."""
    step_seconds: float = 0.01
    """How far the clock of arrivals moves in a step."""
    clip: bool = False
    """Cut requests that are longer than the model, instead of refusing them."""
    eager: bool = False
    """Capture nothing."""
    dump_graphs: Path | None = None
    """Folder to write what each captured graph holds into."""
    verify: bool = False
    """Hold what was served against the same model in a higher precision, see ``runtime.verification``."""
    any_environment: bool = False
    """Run although this machine is not the one that was planned for."""
    any_plan: bool = False
    """Run although the lint finds errors in the plan."""
    all_reduce: AllReduce = "auto"
    """How ranks that share a model add their parts, on GPUs."""
    options: Options = attrs.Factory(Options)


@attrs.frozen(kw_only=True)
class Outcome:
    """A report, and where a verification found other tokens."""

    report: RunReport
    differing: tuple[str, ...] | None = None
    """Names of the requests with a wrong token or row; None: not verified."""


def launch(
    plan: Plan,
    registry: Registry,
    workload: Callable[[int], Sequence[Request]],
    choices: Choices,
    progress: Progress,
    *,
    decode: Decode | None = None,
    peers: Peers = ALONE,
    offer: Callable[[Callable[[str], RunReport]], None] = lambda make: None,
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
    refuse_backends(plan, registry, device, choices.page_size)
    among = collectives_of(peers, device, choices.all_reduce)
    model = model_of(plan, choices.model, device=device, seed=choices.seed, among=among)
    if choices.verify:
        _refuse_infinite(model)
    requests = admit(
        workload(model.vocab_size),
        max_model_len=plan.model.max_model_len,
        vocab_size=model.vocab_size,
        clip=choices.clip,
    )
    adapters = adapters_of(plan, model, choices.adapters, seed=choices.seed)
    if adapters is not None:
        requests = with_adapters(requests, len(adapters.names), seed=choices.seed)
    run = _Run(plan, model, adapters, registry, requests, choices, progress, grapher_for(device))
    pages = run.pages()
    run = attrs.evolve(run, requests=requests[peers.place.data :: peers.place.data_size])
    drafter = drafter_of(plan, model, choices.drafter, chance=choices.chance, seed=choices.seed)
    answers: dict[str, tuple[int, ...]] | None = None
    interrupted = False
    keeper = RowKeeper() if choices.verify else None
    weights = [*model.weights(), *(() if adapters is None else adapters.weights())]
    sums = weight_sums(weights) if choices.verify else {}
    variant = without_graphs(plan) if choices.eager else plan
    with Runner(
        variant,
        model,
        drafter,
        registry,
        run.grapher,
        pages=pages,
        device=device,
        options=choices.options,
        observer=keeper,
        adapters=adapters,
        peers=peers,
    ) as runner:
        offer(lambda fault: run.report(runner, drafter, decode, interrupted=True, fault=fault))
        try:
            if choices.drafter in ("copy", "miss", "chance"):
                answers = run.rehearse(pages, runner.compilation)
            with progress("capture", runner.plan.num_graphs) as advance:
                runner.capture(
                    memory=plan.budget.memory if choices.graph_memory is None else choices.graph_memory,
                    progress=lambda done: advance(_captured(done, device)),
                )
            if choices.dump_graphs is not None:
                roles = runner.parts.roles.values()
                dump_graphs(
                    ((role.role.value, *pair) for role in roles for pair in role.graphs.items()), choices.dump_graphs
                )
            # Where a comparison found a difference, the report has it.
            with contextlib.suppress(DifferenceError), progress("serve", len(run.requests)) as served_one:
                runner.serve(
                    run.requests,
                    answers=answers,
                    step_seconds=choices.step_seconds,
                    progress=lambda done: served_one(done.name),
                )
        except KeyboardInterrupt:
            interrupted = True
        except RankError as error:
            # Made here, where the graphs are still there.
            partial_report = run.report(runner, drafter, decode, interrupted=True, fault=str(error))
            offer(lambda fault: partial_report)
            raise
        report = run.report(runner, drafter, decode, interrupted=interrupted)
    outcome = run.outcome(report, keeper, sums)
    among.release()
    return outcome


def _captured(done: GraphCapture, device: torch.device) -> str:
    """Describe the graph that was captured last, by its mode and its role."""
    kind = "CUDA" if device.type == "cuda" else "recorded"
    return f"Capturing {kind} graphs ({done.entry.mode.value}, {done.role.value}): {done.entry.num_tokens} tokens"


def _refuse_infinite(model: TargetModel) -> None:
    """Raise ``RunError`` for weights that make every comparison of tokens meaningless: NaN has no likeliest token."""
    for name, module, attribute in model.weights():
        weight = getattr(module, attribute)
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise RunError(f"{model.name}: {name} has NaN or infinity, so tokens cannot be verified; check the weights")


def _fingerprint(runner: Runner, done: GraphCapture) -> Fingerprint | None:
    graph = runner.parts.roles[done.role].graphs.get(done.entry)
    return None if graph is None else graph.fingerprint()


def _answer(request: Request, served: RequestResult) -> Output:
    tokens, is_cut_off = served.tokens, served.finished is None
    is_ended = len(tokens) == request.max_new_tokens or tokens[-1] in request.stop
    is_whole = request.cut(tokens) == tokens and (is_cut_off or is_ended)
    return Output(
        prompt=request.prompt, tokens=tokens, adapter=request.adapter, is_cut_off=is_cut_off, is_whole=is_whole
    )


@attrs.frozen
class _Run:
    """The parts of one launch."""

    plan: Plan
    model: LayeredModel
    adapters: Adapters | None
    registry: Registry
    requests: tuple[Request, ...]
    choices: Choices
    progress: Progress
    grapher: Grapher

    def pages(self) -> PageFormat:
        """Return the KV cache's pages: as chosen, or for every request at full length if that fits."""
        plan, size = self.plan, self.choices.page_size
        lookahead = plan.speculative.num_tokens + plan.speculative.extra_slots if plan.speculative else 0
        longest = max(self.requests, key=lambda request: request.length)
        needed = -(-min(longest.length + lookahead, plan.model.max_model_len) // size)
        if self.choices.pages is not None:
            if needed > self.choices.pages:
                raise RunError(
                    f"the request {longest.name} needs {counted(needed, 'page')} of {counted(size, 'token')}, "
                    f"and the KV cache has {self.choices.pages}; give it more (--pages)"
                )
            return PageFormat(page_size=size, num_pages=self.choices.pages + 1)
        fitting = CACHE_MEMORY // page_memory(plan, self.model, size)
        most = plan.limits.max_num_reqs * -(-plan.model.max_model_len // size)
        return PageFormat(page_size=size, num_pages=1 + max(needed, min(most, fitting)))

    def rehearse(self, pages: PageFormat, compilation: Compilation) -> dict[str, tuple[int, ...]]:
        """Serve everything eager and without a drafter; return each prompt with its answer.

        Answers go on for a step's drafts past their end: a drafter that copies them is right there too.
        """
        more = self.plan.speculative.num_tokens if self.plan.speculative else 0
        longest = self.plan.model.max_model_len
        longer = []
        for each in self.requests:
            most = min(each.max_new_tokens + more, longest - len(each.prompt))
            longer.append(attrs.evolve(each, max_new_tokens=most, stop=frozenset()))
        alone, device = without_speculation(self.plan, self.registry), host.device_of(self.plan.environment)
        plain = Runner(
            alone,
            self.model,
            None,
            self.registry,
            self.grapher,
            pages=pages,
            device=device,
            options=Options(compile=self.choices.options.compile),
            adapters=self.adapters,
            compilation=compilation,
        )
        prompts = {request.name: request.prompt for request in self.requests}
        with plain, self.progress("plain greedy", len(self.requests)) as advance:
            served = plain.serve(
                longer, step_seconds=self.choices.step_seconds, progress=lambda done: advance(done.name)
            )
        return {done.name: prompts[done.name] + done.tokens for done in served}

    def outcome(self, report: RunReport, keeper: RowKeeper | None, sums: Mapping[str, int]) -> Outcome:
        """Verify what was served, where that was asked for and anything was."""
        if keeper is None or not any(served.tokens for served in report.served):
            return Outcome(report=report)
        try:
            verification = self.verify(report.served, keeper, sums)
        except KeyboardInterrupt:
            return Outcome(report=attrs.evolve(report, interrupted=True))
        return Outcome(report=attrs.evolve(report, verification=verification), differing=verification.differing)

    def verify(self, served: Sequence[RequestResult], keeper: RowKeeper, sums: Mapping[str, int]) -> OutputCheck:
        """Hold what was served against the model in a higher precision."""
        by_name = {request.name: request for request in self.requests}
        answers = {each.name: _answer(by_name[each.name], each) for each in served if each.tokens}
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

    def report(
        self, runner: Runner, drafter: Drafter | None, decode: Decode | None, *, interrupted: bool, fault: str = ""
    ) -> RunReport:
        session, roles = runner.session, runner.parts.roles.values()
        weights = [tensor_of(held) for role in roles for held in role.body.weights()]
        used = {group.backend for role in self.plan.roles for group in role.groups}
        entered = {done.name for done in session.served}
        served = session.served + [
            RequestResult(
                name=each.name,
                prompt_tokens=len(each.prompt),
                output_tokens=0,
                first_token=None,
                finished=None,
                adapter=each.adapter,
            )
            for each in self.requests
            if each.name not in entered
        ]
        facts = host.facts()
        if deviations := (*host.differences(self.plan.environment), *host.remarks(self.plan.environment)):
            facts["not as planned"] = "; ".join(deviations)
        captured = tuple(session.captured)
        try:
            captured = tuple(attrs.evolve(done, fingerprint=_fingerprint(runner, done)) for done in captured)
        except CaptureError as error:
            facts["no fingerprints"] = str(error)
        facts |= runner.compilation.facts()
        if decode is not None:
            served = [attrs.evolve(done, text=decode(done.tokens)) for done in served]
        return RunReport(
            plan=self.plan,
            model=self.model.name if drafter is None else f"{self.model.name}, drafts by {drafter.name}",
            backends={name: self.registry[name].version for name in sorted(used)},
            adapters=() if self.adapters is None else self.adapters.names,
            host=facts | {"seed": str(self.choices.seed), **self.model.among.facts},
            captured=captured,
            forwards=tuple(session.forwards),
            steps=tuple(session.steps),
            served=tuple(served),
            buffers=runner.parts.buffers,
            kv_cache=runner.parts.kv_cache,
            workspaces=sum(group.workspace.nbytes for role in roles for group in role.groups),
            # Those that target and drafter share count once.
            weights=sum({tensor.data_ptr(): tensor.nbytes for tensor in weights}.values()),
            served_reading=self.grapher.reading(),
            capture_seconds=session.capture_seconds,
            serve_seconds=session.serve_seconds,
            interrupted=interrupted,
            fault=fault,
            comparison=runner.parts.comparison.report() if runner.parts.comparison is not None else None,
        )
