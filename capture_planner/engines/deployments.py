"""Deployments as emulations: a plan, or an observation of an engine, answers batches as an emulated engine does.

So every command that takes an engine's command line takes a plan and an observation too. What an observation answers is
the truth for any release of the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from capture_planner.analysis.coverage import Cell
from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher, served
from capture_planner.engines.emulation import CapturedGraph, Emulation, Setting, draft_steps_of
from capture_planner.engines.probe import Answers
from capture_planner.engines.walk import BatchAnswer, walk
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import DecodeFamily, Domain, decode_families, is_admissible, split_when
from capture_planner.records.observation import Observation, ObservedRole
from capture_planner.records.plan import Plan

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
        passes = ((each, Domain(((each.first, each.last),))) for each in observation.drafts)
        drafts = tuple(
            DecodeFamily(query_len=each.query_len, draft_steps=each.draft_steps, requests=requests)
            for each, requests in passes
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
    return ObservedCoverage(
        cells=tuple(
            sorted(
                cells.values(),
                key=lambda cell: (
                    *(order.index(cell.role), cell.kind.value, cell.query_len or 0, cell.first, cell.min_loras),
                ),
            )
        )
    )


def _place(answer: BatchAnswer) -> tuple[object, ...]:
    """Return adapters, and all else that the batches of a cell have in common."""
    batch, dispatch = answer.batch, answer.answer
    return (batch.active_loras, batch.role, batch.kind, batch.query_len, dispatch.entry, dispatch.reason)
