"""The report of the conformance suite: sections for a terminal and a page, and its JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import attrs

from capture_planner.codec import json_of, plain, plain_fields
from capture_planner.codec.plain import plain_some
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import grouped
from capture_planner.records.environment import Environment
from capture_planner.records.text import counted
from capture_planner.report.plots import MODE_COLORS, Chart, Mark, Plot, PlotAxis, Series, drawn
from capture_planner.report.writing import MODES, Grid, Report, Section, TonedText, noted, ran, seconds, warned
from capture_planner_conformance import AuditResult, Check, Log, SearchProfile, SuiteResult, Verdict, loads, verdicts
from capture_planner_conformance.scene import describe_case

STOPPED = "the suite was stopped before its end; what it did until then is below"


def conformance_report(report: Conformance) -> Report:
    """Return the report of the suite."""
    alert = f"INTERRUPTED: {STOPPED}" if report.interrupted else None
    if report.outcome.failures:
        laws = dict.fromkeys(finding.check.law for finding in report.outcome.failures)
        alert = f"{counted(len(report.outcome.failures), 'finding')}: it does not hold that {', or that '.join(laws)}"
    return Report(
        kind="conformance run",
        title=f"Conformance of {report.backend}: {report.says}",
        alert=alert,
        sections=tuple(_sections(report)),
        charts=partial(conformance_charts, report),
    )


def _sections(report: Conformance) -> Iterator[Section]:
    """Yield the parts of the report in the order in which they are read."""
    yield _subject(report)
    for number, finding in enumerate(report.outcome.failures, 1):
        where = [
            ("role", finding.role.value if finding.role else ""),
            ("graph", str(finding.entry or "")),
            ("batch", finding.batch),
            ("field", finding.field),
            ("axis", finding.axis),
            ("seen with garbage in", ", ".join(finding.causes)),
            ("sizes", "; ".join(finding.notes)),
            ("comes and goes", finding.frequency),
        ]
        steps = describe_case(loads(finding.case)) if finding.case else ()
        yield Section(
            name=f"finding-{number}",
            title=f"Finding {number}: {finding.check.value}",
            parts=(
                *warned(finding.message),
                f"does not hold: {finding.check.law}",
                Grid.facts((name, text) for name, text in where if text),
                *noted(*(f"{index}. {step}" for index, step in enumerate(steps, 1))),
            ),
        )
    if not report.attack:
        log = report.log
        rows = tuple((name, f"{count:,}") for name, count in sorted(log.steps.items()))
        line = f"{counted(sum(log.steps.values()), 'step')} in {counted(log.examples, 'scene')}"
        yield from (
            _checks(report),
            Section(name="steps", parts=(line, Grid.of(("step", "times"), rows, text=1))),
            _forwards(report),
        )
    yield _shapes(report)
    if report.outcome.untried:
        yield Section(name="not-tried", title="Not tried", parts=(*report.outcome.untried,))
    yield from _audits(report)
    # Wrong declarations all have the same command.
    commands = dict.fromkeys(report.command(finding.case) for finding in report.outcome.failures)
    for number, command in enumerate(commands):
        yield Section(name=f"again-{number}", title="", parts=("", "to reproduce:", "", TonedText(command, "verbatim")))


def _subject(report: Conformance) -> Section:
    profile = report.profile
    extent = "one printed case"
    if profile is not None:
        scenes, steps = counted(profile.examples, "scene"), counted(profile.steps, "step")
        extent = f"{profile.name} profile: {scenes} of up to {steps}"
    facts = [
        ("backend", f"{report.backend}, of {report.distribution} {report.version}"),
        ("environment", f"{report.environment.name}, {report.environment.device.name}"),
        ("tried", extent),
        *([] if profile is None else [("seed", str(report.seed)), ("K", ", ".join(map(str, report.drafts)))]),
        *report.host.items(),
    ]
    left_out = [f"step {number} of the case did not apply and was left out" for number in report.left_out]
    over = [f"over-declared: {role.value} {field}" for role, field in report.over_declared]
    return Section(
        name="conformance",
        title=f"Conformance of {report.backend}: {report.says}",
        parts=(
            *warned(STOPPED if report.interrupted else None, *report.differences, *left_out, *over),
            Grid.facts(facts),
            *noted(f"it took {seconds(report.outcome.seconds)}"),
        ),
    )


PER_FORWARD = frozenset({Check.FILLED, Check.BOUNDED, Check.UNTOUCHED, Check.FROZEN, Check.RAN})
"""Checks around every forward; most of the others compare the rows of a step."""


def attempts(check: Check, log: Log, shapes: int) -> tuple[int, str]:
    """Return on how many of what a check was tried."""
    if check in PER_FORWARD:
        return sum(log.forwards.values()), "forward"
    if check is Check.STATE:
        return sum(count for (role, _), count in forwards(log) if role.is_drafter), "forward"
    if check is Check.DECLARED:
        return shapes, "shape"
    if check is Check.PLANNED:
        return log.examples, "scene"
    if check is Check.TOKENS:
        return log.steps["serve"], "load"
    return log.steps["forward"], "step"


def _checks(report: Conformance) -> Section:
    broken = {finding.check for finding in report.outcome.failures}
    rows = []
    for check in Check:
        count, unit = attempts(check, report.log, len(report.outcome.shapes))
        verdict = TonedText("broken", "bad") if check in broken else "held" if count else "not tried"
        rows.append((check.value, verdict, counted(count, unit), check.law))
    note = "the search ends with the first finding; the numbers are without the cases that made it small"
    grid = Grid.of(("check", "", "tried on", "law"), rows)
    return Section(name="checks", parts=(grid, *noted(note if broken else None)))


def _forwards(report: Conformance) -> Section:
    rows = tuple((role.value, mode, f"{count:,}") for (role, mode), count in forwards(report.log))
    reqs, tokens = report.log.largest
    line = f"the largest batches had {counted(reqs, 'request')}, and {counted(tokens, 'token')}"
    line += f"; the longest sequence had {counted(report.log.longest, 'key')}"
    grid = Grid.of(("role", "ran as", "forwards"), rows, text=2)
    return Section(name="forwards", parts=(*((line,) if rows else ()), grid))


def _shapes(report: Conformance) -> Section:
    rows = [(str(shape), "used") for shape in report.outcome.shapes]
    rows += [(str(each.shape), f"refused: {each.reason}") for each in report.outcome.refused]
    return Section(name="shapes", parts=(Grid.of(("shape", ""), rows),))


def _audits(report: Conformance) -> Iterator[Section]:
    audited = report.outcome.audited
    if not audited:
        return
    by_field = grouped(audited, lambda each: (each.role, each.field))
    rows = []
    for field, verdict in verdicts(audited).items():
        attacks = by_field[field]
        matter = ", ".join(each.attack.value for each in attacks if each.matters) or "none"
        rows.append((field[0].value, field[1], attacks[0].axis, attacks[0].declared_by, verdict.value, matter))
    columns = ("role", "field", "axis", "declared by", "verdict", "attacks that change real rows")
    tries = f"{counted(len(audited), 'attack')} on {counted(len(by_field), 'field')}, each alone"
    note = "an over-declared field costs a copy at every step: no attack on it changed a real row"
    yield Section(name="audits", parts=(tries, Grid.of(columns, rows), *noted(note if report.over_declared else None)))


# What came of it, and its JSON ------------------------------------------------------------------


@attrs.frozen(kw_only=True, eq=False)
class Conformance:
    """What the suite was asked, and what came of it."""

    backend: str
    distribution: str
    version: str
    environment: Environment
    """What was planned for."""
    differences: tuple[str, ...] = ()
    """How this machine differs from it, in sentences."""
    host: Mapping[str, str]
    """This machine and its versions."""
    seed: int
    profile: SearchProfile | None
    """None where one printed case was done again."""
    drafts: tuple[int, ...] = ()
    """K of the scenes."""
    base: tuple[str, ...] = ()
    """The words of the command: the backend, the environment, threads."""
    named: tuple[str, ...] = ()
    """Its options that name shapes."""
    outcome: SuiteResult
    interrupted: bool = False
    attack: str = ""
    """Which attack was done on the printed case; empty: none."""
    left_out: tuple[int, ...] = ()
    """Steps of the printed case that did not apply, from 1."""

    @property
    def passed(self) -> bool:
        """Whether all was done and nothing found, and no attack that was asked for changed a real row."""
        return self.outcome.passed and not self.interrupted and not (self.attack and self.outcome.audited)

    @property
    def log(self) -> Log:
        """What was tried."""
        return self.outcome.log

    def command(self, case: str, attack: AuditResult | None = None) -> str:
        """Return what shows it again, quoted for a shell; without a case, what asks for declarations again."""
        if not case:
            return shlex.join([*self.base, *self.named, "--examples", "1", "--no-audits"])
        words = [*self.base, "--case", case]
        if attack is not None:
            words += ["--attack", f"{attack.role.value} {attack.field} {attack.attack.value}"]
        return shlex.join(words)

    @property
    def over_declared(self) -> tuple[tuple[Role, str], ...]:
        """Fields that the backend declared and that no attack made matter: by role and name."""
        fields = verdicts(self.outcome.audited)
        return tuple(field for field, verdict in fields.items() if verdict is Verdict.OVER_DECLARED)

    @property
    def says(self) -> str:
        """The result in a few words."""
        failures = self.outcome.failures
        if failures:
            return counted(len(failures), "finding")
        if self.attack:
            effect = "changes real rows" if self.outcome.audited else "changes no real row of this case"
            return f"the attack {self.attack!r} {effect}"
        return "stopped before its end, nothing found until then" if self.interrupted else "passed"


def forwards(log: Log) -> Iterator[tuple[tuple[Role, GraphMode], int]]:
    """Yield how many forwards each role had in each mode; a mode that none ran in is left out."""
    for role in Role:
        for mode in GraphMode:
            if count := log.forwards[f"{role.value} {mode.value}"]:
                yield (role, mode), count


@json_of(Conformance)
def _conformance(report: Conformance) -> dict[str, Any]:
    """Return the JSON of the suite. Two runs of a seed differ in ``seconds`` alone.

    ``backend``, ``distribution``, ``version``, ``environment``, ``differences``, ``host``: what was tested,
    and where. ``seed``, ``profile`` (null for a printed case), ``drafts``: what was asked. ``passed``,
    ``interrupted``. ``findings``: each with its ``law``, its ``case`` as ``--case`` takes it, the ``steps``
    of that in words, and a ``command``. ``scenes``, ``steps``, ``forwards``, ``largest``, ``longest``,
    ``features``, ``shapes``, ``refused``: what was tried; ``untried``: what was not. ``audited``: each attack
    on a declared field; ``fields``: what they come to.
    """
    outcome, log = report.outcome, report.log
    return {
        **plain_some(report, "backend", "distribution", "version"),
        "environment": plain_fields(report.environment),
        **plain_some(report, "differences", "host", "seed", "profile", "drafts", "passed", "interrupted"),
        "findings": [
            plain_fields(finding)
            | {
                "command": report.command(finding.case),
                "law": finding.check.law,
                "steps": list(describe_case(loads(finding.case))) if finding.case else [],
            }
            for finding in outcome.failures
        ],
        "scenes": log.examples,
        "steps": dict(sorted(log.steps.items())),
        "forwards": [{"role": role.value, "mode": mode.value, "count": count} for (role, mode), count in forwards(log)],
        "largest": dict(zip(("num_reqs", "num_tokens"), log.largest, strict=True)),
        "longest": {"keys": log.longest, "page": log.pages, "steps": log.most_steps},
        "features": dict(sorted(log.features.items())),
        "untried": list(outcome.untried),
        "shapes": plain(outcome.shapes),
        "refused": plain(outcome.refused),
        "audited": [
            plain_fields(each) | {"command": report.command(each.case, each) if each.matters else ""}
            for each in outcome.audited
        ],
        "fields": [
            {"role": role.value, "field": field, "verdict": verdict.value}
            for (role, field), verdict in verdicts(outcome.audited).items()
        ],
        "seconds": round(outcome.seconds, 2),
    }


# Charts -----------------------------------------------------------------------------------------


def conformance_charts(report: Conformance) -> tuple[Chart, ...]:
    """Return the charts; those that would be empty are left out."""
    return drawn(report, (_forwards_chart, _steps_chart))


def _forwards_chart(report: Conformance) -> Chart | None:
    counts = {(role, mode): report.log.forwards[f"{role.value} {mode.value}"] for role in Role for mode in MODES}
    roles = [role for role in Role if any(counts[role, mode] for mode in MODES)]
    if not roles:
        return None
    plot = Plot(
        title="Forwards by role and mode",
        x=PlotAxis("role", "name"),
        y=PlotAxis("forwards", "number"),
        series=[
            Series(ran(mode), Mark.BARS, [(role.value, counts[role, mode]) for role in roles], color=MODE_COLORS[mode])
            for mode in MODES
            if any(counts[role, mode] for role in roles)
        ],
    )
    return Chart(
        name="forwards",
        plots=(plot,),
        caption="What was checked, by what ran it. A short bar of a mode that matters to you means that little was "
        "tried of it: more examples, or a shape of your own, try more.",
    )


def _steps_chart(report: Conformance) -> Chart | None:
    steps = sorted(report.log.steps.items(), key=lambda step: (-step[1], step[0]))
    if not steps:
        return None
    plot = Plot(
        title="Steps by kind",
        x=PlotAxis("kind of step", "name"),
        y=PlotAxis("steps", "number"),
        series=(Series("steps", Mark.BARS, steps, color="ink"),),
    )
    return Chart(
        name="steps",
        plots=(plot,),
        caption="What happened between and in the forwards. A step serves a whole batch, or requests to their end.",
    )
