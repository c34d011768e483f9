"""The lint of engines: which flags leave batches slow or graphs unused, how to fix it, and how often it mattered.

The rules of ``capture_planner.analysis.lint`` are about plans. These are about an engine by its own flags, or as it was
observed: each is decided over the whole admissible space, through the engine's own dispatcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any

import attrs

from capture_planner.analysis.lint.core import BaseRule, BugClass, CheckT, Severity, register_in
from capture_planner.dispatch.dispatcher import Dispatch, served
from capture_planner.engines import engines, find_engine
from capture_planner.engines.checkpoints import ASSUMED, FAMILY, KNOWN
from capture_planner.engines.deployments import BatchAnswer, GraphRows, Run, emulation_of, runs, walk
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Engine, FlagChange
from capture_planner.engines.verdict import change_text
from capture_planner.errors import InvalidValue
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import grouped
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import most_tokens
from capture_planner.records.environment import Environment
from capture_planner.records.observation import BatchCount, Observation, ObservedRole
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class CheckInput:
    """The input of a rule: an engine, one emulation of it, and its answers to every admissible batch."""

    engine: Engine
    emulation: Emulation
    answers: tuple[BatchAnswer, ...]
    unknown: frozenset[Role] = frozenset()
    """Roles of an observation with batches that the engine was not asked about; ``answers`` lacks those."""
    _found: dict[str, tuple[Diagnosis, ...]] = attrs.field(factory=dict, init=False, eq=False, repr=False)

    def diagnoses(self, rule: EngineRule) -> tuple[Diagnosis, ...]:
        """Return what a rule finds; it looks once, and the fixes of several findings look at the same input."""
        if rule.code not in self._found:
            self._found[rule.code] = tuple(rule.check(self))
        return self._found[rule.code]

    @cached_property
    def _of_role(self) -> dict[Role, list[BatchAnswer]]:
        return grouped(self.answers, lambda answer: answer.batch.role)

    def by_role(self, condition: Callable[[BatchAnswer], bool]) -> Iterator[tuple[Role, list[Run]]]:
        """Yield each role that has batches under a condition, with the runs of them."""
        for manager in self.emulation.managers:
            if selected := list(runs(filter(condition, self._of_role.get(manager.role, ())))):
                yield manager.role, selected


@attrs.frozen
class Diagnosis:
    """The report of a rule about one place."""

    role: Role
    message: str
    count: int = 1
    """Number of batches, graphs or sizes concerned."""
    severity: Severity | None = None
    """The severity, if below the rule's."""
    about: Any = attrs.field(default="", eq=False, repr=False)
    """The subject of the engine's advice, as in ``Fixes.advice``; a text: the fix itself, or "" for the general one."""
    concerns: Callable[[BatchAnswer], bool] | None = attrs.field(default=None, eq=False, repr=False)
    """Whether it is about a batch of its role; None where it is about no batches."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """The batches that it is about."""
        return () if self.concerns is None else tuple(self.about)


@attrs.frozen(kw_only=True)
class EngineRule(BaseRule):
    """A rule about what engines do with their flags; with a remedy, about what one was observed to do."""

    planned: str = ""
    """The remedy where the engine ran under a plan; empty: the same."""
    check: Callable[..., Iterator[Diagnosis]]


@attrs.frozen(kw_only=True)
class EngineFinding:
    """A rule with its diagnosis, and the flag that fixes it."""

    rule: EngineRule
    diagnosis: Diagnosis
    fix: str
    steps: int | None = None
    """Number of observed steps concerned, of those whose batches are listed; None where it is not about batches."""
    total: int | None = None
    """Number of observed steps of the role; None: nothing was observed."""
    is_reached: bool = True
    """False: a load was given, and has none of its batches."""

    @property
    def severity(self) -> Severity:
        """The rule's, or less where no flag is to blame."""
        return self.diagnosis.severity or self.rule.severity

    @property
    def text(self) -> str:
        """The message, how often it mattered, and how to fix it."""
        often = "" if self.steps is None else f"; observed: {share(self.steps, self.total or 0)}"
        return f"{self.diagnosis.message}{often}; {self.fix}"

    def __str__(self) -> str:
        threads = "" if self.total is not None else f" ({', '.join(self.rule.threads)})"
        return f"{self.rule.code} {self.rule.name}: {self.text}{threads}"


ENGINE_RULES: dict[str, EngineRule] = {}
"""The rules about flags by code."""

OBSERVED_RULES: dict[str, EngineRule] = {}
"""The rules that only observations have, by code."""


def rule(
    code: str, severity: Severity, bug_class: BugClass, *threads: str, **remedies: str
) -> Callable[[CheckT], CheckT]:
    """Register a check under a stable code: of a ``CheckInput``, or with a ``remedy`` of observation and emulation."""
    rules = OBSERVED_RULES if remedies else ENGINE_RULES
    return register_in(rules, EngineRule, code, severity=severity, bug_class=bug_class, threads=threads, **remedies)


BY_FLAGS = frozenset({"EN001", "EN004", "EN005", "EN007"})
"""The rules whose findings hold for any model, where flags alone decide the answer: those about what has no graph."""

CHOSEN = frozenset({"EN006"})
"""Rules about sizes that an engine's list has by a formula, and a plan by what they cost: notes under a plan."""

NOTHING = "nothing to do"
"""Beginning of the fix of a finding that no flag removes; such a finding is a note."""


@attrs.frozen
class ChangeTrials:
    """Emulations of an engine's command line and of changes of it, on one machine.

    Each is made and walked once: the fixes of several findings are the same changes, and that takes most of a check.
    """

    engine: Engine
    environment: Environment
    _made: dict[tuple[tuple[str, ...], FlagChange | None], CheckInput] = attrs.field(
        factory=dict, init=False, eq=False, repr=False
    )

    def unchanged(self, emulation: Emulation) -> CheckInput:
        """Return the input of rules for a command line as it is."""
        key = tuple(emulation.command), None
        if key not in self._made:
            self._made[key] = _subject(emulation, self.engine)
        return self._made[key]

    def after(self, before: Emulation, change: FlagChange) -> CheckInput:
        """Return the input of rules for a changed command line; raises ``FlagError`` where the engine refuses it."""
        key = tuple(before.command), change
        if key not in self._made:
            after = self.engine.fixes.after(self.engine.emulate, before.command, change, self.environment)
            self._made[key] = _subject(after, self.engine)
        return self._made[key]


def check(
    emulation: Emulation, engine: Engine | None = None, trials: ChangeTrials | None = None
) -> tuple[EngineFinding, ...]:
    """Return all findings, by code; ``engine`` is the installed one of the emulation's name by default.

    With ``trials`` each fix is emulated before it is advised, and has its price.
    """
    engine = engine or find_engine(emulation.engine)
    subject = _subject(emulation, engine) if trials is None else trials.unchanged(emulation)
    return tuple(
        _finding(subject, each, diagnosis, trials)
        for code, each in sorted(ENGINE_RULES.items())
        if code in BY_FLAGS or not emulation.by_flags
        for diagnosis in subject.diagnoses(each)
    )


@attrs.frozen(kw_only=True)
class Together:
    """One command line with the fixes of several findings, proved together."""

    command: tuple[str, ...]
    """The flags, without the program."""
    changes: tuple[FlagChange, ...]
    price: str
    left: tuple[str, ...]
    """Codes of the findings that stay."""


def fixed_together(emulation: Emulation, findings: Sequence[EngineFinding], trials: ChangeTrials) -> Together | None:
    """Return changes that remove the findings of several fixes, each of which adds none; None if one is enough.

    The fixes of ``check`` are proved one by one, and two of them may contradict each other. Here each is chosen for
    the command line that has those before it. None gives something up. Findings that are not given stay, and so does
    one whose fix would bring back another: sizes for decodes of 1 + K tokens that the drafter's decodes do not fit.
    """
    fixes = {(each.rule.code, each.diagnosis.role): each.fix for each in findings if each.fix.startswith("give ")}
    if len(set(fixes.values())) < 2:
        return None
    asked = {(each.rule.code, each.diagnosis.role) for each in findings}
    current, found, changes = emulation, _diagnoses(trials.unchanged(emulation)), []
    while (step := _step(current, found, asked, trials)) is not None:
        current, found, change = step
        changes.append(change)
    if len({fix for key, fix in fixes.items() if key not in found}) < 2:
        return None
    left = tuple(dict.fromkeys(code for code, _ in found))
    price = change_text(emulation, current)
    return Together(command=tuple(current.command), changes=tuple(changes), price=price, left=left)


Diagnoses = dict[tuple[str, Role], Diagnosis]


def _diagnoses(subject: CheckInput) -> Diagnoses:
    """Return what the rules find, by code and role."""
    return {(code, each.role): each for code, rule in sorted(ENGINE_RULES.items()) for each in subject.diagnoses(rule)}


def _step(
    current: Emulation, found: Diagnoses, asked: Collection[tuple[str, Role]], trials: ChangeTrials
) -> tuple[Emulation, Diagnoses, FlagChange] | None:
    """Return the first change that removes one of the findings asked for and adds none, with what it makes of both."""
    for (code, role), diagnosis in found.items():
        if (code, role) not in asked:
            continue
        for change in islice(trials.engine.fixes.changes(code, current, role, diagnosis.runs), MOST_TRIED):
            if change.instead:
                continue
            try:
                after = trials.after(current, change)
            except InvalidValue:
                continue
            left = _diagnoses(after)
            if left.keys() < found.keys():
                return after.emulation, left, change
    return None


MOST_TRIED = 6
"""Changes that are emulated for one finding."""


def _remedy(before: Emulation, changes: Iterable[FlagChange], removed: Callable[[FlagChange], Emulation | None]) -> str:
    """Return the first change that removes a finding, and the first that gives something up for it, with prices; or "".

    :param removed: emulates the command line with a change, and returns None where the finding is still there; may
        raise ``FlagError``.
    """
    found: dict[bool, str] = {}
    for each in list(changes)[:MOST_TRIED]:
        # The first of its kind is the one that the engine's fixes prefer.
        if each.instead in found:
            continue
        # What the engine refuses is no advice.
        with suppress(InvalidValue):
            if (after := removed(each)) is not None:
                found[each.instead] = f"{each} ({change_text(before, after)})"
    return "; or ".join(found[instead] for instead in (False, True) if instead in found)


def _finding(subject: CheckInput, rule: EngineRule, diagnosis: Diagnosis, trials: ChangeTrials | None) -> EngineFinding:
    """Return a finding with its fix."""
    engine, before = subject.engine, subject.emulation
    # Advice in words, which holds unless a change of the flags is proved to help.
    about = diagnosis.about
    advice = about if isinstance(about, str) else engine.fixes.advice(rule.code, before, diagnosis.role, about)
    fix = advice or engine.fixes.general.get(rule.code, "")
    changes = [] if trials is None else [*engine.fixes.changes(rule.code, before, diagnosis.role, diagnosis.runs)]
    if trials is not None and changes:

        def removed(change: FlagChange) -> Emulation | None:
            after = trials.after(before, change)
            left = any(each.role is diagnosis.role for each in after.diagnoses(rule))
            return None if left else after.emulation

        # Changes were tried and none helped: general advice would be wrong.
        why = fix if fix.startswith(NOTHING) else f"{NOTHING}: no flag removes it and keeps the graphs"
        fix = _remedy(before, changes, removed) or why
    # What cannot be fixed should not fail a build.
    severity = Severity.NOTE if fix.startswith(NOTHING) else diagnosis.severity
    return EngineFinding(rule=rule, diagnosis=attrs.evolve(diagnosis, severity=severity), fix=fix)


def _subject(emulation: Emulation, engine: Engine) -> CheckInput:
    walked = walk(emulation)
    # An observation is not asked about everything; rules judge what is known.
    unknown = {each.batch.role for each in walked if each.answer.reason is Reason.UNKNOWN}
    answers = tuple(each for each in walked if each.answer.reason is not Reason.UNKNOWN)
    return CheckInput(engine=engine, emulation=emulation, answers=answers, unknown=frozenset(unknown))


def _is_asked(subject: CheckInput, flag: str) -> bool:
    """Return whether the command line gives a setting; True where that is not known, as for an observation."""
    name = flag.lstrip("-").replace("-", "_")
    sources = [each.source for each in subject.emulation.settings if each.name == name]
    rules = {"default", *(each.rule for each in subject.emulation.decisions)}
    return not sources or sources[0] not in rules


def _in_words(selected: Sequence[Run], most: int = 3) -> str:
    left = len(selected) - most
    return "; ".join(map(str, selected[:most])) + (f"; and {left} more such ranges" if left > 0 else "")


def _some(sizes: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, sizes[:most])) + (", ..." if len(sizes) > most else "")


def _count(selected: Iterable[Run]) -> int:
    return sum(run.last - run.first + 1 for run in selected)


@rule("EN001", Severity.WARNING, BugClass.A, "vllm#54933", "sglang#33483")
def decodes_without_graph(subject: CheckInput) -> Iterator[Diagnosis]:
    """Decodes should run from graphs, and the largest ones have none.

    At full load, when it matters most, every step then runs piecewise or eager.
    """
    wanted = {role: mode.decode_mode for role, mode in subject.emulation.modes.items()}
    # A role in which no decode has a graph was configured to have none.
    decodes = (answer for answer in subject.answers if answer.batch.kind is Kind.DECODE)
    graphed = {a.batch.role for a in decodes if a.answer.entry is not None or a.best is not None}

    def lacking(answer: BatchAnswer) -> bool:
        mode, ran = wanted[answer.batch.role], answer.answer.mode
        # Without a mode nothing was wanted; mixed batches have rules of their own.
        if answer.batch.kind is Kind.MIXED or mode is GraphMode.NONE or ran is GraphMode.FULL:
            return False
        # Piecewise is what was asked for here: only decodes without any graph lack one.
        if mode is GraphMode.PIECEWISE:
            return ran is GraphMode.NONE and answer.best is None and answer.batch.role in graphed
        return answer.best is None or answer.best.mode is not GraphMode.FULL

    for role, selected in subject.by_role(lacking):
        eager = _count(runs(a for run in selected for a in run.answers if a.answer.entry is None))
        how = "eager" if eager == _count(selected) else "PIECEWISE" if not eager else "PIECEWISE or eager"
        full = "full graph" if wanted[role] is GraphMode.FULL else "graph"
        message = f"{role}: {_in_words(selected)} have no {full} and run {how}"
        # By default engines admit more requests than they have graphs for, so an operator did not ask for these.
        by_default = not subject.emulation.asked_sizes and not _is_asked(subject, subject.engine.limits[0])
        severity = Severity.NOTE if by_default and all(run.batch.query_len == 1 for run in selected) else None
        yield Diagnosis(role, message, _count(selected), severity, selected, lacking)


@rule("EN002", Severity.WARNING, BugClass.C, "vllm#56136", "vllm#53407")
def compatible_graph_missed(subject: CheckInput) -> Iterator[Diagnosis]:
    """A full graph that fits the batch is captured, and the engine's dispatcher does not find it.

    vLLM looks at the smallest captured size alone: where that belongs to another query length, the batch
    runs piecewise or eager although a graph of its own is captured.
    """

    def missing(answer: BatchAnswer) -> bool:
        return answer.misses_graph and answer.answer.reason is not Reason.SPLIT

    for role, selected in subject.by_role(missing):
        first, count = selected[0].answers[0], _count(selected)
        # An engine that prefers eager to wide padding does as it means to.
        deliberate = subject.engine.skips_wide_padding and all(r.batch.kind is Kind.MIXED for r in selected)
        ran = "eager" if first.answer.mode is GraphMode.NONE else first.answer.mode.value
        miss = "1 batch misses" if count == 1 else f"{count} batches miss"
        message = (
            f"{role}: {miss} a graph that is captured: {_in_words(selected)}; one of "
            f"{counted(first.batch.num_tokens, 'token')} runs {ran} although {first.best} is captured"
        )
        severity = Severity.NOTE if deliberate else None
        yield Diagnosis(role, message, count, severity, selected, missing)


@rule("EN003", Severity.WARNING, BugClass.C, "vllm#56136")
def graphs_without_batch(subject: CheckInput) -> Iterator[Diagnosis]:
    """Graphs are captured that no allowed batch is answered with: start-up time and memory for nothing."""
    for manager in subject.emulation.managers:
        role = manager.role
        # A graph may serve a batch that was not asked about.
        if role in subject.unknown:
            continue
        used = {answer.answer.entry for answer in subject.answers if answer.batch.role is role}
        entries = [graph.entry for graph in manager.graphs]
        # The answers are to the most requests, and a graph of mixed batches may have room for fewer.
        for loras, tokens in {(each.active_loras, each.num_tokens) for each in entries if each.query_len is None}:
            fewest = Batch.mixed(role, max(loras, 1), min(tokens, most_tokens(role, subject.emulation)), loras)
            used.add(manager.dispatch(fewest).entry)
        unused = [entry for entry in entries if entry not in used]
        if unused:
            widths = {entry.query_len for entry in entries if entry.query_len}
            # Each size is captured for all of these, and another batch may need the size.
            fixed = role.is_drafter or len(widths) > 1 or len({entry.active_loras for entry in entries}) > 1
            message = (
                f"{role}: {len(unused)} of {counted(len(entries), 'graph')} serve no allowed batch, such as {unused[0]}"
            )
            severity, about = (Severity.NOTE, None) if fixed else (None, "")
            yield Diagnosis(role, message, len(unused), severity, about)


@rule("EN004", Severity.WARNING, BugClass.B, "vllm#28207")
def sizes_rounded_away(subject: CheckInput) -> Iterator[Diagnosis]:
    """Sizes of the list give no decode graph of their own: they are rounded to another, or dropped."""
    emulation = subject.emulation
    dropped = [size for size in emulation.asked_sizes if size not in emulation.sizes]
    # Without any size left the mode is to blame, which EN005 reports.
    if dropped and emulation.sizes:
        message = (
            f"{Role.TARGET}: {len(dropped)} of {len(emulation.asked_sizes)} listed sizes are not captured: "
            f"{_some(dropped)}; captured are {_some(emulation.sizes)}"
        )
        yield Diagnosis(Role.TARGET, message, len(dropped), about=dropped)
    # Sizes in requests are never rounded to a query length.
    for manager in emulation.managers if subject.engine.sizes_in_tokens else ():
        decodes = [(g.entry.num_tokens, g.entry.query_len) for g in manager.graphs if g.entry.query_len]
        widths = sorted({query_len for _, query_len in decodes})
        captured = {num_tokens for num_tokens, _ in decodes}
        if len(widths) != 1 or widths == [1]:
            continue  # With several widths each size is a multiple of one.
        most = widths[0] * emulation.limits.max_num_reqs
        lost = [size for size in emulation.sizes if size not in captured and size <= most]
        if lost:
            message = (
                f"{manager.role}: {len(lost)} of {len(emulation.sizes)} sizes give no decode graph of their own at "
                f"{widths[0]} tokens a request: {_some(lost)}"
            )
            # The engine's own list has sizes for all batches, and of a given one mixed batches use the others.
            harmless = not emulation.asked_sizes or manager.mode.mixed_mode is not GraphMode.NONE
            yield Diagnosis(manager.role, message, len(lost), Severity.NOTE if harmless else None)


@rule("EN005", Severity.WARNING, BugClass.G, "vllm#49547", "vllm#50619")
def mode_lowered(subject: CheckInput) -> Iterator[Diagnosis]:
    """The engine runs in a lower mode than the flags request, and logs it at most."""
    modes = {mode.value: mode for mode in GraphMode}
    for decision in subject.emulation.decisions:
        before, after = modes.get(decision.before), modes.get(decision.after)
        # Other decisions rewrite sizes or limits, or raise a mode.
        if before is not None and after is not None and after < before:
            message = f"{decision.role}: {before.value} became {after.value}: {decision.message}"
            yield Diagnosis(decision.role, message, about=decision)


@rule("EN007", Severity.WARNING, BugClass.G, "vllm#20436")
def model_unknown(subject: CheckInput) -> Iterator[Diagnosis]:
    """The facts of a model are not here, and what is said of its graphs rests on assumptions.

    A model that is taken for a known one of its family is a note: most likely it has that one's dimensions.
    """
    sources = {setting.source for setting in subject.emulation.settings if setting.name.endswith("model_facts")}
    # The model's own config.json leaves nothing to assume.
    alone = bool(subject.emulation.by_flags)
    if not (sources & {ASSUMED, FAMILY, KNOWN} or alone):
        return
    for sentence in subject.emulation.assumptions:
        if sentence in subject.emulation.of_line:
            continue
        says, _, fix = sentence.rpartition("; ")
        yield Diagnosis(Role.TARGET, says, severity=None if ASSUMED in sources or alone else Severity.NOTE, about=fix)


HEAVY_RATIO, HEAVY_TOKENS = 2, 32


@rule("EN006", Severity.WARNING, BugClass.C, "sglang#31487", "sglang#40253")
def heavy_padding(subject: CheckInput) -> Iterator[Diagnosis]:
    """A batch is padded to more than twice its tokens, and more than a few. Under a plan, a note."""

    def heavy(answer: BatchAnswer) -> bool:
        entry, real = answer.answer.entry, answer.batch.num_tokens
        # A ratio alone would blame every batch of one token; a few tokens cost nothing.
        return entry is not None and entry.num_tokens > HEAVY_RATIO * real and entry.num_tokens - real > HEAVY_TOKENS

    for role, selected in subject.by_role(heavy):
        worst = max((a for run in selected for a in run.answers), key=lambda a: a.answer.padded_tokens)
        real = worst.batch.num_tokens
        padded = f"{real} to {real + worst.answer.padded_tokens} at worst"
        message = f"{role}: {_in_words(selected)} are padded to more than twice their tokens, {padded}"
        yield Diagnosis(role, message, _count(selected), about=selected, concerns=heavy)


@rule("EN008", Severity.WARNING, BugClass.A, "vllm#50738", "sglang#7042")
def microbatches_without_graph(subject: CheckInput) -> Iterator[Diagnosis]:
    """Batches run eager because of overlapping microbatches, although a graph of their size is captured.

    The engine splits a batch that has no graph in parts, or has only a graph in parts of one that it does not split.
    Of batches with prompts it is a note: they are split for the overlap, which is worth more than a graph.
    """

    def split(answer: BatchAnswer) -> bool:
        return answer.answer.reason is Reason.SPLIT and answer.best is not None

    for role, selected in subject.by_role(split):
        severity = None if any(run.batch.kind is Kind.DECODE for run in selected) else Severity.NOTE
        message = f"{role}: {_in_words(selected)} run eager, because microbatches overlap"
        yield Diagnosis(role, message, _count(selected), severity, selected, split)


@rule("EN009", Severity.WARNING, BugClass.A, "vllm#35963", "vllm-project/vllm-omni#7650")
def encoder_without_graph(subject: CheckInput) -> Iterator[Diagnosis]:
    """Graphs of the encoder are asked for, and images run it eager, without a word in the log.

    Either the engine captures no encoder of this model, or a batch of images can be larger than the largest budget.
    Graphs that are captured while the engine serves are a note: the first images of each layout wait for them.
    """
    emulation = subject.emulation
    for decision in emulation.decisions:
        if decision.rule in ("encoder", "encoder-while-serving"):
            severity = None if decision.rule == "encoder" else Severity.NOTE
            yield Diagnosis(Role.TARGET, decision.message, severity=severity)
    for encoder in emulation.encoders:
        largest, reach = encoder.budgets[-1], encoder.reach
        # Of images the last budget decides: there is no larger graph to fall back to.
        if largest < reach:
            message = f"images of {largest + 1} to {reach} tokens run eager: the largest budget has {largest}"
            yield Diagnosis(Role.TARGET, message, reach - largest, about=encoder)


PLANNED = "a plan has replaced the engine's sizes: change the plan's spec and plan again, or tune this observation"


def check_observation(observation: Observation) -> tuple[EngineFinding, ...]:
    """Return all findings, by code: those about engines, then those that only observations have.

    Fixes are those of the installed engine of that name, if there is one, and if the engine ran without a plan.
    """
    emulation, by_plan = emulation_of(observation), observation.plan is not None
    total = {role.role: role.steps for role in observation.roles}
    installed = engines().get(observation.engine)
    findings = [
        attrs.evolve(
            each,
            diagnosis=attrs.evolve(each.diagnosis, severity=Severity.NOTE)
            if by_plan and each.rule.code in CHOSEN
            else each.diagnosis,
            # The flags do not decide sizes under a plan, so fixing them would change nothing.
            fix=PLANNED if by_plan else each.fix or NO_FIX.format(observation.engine),
            steps=None if each.diagnosis.concerns is None else _steps(observation, emulation, each.diagnosis),
            total=total.get(each.diagnosis.role, 0),
        )
        for each in check(emulation, _NOT_INSTALLED if installed is None else installed.value)
    ]
    for _, each_rule in sorted(OBSERVED_RULES.items()):
        fix = each_rule.planned if by_plan and each_rule.planned else each_rule.remedy
        findings += [
            EngineFinding(rule=each_rule, diagnosis=found, fix=fix, total=total[found.role])
            for found in each_rule.check(observation, emulation)
        ]
    return tuple(findings)


def share(steps: int, total: int) -> str:
    """Write how many steps of a role something is about: ``20 of 400 steps (5.0%)``."""
    return f"{steps:,} of {counted(total, 'step')} ({steps / total:.1%})" if total else "no steps yet"


NO_FIX = "no fix is known: capture-planner has no rules of {}'s flags, or its distribution is not installed"

_NOT_INSTALLED = Engine(
    name="",
    version="",
    emulate=None,  # type: ignore[arg-type]
    export=None,  # type: ignore[arg-type]
    flags={},
    programs=(),
    limits=("max_num_reqs", "max_num_tokens", "num_tokens"),
)
"""Stands for the engine of an observation whose plugin is not here: only fixes need that."""


def answers_of(role: ObservedRole, emulation: Emulation) -> Iterator[tuple[BatchCount, BatchAnswer]]:
    """Yield each batch of a role that ran, with the graph that it ran on as the answer."""
    graphs = next(manager.graphs for manager in emulation.managers if manager.role is role.role)
    rows = GraphRows(graphs, emulation.families(role.role))
    for count in role.batches:
        batch = count.batch(role.role)
        # Prompts that have the shape of a decode are none (law 5).
        batch = attrs.evolve(batch, query_len=batch.uniform_query_len)
        # What ran is the answer, whatever the dispatcher would say: OB002 compares the two.
        entry = None if count.graph is None else role.graphs[count.graph].entry
        answer = Dispatch(None, reason=count.reason) if entry is None else served(entry, batch)
        yield count, BatchAnswer(batch=batch, answer=answer, graphs=rows, last=batch.extent(batch.kind))


def _steps(observation: Observation, emulation: Emulation, diagnosis: Diagnosis) -> int:
    (role,) = (each for each in observation.roles if each.role is diagnosis.role)
    concerns = diagnosis.concerns
    assert concerns is not None
    return sum(count.steps for count, answer in answers_of(role, emulation) if concerns(answer))


@rule("OB001", Severity.NOTE, BugClass.I, remedy="leave their sizes out if the traffic is typical", planned=PLANNED)
def graphs_never_replayed(observation: Observation, emulation: Emulation) -> Iterator[Diagnosis]:
    """Graphs were captured, and no step ran on them: start-up time and memory for nothing, with this traffic."""
    # An engine by itself has one list of sizes for all its graphs: a size is needed where any of them was replayed.
    replayed = {graph.entry.num_tokens for role in observation.roles for graph in role.graphs if graph.replays}
    for role in observation.roles:
        shared = set() if observation.plan else replayed
        unused = [each for each in role.graphs if not each.replays and each.entry.num_tokens not in shared]
        # Without a step nothing follows from replays.
        if not unused or not role.steps:
            continue
        seconds = [graph.seconds for graph in unused if graph.seconds is not None]
        mib = [graph.mib for graph in unused if graph.mib is not None]
        cost = [text for text, known in ((f"{sum(seconds):,.1f} s", seconds), (f"{sum(mib):,.0f} MiB", mib)) if known]
        message = (
            f"{role.role}: {len(unused)} of {counted(len(role.graphs), 'graph')} were not replayed in "
            f"{counted(role.steps, 'step')}, such as {unused[0].entry}"
        ) + (f"; their capture took {' and '.join(cost)}" if cost else "")
        yield Diagnosis(role.role, message, len(unused))


@rule("OB002", Severity.WARNING, BugClass.C, remedy="look for what turned it off in the engine's log at that time")
def graph_not_used(observation: Observation, emulation: Emulation) -> Iterator[Diagnosis]:
    """Steps ran eager although the engine's dispatcher has a graph for the batch.

    Something else decided while the engine ran: another rank, a profile, a feature of a request.
    """
    for role in observation.roles:
        # Another graph than the dispatcher's is not looked at: observed_diff compares those with a plan.
        eager = [(count, emulation.dispatch(count.batch(role.role))) for count in role.batches if count.graph is None]
        missed = [(count, answer.entry) for count, answer in eager if answer.entry is not None]
        if missed:
            (count, entry), steps = missed[0], sum(count.steps for count, _ in missed)
            message = (
                f"{role.role}: {share(steps, role.steps)} ran eager although the dispatcher has a graph, such as "
                f"{shape(count)}, for which it has {entry} ({why(count.reason)})"
            )
            yield Diagnosis(role.role, message, steps)


@rule("OB003", Severity.NOTE, BugClass.J, remedy="observe again with a release that the engine's plugin knows")
def batches_not_asked(observation: Observation, emulation: Emulation) -> Iterator[Diagnosis]:
    """Batches are allowed and the engine's dispatcher was not asked about them: no finding is about these."""
    unknown: Counter[Role] = Counter()
    for each in walk(emulation):
        unknown[each.batch.role] += (each.last - each.extent + 1) * (each.answer.reason is Reason.UNKNOWN)
    for role, count in (+unknown).items():
        yield Diagnosis(role, f"{role}: the engine was not asked about {count:,} of the allowed batches", count)


def shape(count: BatchCount) -> str:
    """Write the shape of a batch in a few words."""
    text = counted(count.num_reqs, "request")
    text += f", {counted(count.num_tokens, 'token')}" if count.query_len is None else f" of {count.query_len}"
    text += "" if count.past_prompt else ", with prompts"
    return text + (f", {count.active_loras} active LoRA" if count.active_loras else "")


def why(reason: Reason | None) -> str:
    """Write a reason, as the engine gave it."""
    return "no reason" if reason is None else f"reason: {reason}"
