"""Observations of engines that do not exist: what a plan's or an emulation's dispatcher answers, probed."""

from __future__ import annotations

from functools import cache

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines import probe
from capture_planner.engines.emulation import Emulation, Manager
from capture_planner.modes import Reason
from capture_planner.records._base import digest
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.observation import DraftPass, Observation, ObservedGraph, ObservedRole
from capture_planner.records.plan import Plan

STARTED = "2026-11-22T13:00:00Z"


def observation_of(deployment: Plan | Emulation, engine: str = "vllm") -> Observation:
    """The observation that an engine would write right after it captured a plan, or by its own flags."""
    if isinstance(deployment, Plan):
        return _observation_of_plan(deployment, engine)
    return _observation_of_emulation(deployment)


@cache
def _observation_of_plan(plan: Plan, engine: str) -> Observation:
    dispatcher = Dispatcher(plan)
    roles = []
    for role in plan.roles:
        graphs = tuple(ObservedGraph(entry=entry) for entry in role.entries)
        index = {entry: number for number, entry in enumerate(role.entries)}
        waivers = [*role.waivers]
        runs = probe.answers(
            role.role,
            plan,
            graphs,
            _asked(dispatcher, index),
            token_counts=[count for waiver in waivers for count in (waiver.first - 1, waiver.last)],
            lora_counts=[count for waiver in waivers for count in (waiver.min_loras - 1, waiver.max_loras)],
        )
        roles.append(ObservedRole(role=role.role, mode=role.mode, graphs=graphs, answers=runs))
    return Observation(
        engine=engine,
        engine_version="0.33.0",
        started=STARTED,
        plan=digest(plan),
        model=plan.model.name,
        limits=plan.limits,
        speculative=plan.speculative,
        lora=plan.lora,
        parallel=plan.parallel,
        roles=tuple(roles),
    )


def _observation_of_emulation(emulation: Emulation) -> Observation:
    roles = []
    for manager in emulation.managers:
        graphs = tuple(
            ObservedGraph(entry=graph.entry, max_query_len=graph.max_query_len, prompts_only=graph.prompts_only)
            for graph in manager.graphs
        )
        index = {graph.entry: number for number, graph in enumerate(graphs)}
        families = emulation.families(manager.role)
        runs = probe.answers(manager.role, emulation, graphs, _asked(manager, index), families=families)
        roles.append(ObservedRole(role=manager.role, mode=manager.mode, graphs=graphs, answers=runs))
    drafts = [
        DraftPass(query_len=each.query_len, draft_steps=each.draft_steps, first=first, last=last)
        for each in emulation.drafts or ()
        for first, last in each.requests.intervals
    ]
    return Observation(
        engine=emulation.engine,
        engine_version=emulation.version,
        started=STARTED,
        model="tiny",
        limits=emulation.limits,
        whole_prompts=emulation.whole_prompts,
        speculative=emulation.speculative,
        drafts=None if emulation.drafts is None else tuple(drafts),
        lora=emulation.lora,
        parallel=emulation.parallel,
        sizes=emulation.sizes,
        settings=tuple((setting.name, str(setting.value)) for setting in emulation.settings),
        decisions=emulation.decisions,
        roles=tuple(roles),
    )


def _asked(answering: Dispatcher | Manager, index: dict[Entry, int]) -> probe.Asked:
    def ask(batch: Batch) -> tuple[int | None, Reason | None]:
        answer = answering.dispatch(batch)
        return (None, answer.reason) if answer.entry is None else (index[answer.entry], None)

    return ask
