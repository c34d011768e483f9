"""The lint of observations: the findings of ``check`` about what an engine captured, with how often each mattered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from capture_planner.analysis.lint.core import BaseRule, BugClass, CheckT, Severity, register_in
from capture_planner.dispatch.dispatcher import Dispatch, served
from capture_planner.engines import INSTALL, engines
from capture_planner.engines.check import Diagnosis, check
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Engine, Fixes
from capture_planner.engines.observed import emulation_of
from capture_planner.engines.walk import BatchAnswer, GraphRows, walk
from capture_planner.errors import EngineError
from capture_planner.modes import Reason
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import DecodeFamily
from capture_planner.records.observation import BatchCount, Observation, ObservedRole
from capture_planner.records.text import counted

PLANNED = "the graphs are those of a plan: change its spec, and plan again"


@attrs.frozen(kw_only=True)
class ObservedRule(BaseRule):
    """A rule about what an engine did, not about its flags."""

    remedy: str
    check: Callable[[Observation, Emulation], Iterator[Diagnosis]]


@attrs.frozen(kw_only=True)
class ObservedFinding:
    """A rule with what it reports about an observation."""

    rule: BaseRule
    diagnosis: Diagnosis
    severity: Severity
    fix: str
    steps: int | None
    """How many steps it was about, of those whose batches are listed; None where it is not about batches."""
    total: int
    """How many steps the role ran."""

    def __str__(self) -> str:
        return f"{self.rule.code} {self.rule.name}: {self.text}"

    @property
    def text(self) -> str:
        """The message, how often it mattered, and how to fix it."""
        often = "" if self.steps is None else f"; observed: {share(self.steps, self.total)}"
        return f"{self.diagnosis.message}{often}; {self.fix}"


OBSERVED_RULES: dict[str, ObservedRule] = {}
"""The rules that only observations have, by code."""


def rule(code: str, severity: Severity, bug_class: BugClass, remedy: str, *threads: str) -> Callable[[CheckT], CheckT]:
    """Register a check of observations under a stable code."""
    facts = {"severity": severity, "bug_class": bug_class, "remedy": remedy, "threads": threads}
    return register_in(OBSERVED_RULES, ObservedRule, code, **facts)


def check_observation(observation: Observation) -> tuple[ObservedFinding, ...]:
    """Return all findings, by code: those about engines, then those that only observations have.

    Fixes are those of the installed engine of that name, if there is one, and if the engine ran without a plan.
    """
    emulation = emulation_of(observation)
    steps = {role.role: role.steps for role in observation.roles}
    findings = [
        ObservedFinding(
            rule=each.rule,
            diagnosis=each.diagnosis,
            severity=each.severity,
            fix=PLANNED if observation.plan is not None else each.fix or _no_fix(observation.engine),
            steps=None if each.diagnosis.concerns is None else _steps(observation, emulation, each.diagnosis),
            total=steps.get(each.diagnosis.role, 0),
        )
        for each in check(emulation, _engine(observation))
    ]
    for code, each_rule in sorted(OBSERVED_RULES.items()):
        findings += [
            ObservedFinding(
                rule=OBSERVED_RULES[code],
                diagnosis=diagnosis,
                severity=each_rule.severity,
                fix=each_rule.remedy,
                steps=None,
                total=steps[diagnosis.role],
            )
            for diagnosis in each_rule.check(observation, emulation)
        ]
    return tuple(findings)


def share(steps: int, total: int) -> str:
    """Write how many steps of a role something is about: ``20 of 400 steps (5.0%)``."""
    return f"{steps:,} of {counted_steps(total)} ({steps / total:.1%})" if total else "no steps yet"


def counted_steps(steps: int) -> str:
    """Write a number of steps, which may be large."""
    return "1 step" if steps == 1 else f"{steps:,} steps"


def _engine(observation: Observation) -> Engine:
    if observation.engine in engines():
        engine: Engine = engines()[observation.engine].value
        return engine

    def refuse(*_: object) -> object:
        raise EngineError(f"the engine {observation.engine} is not installed; {INSTALL}")

    return Engine(
        name=observation.engine,
        version=observation.engine_version,
        emulate=refuse,  # type: ignore[arg-type]
        export=refuse,  # type: ignore[arg-type]
        flags={},
        programs=(),
        limits=("max_num_reqs", "max_num_tokens", "num_tokens"),
        fixes=Fixes(),
    )


def _no_fix(engine: str) -> str:
    return f"no fix is known: capture-planner has no rules of {engine}'s flags, or its distribution is not installed"


def answers_of(role: ObservedRole, emulation: Emulation) -> Iterator[tuple[BatchCount, BatchAnswer]]:
    """Yield each batch of a role that ran, with the graph that it ran on as the answer."""
    graphs = next(manager.graphs for manager in emulation.managers if manager.role is role.role)
    rows, families = GraphRows(graphs), emulation.families(role.role)
    for count in role.batches:
        batch = count.batch(role.role)
        # Prompts that have the shape of a decode are none (law 5).
        batch = attrs.evolve(batch, query_len=batch.uniform_query_len)
        if count.graph is None:
            answer = Dispatch(None, reason=count.reason)
        else:
            answer = served(role.graphs[count.graph].entry, batch)
        best = rows.best(batch, _draft_steps(batch, families))
        yield count, BatchAnswer(batch=batch, answer=answer, best=best, last=batch.extent(batch.kind))


def _draft_steps(batch: Batch, families: tuple[DecodeFamily, ...]) -> int | None:
    fitting = (each for each in families if each.query_len == batch.query_len and batch.num_reqs in each.requests)
    return next((family.draft_steps for family in fitting), None)


def _steps(observation: Observation, emulation: Emulation, diagnosis: Diagnosis) -> int:
    (role,) = (each for each in observation.roles if each.role is diagnosis.role)
    concerns = diagnosis.concerns
    assert concerns is not None
    return sum(count.steps for count, answer in answers_of(role, emulation) if concerns(answer))


@rule("OB001", Severity.NOTE, BugClass.I, "leave their sizes out if the traffic is typical")
def graphs_never_replayed(observation: Observation, emulation: Emulation) -> Iterator[Diagnosis]:
    """Graphs were captured, and no step ran on them: start-up time and memory for nothing, with this traffic."""
    for role in observation.roles:
        unused = [graph for graph in role.graphs if not graph.replays]
        if not unused or not role.steps:
            continue
        cost = [
            f"{sum(values):,.{digits}f} {unit}"
            for values, digits, unit in (
                ([graph.seconds for graph in unused if graph.seconds is not None], 1, "s"),
                ([graph.mib for graph in unused if graph.mib is not None], 0, "MiB"),
            )
            if values
        ]
        message = (
            f"{role.role}: {len(unused)} of {counted(len(role.graphs), 'graph')} were not replayed in "
            f"{counted_steps(role.steps)}, such as {unused[0].entry}"
        ) + (f"; their capture took {' and '.join(cost)}" if cost else "")
        yield Diagnosis(role.role, message, len(unused))


@rule("OB002", Severity.WARNING, BugClass.C, "look for what turned it off in the engine's log at that time")
def graph_not_used(observation: Observation, emulation: Emulation) -> Iterator[Diagnosis]:
    """Steps ran eager although the engine's dispatcher has a graph for the batch.

    Something decided otherwise while the engine ran: another rank, a profile, a feature of a request.
    """
    for role in observation.roles:
        steps, example = 0, None
        for count, _ in answers_of(role, emulation):
            answer = emulation.dispatch(count.batch(role.role))
            if count.graph is None and answer.entry is not None:
                steps += count.steps
                example = example or (count, answer)
        if example is not None:
            count, answer = example
            message = (
                f"{role.role}: {share(steps, role.steps)} ran eager although the dispatcher has a graph, such as "
                f"{shape(count)}, for which it has {answer.entry} ({why(count.reason)})"
            )
            yield Diagnosis(role.role, message, steps)


@rule("OB003", Severity.NOTE, BugClass.J, "observe again with a release that the engine's plugin knows")
def batches_not_asked(observation: Observation, emulation: Emulation) -> Iterator[Diagnosis]:
    """Batches are admissible and the engine's dispatcher was not asked about them: no finding is about these."""
    walked = walk(emulation)
    for manager in emulation.managers:
        unknown = [
            each.last - each.extent + 1
            for each in walked
            if each.batch.role is manager.role and each.answer.reason is Reason.UNKNOWN
        ]
        if unknown:
            message = f"{manager.role}: the engine was not asked about {sum(unknown):,} admissible batches"
            yield Diagnosis(manager.role, message, sum(unknown))


def shape(count: BatchCount) -> str:
    """Write the shape of a batch in a few words."""
    text = counted(count.num_reqs, "request")
    text += f", {counted(count.num_tokens, 'token')}" if count.query_len is None else f" of {count.query_len}"
    text += "" if count.past_prompt else ", with prompts"
    return text + (f", {count.active_loras} active LoRA" if count.active_loras else "")


def why(reason: Reason | None) -> str:
    """Write a reason, as the engine gave it."""
    return "no reason" if reason is None else f"reason: {reason}"
