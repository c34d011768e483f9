"""The set-up of every figure: one plan, one model, and runners of the plan's variants."""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import CapturePlannerError, RunError, class_and_message
from capture_planner.modes import Role
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import query_len_of
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner import host
from capture_planner_runner.bench.record import AbsentFigure, GraphReplays
from capture_planner_runner.capture.variants import all_at_start, without_graphs
from capture_planner_runner.compilation.forwards import Compilation
from capture_planner_runner.execution.inputs import StepInputs
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.graphs.recorded import grapher_for
from capture_planner_runner.launch.request import drafter_of, model_of, page_memory, refuse_backends
from capture_planner_runner.ledger.rows import Forward
from capture_planner_runner.models.protocols import Drafter
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request

if TYPE_CHECKING:
    from capture_planner_runner.models.huggingface import HuggingFaceModel

REQUESTS = (1, 8, 64, 256)
"""Default numbers of requests."""

ROOM = 64
"""Tokens by which requests may grow while passes repeat: graphs advance their own fields."""

PROMPT = 128
"""Prompt tokens before a measured decode, if the model is long enough."""


@attrs.frozen
class Clock:
    """Times work on a device: by CUDA events on the current stream, or on a CPU by the host's clock."""

    device: torch.device

    @property
    def name(self) -> str:
        return "CUDA events" if self.device.type == "cuda" else "perf_counter"

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds from before ``work`` until the device has done all of it."""
        if self.device.type != "cuda":
            started = perf_counter()
            work()
            return perf_counter() - started
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3


class Absence(Exception):
    """A figure that does not exist for this plan or machine, with the reason; not a failure."""


@attrs.frozen(kw_only=True)
class Effort:
    windows: int = 7
    """Windows per median."""
    steps: int = 20
    """Steps, or replays, per window."""
    prepared: int = 256
    """Steps per mean of a preparation."""
    runs: int = 2
    """Workloads served per throughput, and captures of the whole plan."""


QUICK = Effort(windows=2, steps=3, prepared=8, runs=1)


@attrs.frozen(kw_only=True, eq=False)
class Rig:
    """One plan on one machine."""

    plan: Plan = attrs.field(converter=all_at_start)
    """With all graphs captured at start, since each is measured."""
    model: HuggingFaceModel
    drafter: Drafter | None
    registry: Registry
    grapher: Grapher
    device: torch.device
    pages: PageFormat
    effort: Effort
    sizes: tuple[int, ...]
    """Numbers of requests, each served by a graph."""
    options: Options = attrs.Factory(Options)
    """Of every runner."""
    absent: list[AbsentFigure] = attrs.Factory(list)
    """Figures, or parts of them, that were not measured so far."""
    compilation: Compilation = attrs.Factory(Compilation)
    """What the runners of this rig share."""
    clock: Clock = attrs.Factory(lambda self: Clock(self.device), takes_self=True)

    @classmethod
    def of(
        cls,
        plan: Plan,
        registry: Registry,
        *,
        model: Path | None,
        seed: int,
        page_size: int,
        pages: Callable[[int, float], int],
        **others: Any,
    ) -> Rig:
        """Load the model and its drafter. Backends that do not run here are refused before.

        :param page_size: tokens per page of the KV cache.
        :param pages: returns the pages, given the bytes of one and the free bytes of a GPU, or infinity.
        """
        device = host.device_of(plan.environment)
        refuse_backends(plan, registry, device, page_size)
        loaded = model_of(plan, model, device=device, seed=seed)
        # After the model is loaded: the KV cache has a share of what the weights leave.
        free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else math.inf
        return cls(
            plan=plan,
            model=loaded,
            drafter=drafter_of(plan, loaded, "random", seed=seed),
            registry=registry,
            grapher=grapher_for(device),
            device=device,
            pages=PageFormat(page_size=page_size, num_pages=1 + pages(page_memory(plan, loaded, page_size), free)),
            **others,
        )

    @contextmanager
    def runner(
        self, plan: Plan, *, registry: Registry | None = None, grapher: Grapher | None = None
    ) -> Iterator[Runner]:
        """Assemble a runner of a variant of the plan; on exit, free all of its memory."""
        self.settle()
        registry, grapher = registry or self.registry, grapher or self.grapher
        runner = Runner(
            plan,
            self.model,
            self.drafter,
            registry,
            grapher,
            pages=self.pages,
            device=self.device,
            options=self.options,
            compilation=self.compilation,
        )
        try:
            with runner:
                yield runner
        finally:
            # A remaining reference must not keep the KV cache: the next runner needs the memory.
            vars(runner).clear()
            self.settle()

    @contextmanager
    def trying(self, figure: str) -> Iterator[None]:
        """Record an absence or failure of a figure, so that the other figures are still measured."""
        try:
            yield
        except Absence as absence:
            self.absent.append(AbsentFigure(figure=figure, says=str(absence)))
        except Exception as error:
            # What cleans up after Ctrl-C may raise another error.
            if _was_interrupted(error):
                raise KeyboardInterrupt from error
            # Any error: it must not cost the GPU time that the other figures took.
            self.absent.append(AbsentFigure(figure=figure, says=_describe(error), failed=True))

    def repeated(self, runner: Runner, work: Callable[[], object]) -> float:
        """Return the seconds of ``work``, from ``effort.steps`` calls in a row on the staged values.

        Graphs advance their own fields; these are restored, so that serving can continue.
        """
        copies = [(tensor, tensor.clone()) for tensor in _changing(runner)]

        def repeat() -> None:
            for _ in range(self.effort.steps):
                work()

        with torch.no_grad():
            seconds = self.clock.time(repeat)
            for tensor, copy in copies:
                tensor.copy_(copy)
        return seconds / self.effort.steps

    def settle(self) -> None:
        """Wait for the device, and return unused memory to it."""
        host.give_back(self.device)

    @property
    def name(self) -> str:
        """The model and its drafter."""
        return self.model.name if self.drafter is None else f"{self.model.name}, drafts by {self.drafter.name}"

    @property
    def prompt(self) -> int:
        return decoding_lengths(self.plan, 1, 1)[0]

    def requests(self, count: int, prompt: int, output: int, seed: int = 1) -> tuple[Request, ...]:
        """Return requests of random tokens that all arrive at once."""
        tokens = np.random.default_rng(seed).integers(self.model.vocab_size, size=(count, prompt))
        return tuple(
            Request(name=f"r{index}", arrival=0.0, prompt=tuple(row), max_new_tokens=output)
            for index, row in enumerate(tokens.tolist())
        )

    @contextmanager
    def decoding(self, runner: Runner, num_reqs: int, steps: int) -> Iterator[Decoding]:
        """Serve until ``num_reqs`` requests decode, with room for about ``steps`` more steps."""
        requests = self.requests(num_reqs, *decoding_lengths(self.plan, num_reqs, steps))
        decoding = Decoding(runner, requests)
        try:
            yield decoding
        finally:
            # A runner serves one load at a time: this one is over before the next begins.
            decoding.serving.cut_off()


def decoding_lengths(plan: Plan, num_reqs: int, steps: int) -> tuple[int, int]:
    """Return prompt and output tokens of requests that decode together for about ``steps`` steps."""
    k = 0 if plan.speculative is None else plan.speculative.num_tokens
    prompt = max(1, min(PROMPT, plan.model.max_model_len // 8))
    # Prompts get the tokens of a step that decodes, with their drafts, leave.
    filling = -(-num_reqs * prompt // max(1, plan.limits.max_num_tokens - num_reqs * (1 + k)))
    # A step gives a request at most its drafts and one more token.
    return prompt, max(1, min(plan.model.max_model_len - prompt, (steps + filling + 8) * (1 + k)))


class Decoding:
    """A batch of requests past their prompts, stepped one by one."""

    def __init__(self, runner: Runner, requests: tuple[Request, ...]) -> None:
        self.runner, self._session, self._count = runner, runner.session, len(requests)
        self._first = len(self._session.steps)
        self.serving = runner.start(requests)
        self.serving.scheduler.arrive(0.0, perf_counter())
        while not self._settled:
            if not self.serving.step() or self.serving.served:
                raise RunError(
                    f"{counted(self._count, 'request')} of {len(requests[0].prompt)} + {requests[0].max_new_tokens} "
                    "tokens never decode together: some end before others begin; give the model or the KV cache "
                    "(--pages) more room, or remove this number from --requests"
                )

    @property
    def _settled(self) -> bool:
        steps = self._session.steps[self._first :]
        return bool(steps) and steps[-1].prompts == 0 and steps[-1].num_reqs == self._count

    def step(self, count: int) -> bool:
        """Run ``count`` steps; False if a request ended meanwhile, so that the steps differ."""
        return all(self.serving.step() for _ in range(count)) and not self.serving.served

    def forwards(self, steps: int) -> list[Forward]:
        """Run ``steps`` steps, or fewer if a request ends; return their forwards."""
        before = len(self._session.forwards)
        for _ in range(steps):
            if not self.step(1):
                break
        return self._session.forwards[before:]

    def replayed(self) -> tuple[GraphReplays, ...]:
        """Return the graphs of the last complete step. Raises ``Absence`` if one of its forwards was eager."""
        last = self._session.steps[-1].index
        graphs = []
        for forward in self._session.forwards:
            if forward.step == last:
                if forward.entry is None:
                    raise Absence(
                        f"the plan has no graph for the {forward.role.value} of {counted(self._count, 'request')}: "
                        f"{forward.reason.value if forward.reason else 'it ran eager'}"
                    )
                graphs.append(GraphReplays(role=forward.role, entry=forward.entry, times=forward.repeats))
        return tuple(graphs)

    def host_seconds(self, steps: int) -> float:
        """Return the host's median seconds in the last ``steps`` steps, without launches and waits."""
        last = self._session.steps[-1].index
        sums = dict.fromkeys(range(max(0, last - steps) + 1, last + 1), 0.0)
        for forward in self._session.forwards:
            if forward.step in sums:
                sums[forward.step] += forward.host_seconds
        return statistics.median(sums.values()) if sums else 0.0


def _changing(runner: Runner) -> list[torch.Tensor]:
    """Return everything that replays change, once: graphs advance their own fields.

    Keys and values are not among them: slots past a request's end are written before they are read.
    """
    tensors = (
        getattr(holder, attribute)
        for role in runner.roles.values()
        for name, holder, attribute in role.persistent()
        # The names of caches end with their layer in brackets.
        if not name.endswith((".workspace", "]"))
    )
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether an error came from the clean-up after Ctrl-C, which is not a failure."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _describe(error: Exception) -> str:
    """Return an error in one line, with its source location unless it is an error of ours."""
    message = class_and_message(error)[:500]
    if isinstance(error, CapturePlannerError):
        return message
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{message} (in {last.name}, {Path(last.filename).name}:{last.lineno})"


def inputs_with_context(rig: Rig, role: RoleRun, shape: Entry, context: int, room: int = 0) -> StepInputs:
    """Return the largest batch that an entry serves, each request after ``context`` tokens in the KV cache.

    Requests share pages if there are too few; nothing reads their contents. Block tables have pages for ``room`` more
    tokens.
    """
    inputs = role.warm_up_inputs(shape)
    counts = np.diff(inputs.query_start_loc).astype(np.int64)
    lengths = np.minimum(counts + context, rig.plan.model.max_model_len)
    width = min(rig.pages.pages(int(lengths.max()) + room), rig.pages.pages(rig.plan.model.max_model_len))
    # From page 1 on: page 0 is the null page.
    table = 1 + (np.arange(len(counts))[:, None] * width + np.arange(width)) % (rig.pages.num_pages - 1)
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(rows)) + np.repeat(lengths - counts - inputs.query_start_loc[:-1], counts)
    page, offset = np.divmod(positions, rig.pages.page_size)
    return attrs.evolve(
        inputs,
        positions=positions,
        seq_lens=lengths.astype(np.int32),
        block_table=table.astype(np.int32),
        slot_mapping=table[rows, page] * rig.pages.page_size + offset,
    )


def serving_entry(dispatcher: Dispatcher, plan: Plan, role: Role, num_reqs: int) -> Entry | None:
    """Return the graph of a role in a decode of ``num_reqs`` requests, or None."""
    return dispatcher.dispatch(Batch.decode(role, num_reqs, query_len_of(role, plan, num_reqs))).entry


def served_sizes(plan: Plan, stated: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the numbers of requests to measure: ``stated``, or the ``REQUESTS`` with a graph.

    Raises ``RunError`` if a stated number is above the plan's limit or has no graph, and if no number
    is left.
    """
    dispatcher, most = Dispatcher(plan), plan.limits.max_num_reqs
    if stated is not None and max(stated) > most:
        raise RunError(
            f"--requests names {max(stated)}, but the plan is for at most {counted(most, 'request')}; name "
            "fewer, or plan for more (limits.max_num_reqs)"
        )
    candidates = sorted({min(size, most) for size in stated or REQUESTS})
    sizes = tuple(n for n in candidates if serving_entry(dispatcher, plan, Role.TARGET, n) is not None)
    missing = [size for size in candidates if size not in sizes]
    if not sizes or (stated and missing):
        requests = f"{', '.join(map(str, missing))} request{'s' if missing != [1] else ''}"
        raise RunError(
            f"the plan has no graph that serves a decode of {requests} (at most {most}), so there is nothing to "
            "measure; plan decode graphs, or name other --requests"
        )
    return sizes


def trimmed(plan: Plan, sizes: tuple[int, ...], roles: tuple[Role, ...] = tuple(Role)) -> Plan:
    """Return the plan with only the graphs of these decodes in ``roles``; everything else runs eager."""
    dispatcher, eager = Dispatcher(plan), without_graphs(plan)
    trimmed_roles = []
    for before, after in zip(plan.roles, eager.roles, strict=True):
        serving = {serving_entry(dispatcher, plan, before.role, size) for size in sizes}
        entries = tuple(entry for entry in before.entries if entry in serving and before.role in roles)
        trimmed_roles.append(replace(before, entries=entries, waivers=after.waivers) if entries else after)
    return replace(plan, roles=tuple(trimmed_roles))
