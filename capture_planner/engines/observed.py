"""An observation as a deployment: its graphs and answers in the place of an emulation's.

So every command that takes an engine's command line takes an observation too, and its answer is the truth for any
release of the engine.
"""

from __future__ import annotations

import attrs

from capture_planner.analysis.coverage import Cell
from capture_planner.dispatch.dispatcher import Dispatch, served
from capture_planner.engines.answers import Answers
from capture_planner.engines.emulation import CapturedGraph, Emulation, Setting
from capture_planner.engines.probe import captured
from capture_planner.engines.walk import BatchAnswer, walk
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import DecodeFamily, Domain, decode_families, is_admissible, split_when
from capture_planner.records.observation import DraftPass, Observation, ObservedRole

SOURCE = "observed"
"""The source of the settings of an observation."""


def emulation_of(observation: Observation) -> Emulation:
    """Return the observation as an emulation.

    Its dispatch gives the engine's own answer for every batch that the engine was asked about, and
    ``Reason.UNKNOWN`` for other admissible ones.
    """
    drafts = None if observation.drafts is None else tuple(map(_family, observation.drafts))
    return Emulation(
        engine=observation.engine,
        version=observation.engine_version,
        command=(),
        settings=tuple(Setting(name=name, value=value, source=SOURCE) for name, value in observation.settings),
        sizes=tuple(sorted(observation.sizes)),
        managers=tuple(_manager(role, observation, drafts) for role in observation.roles),
        decisions=observation.decisions,
        limits=observation.limits,
        whole_prompts=observation.whole_prompts,
        speculative=observation.speculative,
        drafts=drafts,
        lora=observation.lora,
        parallel=observation.parallel,
        assumptions=observation.notes,
    )


@attrs.frozen(kw_only=True)
class ObservedCoverage:
    """What serves every admissible batch, as the engine answered, in the same cells as for a plan."""

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
        decodes = drafts if batch.role is Role.DRAFT_DECODE else ()
        return next((family.draft_steps for family in decodes if batch.num_reqs in family.requests), None)

    def apart(a: BatchAnswer, b: BatchAnswer) -> bool:
        return _place(a) != _place(b) or steps(a.batch) != steps(b.batch) or b.extent != a.last + 1

    for run in split_when(apart, walk(emulation)):
        first, last = run[0], run[-1]
        batch, loras = last.batch, last.batch.active_loras
        key = (*_place(first)[1:], max(first.extent, loras), last.last)
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


def _family(each: DraftPass) -> DecodeFamily:
    requests = Domain(((each.first, each.last),))
    return DecodeFamily(query_len=each.query_len, draft_steps=each.draft_steps, requests=requests)


def _manager(role: ObservedRole, observation: Observation, drafts: tuple[DecodeFamily, ...] | None) -> _ObservedManager:
    own = drafts if role.role is Role.DRAFT_DECODE and drafts is not None else decode_families(role.role, observation)
    return _ObservedManager(
        role=role.role,
        mode=role.mode,
        graphs=tuple(captured(role.role, graph) for graph in role.graphs),
        observation=observation,
        families=own,
        answers=Answers(role.answers),
    )


@attrs.frozen(kw_only=True)
class _ObservedManager:
    """A role of an observation as a ``Manager``: it answers as the engine's dispatcher did when it was asked."""

    role: Role
    mode: GraphMode
    graphs: tuple[CapturedGraph, ...]
    observation: Observation = attrs.field(repr=False)
    families: tuple[DecodeFamily, ...]
    answers: Answers = attrs.field(repr=False, eq=False)

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the engine's answer."""
        if not is_admissible(batch, self.observation, self.families):
            return Dispatch(None, reason=Reason.NOT_ADMISSIBLE)
        run = self.answers.find(batch)
        if run is None or run.graph is None:
            return Dispatch(None, reason=Reason.UNKNOWN if run is None else run.reason)
        return served(self.graphs[run.graph].entry, batch)
