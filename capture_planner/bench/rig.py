"""What every figure is measured with: one plan, one model, and runners of the plan's variants."""

from __future__ import annotations

import gc
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Protocol

import attrs
import numpy as np
import torch

from capture_planner.bench.clock import Clock
from capture_planner.bench.record import Absent, Replayed
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import CapturePlannerError, RunError
from capture_planner.modes import Role
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner.runtime.execution.capture import without_graphs
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.ledger import Forward
from capture_planner.runtime.models.huggingface import HuggingFaceModel
from capture_planner.runtime.models.protocols import Drafter
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.workload import Request

REQUESTS = (1, 8, 64, 256)
"""Numbers of requests where nobody says which."""

PROMPT = 128
"""Tokens of the prompts that a decode is measured behind, in a model that is long enough."""


class Absence(Exception):
    """A figure that there is not for this plan or machine, with the reason; no failure."""


@attrs.frozen(kw_only=True)
class Effort:
    """How often things are repeated."""

    windows: int = 7
    """Windows that a median is of."""
    steps: int = 20
    """Steps, or replays, a window."""
    prepared: int = 256
    """Steps that the mean of a preparation is of."""
    runs: int = 2
    """Workloads served for a throughput, and captures of the whole plan."""


QUICK = Effort(windows=2, steps=3, prepared=8, runs=1)


class Progress(Protocol):
    """Shows how far a figure is."""

    def __call__(self, what: str, total: int) -> AbstractContextManager[Callable[[str], None]]:
        """Show a task of ``total`` parts; what it yields is called after each, with its name."""


@attrs.frozen(kw_only=True, eq=False)
class Rig:
    """One plan on one machine."""

    plan: Plan
    model: HuggingFaceModel
    drafter: Drafter | None
    registry: Registry
    grapher: Grapher
    device: torch.device
    pages: PageFormat
    clock: Clock
    effort: Effort
    sizes: tuple[int, ...]
    """Numbers of requests, each served by a graph."""
    absent: list[Absent] = attrs.Factory(list)
    """What was not measured so far."""

    @contextmanager
    def runner(
        self, plan: Plan, *, registry: Registry | None = None, grapher: Grapher | None = None
    ) -> Iterator[Runner]:
        """Assemble a runner of a variant of the plan; leaving gives all of its memory back."""
        self.settle()
        runner = Runner(
            plan,
            self.model,
            self.drafter,
            registry or self.registry,
            grapher or self.grapher,
            pages=self.pages,
            device=self.device,
        )
        try:
            with runner:
                yield runner
        finally:
            # Whoever still names it must not keep its KV cache: the next runner needs the memory.
            vars(runner).clear()
            self.settle()

    @contextmanager
    def trying(self, figure: str) -> Iterator[None]:
        """Measure what may not be there, or break: that goes into the record, and nothing is lost beside it."""
        try:
            yield
        except Absence as absence:
            self.absent.append(Absent(figure=figure, says=str(absence)))
        except Exception as error:
            if _was_interrupted(error):
                raise KeyboardInterrupt from error
            # Whatever it is: the time on a GPU that the other figures took is not lost with it.
            self.absent.append(Absent(figure=figure, says=_blame(error), failed=True))

    def settle(self) -> None:
        """Wait for the device, and give memory that nobody holds back to it."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    @property
    def prompt(self) -> int:
        """Tokens of a prompt before a decode that is measured."""
        return decoding_lengths(self.plan, 1, 1)[0]

    def requests(self, count: int, prompt: int, output: int, seed: int = 1) -> tuple[Request, ...]:
        """Return requests of random tokens, all there at once."""
        tokens = np.random.default_rng(seed).integers(self.model.vocab_size, size=(count, prompt))
        return tuple(
            Request(name=f"r{index}", arrival=0.0, prompt=tuple(row), max_new_tokens=output)
            for index, row in enumerate(tokens.tolist())
        )

    def decoding(self, runner: Runner, num_reqs: int, steps: int) -> Decoding:
        """Serve until so many requests decode, each with room for about ``steps`` more steps."""
        return Decoding(runner, self.requests(num_reqs, *decoding_lengths(self.plan, num_reqs, steps)))


def decoding_lengths(plan: Plan, num_reqs: int, steps: int) -> tuple[int, int]:
    """Return prompt and output tokens of requests that decode together for about so many steps."""
    k = 0 if plan.speculative is None else plan.speculative.num_tokens
    prompt = max(1, min(PROMPT, plan.model.max_model_len // 8))
    filling = -(-num_reqs * prompt // max(1, plan.limits.max_num_tokens - num_reqs * (1 + k)))
    return prompt, max(1, min(plan.model.max_model_len - prompt, (steps + filling + 8) * (1 + k)))


class Decoding:
    """A batch of requests past their prompts, stepped by hand."""

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
                    "(--pages) more room, or leave this number out of --requests"
                )

    @property
    def _settled(self) -> bool:
        steps = self._session.steps[self._first :]
        return bool(steps) and steps[-1].prompts == 0 and steps[-1].num_reqs == self._count

    def step(self, count: int) -> bool:
        """Run ``count`` steps; False where a request ended on the way, so that they are not alike."""
        return all(self.serving.step() for _ in range(count)) and not self.serving.served

    def forwards(self, steps: int) -> list[Forward]:
        """Run ``steps`` steps, or fewer where a request ends; return their forwards."""
        before = len(self._session.forwards)
        for _ in range(steps):
            if not self.step(1):
                break
        return self._session.forwards[before:]

    def replayed(self) -> tuple[Replayed, ...]:
        """Return the graphs of the last step that ended. Raises ``Absence`` where a forward was eager."""
        last = self._session.steps[-1].index
        found = []
        for forward in self._session.forwards:
            if forward.step == last:
                if forward.entry is None:
                    raise Absence(
                        f"the plan has no graph for the {forward.role.value} of {counted(self._count, 'request')}: "
                        f"{forward.reason.value if forward.reason else 'it ran eager'}"
                    )
                found.append(Replayed(role=forward.role, entry=forward.entry, times=forward.repeats))
        return tuple(found)

    def host_seconds(self, steps: int) -> float:
        """Return the host's part of a step, a median of the last ones: all but launches and waits."""
        last = self._session.steps[-1].index
        sums = dict.fromkeys(range(max(0, last - steps) + 1, last + 1), 0.0)
        for forward in self._session.forwards:
            if forward.step in sums:
                sums[forward.step] += forward.host_seconds
        return statistics.median(sums.values()) if sums else 0.0

    def end(self) -> None:
        """Leave the requests as they are."""
        self.serving.cut_off()


class Kept:
    """All that graphs of a runner change, as it is now, to be put back: they move their own fields on.

    Keys and values are left out: what is written past a request's end is written anew before it is read.
    """

    def __init__(self, runner: Runner) -> None:
        found: dict[int, torch.Tensor] = {}
        for role in runner.parts.roles.values():
            for name, holder, attribute in role.persistent():
                if name.endswith((".workspace", "]")):
                    continue
                tensor = getattr(holder, attribute)
                found[tensor.data_ptr()] = tensor
        self._kept = [(tensor, tensor.clone()) for tensor in found.values()]

    def restore(self) -> None:
        """Write it back."""
        for tensor, kept in self._kept:
            tensor.copy_(kept)


def _was_interrupted(error: BaseException | None) -> bool:
    """Say whether an error came of cleaning up after Ctrl-C: that is no figure that broke."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _blame(error: Exception) -> str:
    """Return an error in a line; with its place, where it is none of those that say what to do."""
    says = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, CapturePlannerError):
        return says
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{says} (in {last.name}, {Path(last.filename).name}:{last.lineno})"


def query_len(plan: Plan, num_reqs: int) -> int:
    """Return the target's query length where so many requests decode."""
    return 1 if plan.speculative is None else 1 + plan.speculative.draft_tokens(num_reqs)


def serving_entry(dispatcher: Dispatcher, plan: Plan, role: Role, num_reqs: int) -> Entry | None:
    """Return the graph of a role where so many requests decode."""
    query = 1 if role is Role.DRAFT_DECODE else query_len(plan, num_reqs)
    return dispatcher.dispatch(Batch.decode(role, num_reqs, query)).entry


def served_sizes(plan: Plan, stated: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the numbers of requests to measure: those stated, or ``REQUESTS`` as far as graphs serve them.

    Raises ``RunError`` where one that was stated is above the plan's limit or has no graph, and where
    there is none.
    """
    dispatcher, most = Dispatcher(plan), plan.limits.max_num_reqs
    if stated is not None and max(stated) > most:
        raise RunError(
            f"--requests names {max(stated)}, and the plan is for {counted(most, 'request')} at most; name "
            "fewer, or plan for more (limits.max_num_reqs)"
        )
    wanted = sorted({min(size, most) for size in stated or REQUESTS})
    found = tuple(n for n in wanted if serving_entry(dispatcher, plan, Role.TARGET, n) is not None)
    missing = [size for size in wanted if size not in found]
    if not found or (stated and missing):
        says = counted(missing[0], "request") if len(missing) == 1 else f"{_listed(missing)} requests"
        raise RunError(
            f"the plan has no graph that serves a decode of {says} (at most {most}); there is nothing to "
            "measure: plan decode graphs, or name other --requests"
        )
    return found


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def trimmed(plan: Plan, sizes: tuple[int, ...], roles: tuple[Role, ...] = tuple(Role)) -> Plan:
    """Return the plan with the graphs of these decodes alone, of ``roles``; all else runs eager."""
    dispatcher, eager = Dispatcher(plan), without_graphs(plan)
    kept = []
    for before, after in zip(plan.roles, eager.roles, strict=True):
        found = {serving_entry(dispatcher, plan, before.role, size) for size in sizes}
        entries = tuple(entry for entry in before.entries if entry in found and before.role in roles)
        kept.append(replace(before, entries=entries, waivers=after.waivers) if entries else after)
    return replace(plan, roles=tuple(kept))
