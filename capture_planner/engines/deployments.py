"""Deployments as emulations: a plan, or an observation of an engine, answers batches as an emulated engine does.

So every command that takes an engine's command line takes a plan and an observation too. What an observation answers is
the truth for any release of the engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter, itemgetter

import attrs

from capture_planner.analysis.coverage import Cell
from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher, served
from capture_planner.engines.emulation import CapturedGraph, Emulation, Setting, draft_steps_of
from capture_planner.engines.probe import Answers
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry, Kind, Rejection
from capture_planner.records.batch_space import (
    DecodeFamily,
    Domain,
    batches,
    decode_families,
    is_admissible,
    most_loras,
    split_when,
)
from capture_planner.records.observation import Observation, ObservedRole
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted, spans


@attrs.frozen(kw_only=True)
class BatchAnswer:
    """One batch, the engine's answer, and the graphs that could have served it."""

    batch: Batch
    answer: Dispatch
    graphs: GraphRows = attrs.field(eq=False, repr=False)
    """What the role captures."""
    last: int
    """The extent up to which larger batches get the same answer; its own up to the largest graph."""

    @cached_property
    def best(self) -> Entry | None:
        """The cheapest compatible graph that is captured; None where no graph is compatible."""
        return self.graphs.best(self.batch)

    @property
    def extent(self) -> int:
        """Requests of a decode, tokens of a mixed batch."""
        return self.batch.extent(self.batch.kind)

    @property
    def misses_graph(self) -> bool:
        """Whether a compatible graph is captured, and the batch runs eager, or PIECEWISE for a FULL one."""
        mode = self.answer.mode
        # Nothing is better than a full graph, which most batches have; without a compatible graph eager is right.
        if mode is GraphMode.FULL or (best := self.best) is None:
            return False
        return mode is GraphMode.NONE or best.mode is GraphMode.FULL


@attrs.frozen(kw_only=True)
class Run:
    """Consecutive batches of one role, kind, query length and adapter count."""

    batch: Batch
    """The first of them."""
    first: int
    last: int
    answers: tuple[BatchAnswer, ...]

    def sizes_between(self, unit: int) -> list[int]:
        """Return sizes that double up to the largest graph; ``unit``: the query length for sizes in tokens, else 1."""
        width = self.batch.query_len or 1
        padded = max(answer.batch.num_tokens + answer.answer.padded_tokens for answer in self.answers)
        sizes = [self.first * unit]
        while sizes[-1] * 2 * width < padded * unit:
            sizes.append(sizes[-1] * 2)
        return sizes

    def __str__(self) -> str:
        span = [(self.first, self.last)]
        if self.batch.kind is Kind.MIXED:
            text = f"mixed batches of {spans(span, 'token')}"
        else:
            text = f"decodes of {spans(span, 'request')}, query length {self.batch.query_len}"
        return text + (f", {self.batch.active_loras} active LoRA" if self.batch.active_loras else "")


def walk(emulation: Emulation) -> tuple[BatchAnswer, ...]:
    """Dispatch every admissible batch of every role; beyond the largest graph, one batch represents all larger ones."""
    answers = []
    for manager in emulation.managers:
        families = emulation.families(manager.role)
        graphs = GraphRows(manager.graphs, families)
        largest = max((graph.entry.num_tokens for graph in manager.graphs), default=0)
        # Beyond the largest graph nothing is captured, so all answers there are the same.
        for batch, last in batches(manager.role, emulation, families=families, upto=largest):
            answers.append(BatchAnswer(batch=batch, answer=manager.dispatch(batch), graphs=graphs, last=last))
    return tuple(answers)


class GraphRows:
    """A role's graphs in rows that differ in size only, so that few are compared with a batch."""

    def __init__(self, graphs: Iterable[CapturedGraph], families: Sequence[DecodeFamily]) -> None:
        rows: dict[tuple[object, ...], list[CapturedGraph]] = {}
        for graph in graphs:
            entry = graph.entry
            kind = (entry.mode, entry.query_len, entry.active_loras, entry.draft_steps, graph.max_query_len)
            rows.setdefault(kind, []).append(graph)
        by_cost = [sorted(row, key=lambda graph: graph.entry.cost) for row in rows.values()]
        # Only chains are told apart by their steps.
        self._families = families if any(row[0].entry.draft_steps is not None for row in by_cost) else ()
        self._rows = [([graph.entry.num_tokens for graph in row], row) for row in by_cost]

    def best(self, batch: Batch) -> Entry | None:
        """Return the cheapest graph that serves the batch."""
        steps, first, uniform = draft_steps_of(batch, self._families), [], (None, batch.uniform_query_len)
        for tokens, row in self._rows:
            # Nearly all batches are of another query length than most rows, and asking a graph takes longer.
            if row[0].entry.query_len not in uniform:
                continue
            for index in range(bisect_left(tokens, batch.num_tokens), len(row)):
                rejection = row[index].rejection(batch, steps)
                if rejection is None:
                    first.append(row[index].entry)
                if rejection is not Rejection.REQUESTS:
                    break  # Larger graphs of a row are rejected for the same reason.
        return min(first, key=attrgetter("cost"), default=None)


Place = tuple[str, str, int, int, int]
"""Role, kind, query length, adapters and extent of a batch."""


def runs(answers: Iterable[BatchAnswer]) -> Iterator[Run]:
    """Group consecutive batches of one role, kind, query length and adapter count."""

    def place(answer: BatchAnswer) -> Place:
        batch = answer.batch
        return (batch.role, batch.kind.value, batch.query_len or 0, batch.active_loras, answer.extent)

    def apart(before: tuple[Place, BatchAnswer], after: tuple[Place, BatchAnswer]) -> bool:
        return before[0][:-1] != after[0][:-1] or after[0][-1] > before[1].last + 1

    for run in split_when(apart, sorted(((place(each), each) for each in answers), key=itemgetter(0))):
        alike = tuple(each for _, each in run)
        yield Run(batch=alike[0].batch, first=alike[0].extent, last=alike[-1].last, answers=alike)


def why_inadmissible(batch: Batch, emulation: Emulation) -> str | None:
    """Return why the engine can never run a batch, or None; one reason: its tokens contradict its ``query_len``."""
    limits, reqs, tokens = emulation.limits, batch.num_reqs, batch.num_tokens
    loras, width = min(most_loras(batch.role, emulation), reqs), batch.query_len
    # In the order in which a person would check: the first broken rule is the most telling.
    if reqs < 1:
        return "a batch has at least one request"
    if reqs > limits.max_num_reqs:
        return f"{counted(reqs, 'request')}, and at most {limits.max_num_reqs} run together"
    if tokens < reqs:
        return f"{counted(reqs, 'request')} have at least {counted(reqs, 'token')}, not {tokens}"
    if tokens > limits.max_num_tokens and not (reqs == 1 and emulation.whole_prompts):
        return f"{counted(tokens, 'token')}, and a batch has at most {limits.max_num_tokens}"
    if width is not None and reqs * width != tokens:
        return f"{counted(reqs, 'request')} of {counted(width, 'token')} have {reqs * width}, not {tokens}"
    if batch.active_loras > loras:
        return f"{counted(batch.active_loras, 'active adapter')}, and such a batch has at most {loras}"
    if batch.role is not Role.DRAFT_DECODE:
        return None
    if batch.uniform_query_len is None:
        return "in a draft decode all requests have the same number of tokens and are past their prompt"
    if all(reqs not in family.requests for family in emulation.families(batch.role)):
        return f"no draft decode follows a batch of {counted(reqs, 'request')}"
    return None


SOURCE = "observed"
"""The source of the settings of an observation."""


@attrs.frozen(kw_only=True)
class AnsweringRole:
    """A role as a ``Manager``: its graphs, and a function that answers batches."""

    role: Role
    mode: GraphMode
    graphs: tuple[CapturedGraph, ...]
    dispatch: Callable[[Batch], Dispatch] = attrs.field(repr=False)


def emulation_of(deployment: Plan | Observation | Emulation) -> Emulation:
    """Return a deployment as an emulation; an emulation is one.

    A plan captures exactly its entries and answers by our dispatcher. An observation gives the engine's own answer for
    every batch that the engine was asked about, and ``Reason.UNKNOWN`` for other admissible ones.
    """
    # So that callers need not know which of the three they were given.
    if isinstance(deployment, Emulation):
        return deployment
    return _of_plan(deployment) if isinstance(deployment, Plan) else _of_observation(deployment)


def _of_plan(plan: Plan) -> Emulation:
    dispatch = Dispatcher(plan).dispatch
    return Emulation(
        engine="capture-planner",
        version="",
        command=(),
        settings=(),
        sizes=(),
        managers=tuple(
            AnsweringRole(
                role=role.role,
                mode=role.mode,
                graphs=tuple(CapturedGraph(role=role.role, entry=entry) for entry in role.entries),
                dispatch=dispatch,
            )
            for role in plan.roles
        ),
        decisions=(),
        limits=plan.limits,
        speculative=plan.speculative,
        lora=plan.lora,
        parallel=plan.parallel,
    )


def _of_observation(observation: Observation) -> Emulation:
    drafts = None
    if observation.drafts is not None:
        drafts = tuple(
            DecodeFamily(
                query_len=each.query_len, draft_steps=each.draft_steps, requests=Domain(((each.first, each.last),))
            )
            for each in observation.drafts
        )
    return Emulation(
        engine=observation.engine,
        version=observation.engine_version,
        command=(),
        settings=tuple(Setting(name=name, value=value, source=SOURCE) for name, value in observation.settings),
        sizes=tuple(sorted(observation.sizes)),
        managers=tuple(_answering(role, observation, drafts) for role in observation.roles),
        decisions=observation.decisions,
        limits=observation.limits,
        whole_prompts=observation.whole_prompts,
        speculative=observation.speculative,
        drafts=drafts,
        lora=observation.lora,
        parallel=observation.parallel,
        assumptions=observation.notes,
        asked=True,
    )


def _answering(role: ObservedRole, observation: Observation, drafts: tuple[DecodeFamily, ...] | None) -> AnsweringRole:
    """Return a role that answers as the engine's dispatcher did when it was asked."""
    own = drafts if role.role is Role.DRAFT_DECODE else None
    families = decode_families(role.role, observation) if own is None else own
    graphs = tuple(CapturedGraph.of(role.role, graph) for graph in role.graphs)
    answers = Answers(role.answers)

    def dispatch(batch: Batch) -> Dispatch:
        # First the limits: an answer may stand for a range that goes beyond them.
        if not is_admissible(batch, observation, families):
            return Dispatch(None, reason=Reason.NOT_ADMISSIBLE)
        run = answers.find(batch)
        # Not asked is not eager: what follows from it is for the caller.
        if run is None or run.graph is None:
            return Dispatch(None, reason=Reason.UNKNOWN if run is None else run.reason)
        return served(graphs[run.graph].entry, batch)

    return AnsweringRole(role=role.role, mode=role.mode, graphs=graphs, dispatch=dispatch)


@attrs.frozen(kw_only=True)
class ObservedCoverage:
    """The engine's answer to every admissible batch, in the same cells as for a plan."""

    cells: tuple[Cell, ...]

    @property
    def uncovered(self) -> tuple[Cell, ...]:
        """Cells without a graph: an engine has no waivers."""
        return tuple(cell for cell in self.cells if cell.entry is None)

    @property
    def covered(self) -> bool:
        """Whether every cell has a graph."""
        return not self.uncovered


def coverage_of(emulation: Emulation) -> ObservedCoverage:
    """Return the cells of every role; of mixed batches, those with the most requests."""
    cells: dict[tuple[object, ...], Cell] = {}

    drafts = emulation.families(Role.DRAFT_DECODE) if Role.DRAFT_DECODE in emulation.modes else ()

    def steps(batch: Batch) -> int | None:
        return draft_steps_of(batch, drafts) if batch.role is Role.DRAFT_DECODE else None

    def apart(a: BatchAnswer, b: BatchAnswer) -> bool:
        return _place(a) != _place(b) or steps(a.batch) != steps(b.batch) or b.extent != a.last + 1

    for run in split_when(apart, walk(emulation)):
        first, last = run[0], run[-1]
        batch, loras = last.batch, last.batch.active_loras
        key = (*_place(first)[1:], max(first.extent, loras), last.last)
        # Neighbouring counts of adapters with the same answers are one cell.
        cell = cells.get(key)
        cells[key] = Cell(
            role=batch.role,
            kind=batch.kind,
            query_len=batch.query_len,
            draft_steps=steps(batch),
            first=first.extent if cell is None else cell.first,
            last=last.last,
            min_reqs=1 if batch.kind is Kind.MIXED else first.batch.num_reqs,
            max_reqs=batch.num_reqs,
            min_loras=loras if cell is None else cell.min_loras,
            max_loras=loras,
            answer=last.answer,
        )
    order = list(emulation.modes)

    def place(cell: Cell) -> tuple[int, str, int, int, int]:
        return order.index(cell.role), cell.kind.value, cell.query_len or 0, cell.first, cell.min_loras

    return ObservedCoverage(cells=tuple(sorted(cells.values(), key=place)))


def _place(answer: BatchAnswer) -> tuple[object, ...]:
    """Return adapters, and all else that the batches of a cell have in common."""
    batch, dispatch = answer.batch, answer.answer
    return (batch.active_loras, batch.role, batch.kind, batch.query_len, dispatch.entry, dispatch.reason)
