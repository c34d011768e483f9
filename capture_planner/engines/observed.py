"""An observation as a deployment: its graphs and answers in the place of an emulation's.

So every command that takes an engine's command line takes an observation too, and its answer is the truth for any
release of the engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import attrs

from capture_planner.dispatch.dispatcher import Dispatch, served
from capture_planner.engines.emulation import CapturedGraph, Emulation, Setting
from capture_planner.engines.probe import captured
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import DecodeFamily, Domain, decode_families, is_admissible
from capture_planner.records.observation import DispatchRun, DraftPass, Observation, ObservedRole

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
        notes=observation.notes,
    )


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
        tables=_tables(role.answers),
    )


_Class = tuple[int | None, bool]
"""Query length, and whether past the prompt."""


@attrs.frozen
class _Table:
    """The answers to batches of one class, of some numbers of requests and adapters: ascending ranges."""

    requests: range
    loras: range
    firsts: list[int]
    runs: list[DispatchRun]


def _tables(answers: Iterable[DispatchRun]) -> dict[_Class, list[_Table]]:
    alike: dict[tuple[object, ...], list[DispatchRun]] = {}
    for run in answers:
        bounds = (run.min_reqs, run.max_reqs, run.min_loras, run.max_loras)
        alike.setdefault((run.query_len, run.past_prompt, *bounds), []).append(run)
    tables: dict[_Class, list[_Table]] = {}
    for runs in alike.values():
        runs.sort(key=lambda run: run.first)
        one = runs[0]
        table = _Table(
            requests=range(one.min_reqs, (one.max_reqs or 1 << 62) + 1),
            loras=range(one.min_loras, one.max_loras + 1),
            firsts=[run.first for run in runs],
            runs=runs,
        )
        tables.setdefault((one.query_len, one.past_prompt), []).append(table)
    return tables


@attrs.frozen(kw_only=True)
class _ObservedManager:
    """A role of an observation as a ``Manager``: it answers as the engine's dispatcher did when it was asked."""

    role: Role
    mode: GraphMode
    graphs: tuple[CapturedGraph, ...]
    observation: Observation = attrs.field(repr=False)
    families: tuple[DecodeFamily, ...]
    tables: dict[_Class, list[_Table]] = attrs.field(repr=False, eq=False)

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the engine's answer."""
        if not is_admissible(batch, self.observation, self.families):
            return Dispatch(None, reason=Reason.NOT_ADMISSIBLE)
        run = self._run(batch)
        if run is None or run.graph is None:
            return Dispatch(None, reason=Reason.UNKNOWN if run is None else run.reason)
        return served(self.graphs[run.graph].entry, batch)

    def _run(self, batch: Batch) -> DispatchRun | None:
        """Return the range of answers that the batch is in."""
        width = batch.query_len if batch.num_reqs * (batch.query_len or 0) == batch.num_tokens else None
        if (width, batch.past_prompt) not in self.tables:
            width = None  # Longer than any decode: a graph for one query length cannot serve it.
        count = batch.num_tokens if width is None else batch.num_reqs
        for table in self.tables.get((width, batch.past_prompt), ()):
            if batch.active_loras in table.loras and (width is not None or batch.num_reqs in table.requests):
                index = bisect_right(table.firsts, count) - 1
                if index >= 0 and count <= table.runs[index].last:
                    return table.runs[index]
        return None
