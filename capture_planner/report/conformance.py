"""The report of the conformance suite: the same sections as tables, as a page with plots, and as data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import RenderableType

from capture_planner.conformance import (
    AuditResult,
    Check,
    Failure,
    Log,
    Profile,
    SuiteResult,
    Verdict,
    loads,
    verdicts,
)
from capture_planner.conformance.case_text import describe_case
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.report.page import rendered
from capture_planner.report.run import section_tables
from capture_planner.report.tables import entry_data
from capture_planner.report.writing import Grid, Section, many, seconds

if TYPE_CHECKING:
    from capture_planner.report.drawing import Chart

STOPPED = "the suite was stopped before its end; what it did until then is below"


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
    profile: Profile | None
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
        found = verdicts(self.outcome.audited)
        return tuple(field for field, verdict in found.items() if verdict is Verdict.OVER_DECLARED)

    @property
    def says(self) -> str:
        """The result in a few words."""
        found = self.outcome.failures
        if found:
            return many(len(found), "finding")
        if self.attack:
            what = "changes real rows" if self.outcome.audited else "changes no real row of this case"
            return f"the attack {self.attack!r} {what}"
        return "stopped before its end, nothing found until then" if self.interrupted else "passed"


# Sections --------------------------------------------------------------------------------------


def conformance_tables(report: Conformance) -> RenderableType:
    """The report for people, at any width; commands are not in it, since a table would break their lines."""
    return section_tables(conformance_sections(report))


def conformance_page(report: Conformance) -> str:
    """Return the report as one page with plots that needs nothing else.

    Raises ``CapturePlannerError`` where jinja2 or matplotlib is not installed.
    """

    def pictures() -> Sequence[Chart]:
        from capture_planner.report.conformance_charts import conformance_charts

        return conformance_charts(report)

    alert = f"INTERRUPTED: {STOPPED}" if report.interrupted else None
    if report.outcome.failures:
        alert = f"{many(len(report.outcome.failures), 'finding')}: what is marked as broken does not hold"
    return rendered(
        "conformance run",
        title=f"Conformance of {report.backend}: {report.says}",
        alert=alert,
        sections=conformance_sections(report, commands=True),
        charts=pictures,
        spec=None,
    )


def conformance_sections(report: Conformance, *, commands: bool = False) -> tuple[Section, ...]:
    """Return the parts of the report in the order in which they are read."""
    findings = report.outcome.failures
    found = (
        _finding(number, each, report.command(each.case) if commands else "")
        for number, each in enumerate(findings, 1)
    )
    tried = () if report.attack else (_checks(report), _steps(report), _forwards(report))
    return (_what(report), *found, *tried, _shapes(report), *_audits(report))


def _what(report: Conformance) -> Section:
    profile = report.profile
    tried = "one printed case" if profile is None else _profile(profile)
    facts = [
        ("backend", f"{report.backend}, of {report.distribution} {report.version}"),
        ("environment", f"{report.environment.name}, {report.environment.device.name}"),
        ("tried", tried),
        *([] if profile is None else [("seed", str(report.seed)), ("K", ", ".join(map(str, report.drafts)))]),
        *report.host.items(),
    ]
    left_out = [f"step {number} of the case did not apply and was left out" for number in report.left_out]
    over = [f"over-declared: {role.value} {field}" for role, field in report.over_declared]
    return Section(
        name="conformance",
        title=f"Conformance of {report.backend}: {report.says}",
        warnings=(*((STOPPED,) if report.interrupted else ()), *report.differences, *left_out, *over),
        grid=Grid(columns=("", ""), rows=tuple(facts)),
        notes=(f"it took {seconds(report.outcome.seconds)}",),
    )


def _profile(profile: Profile) -> str:
    return f"{profile.name} profile: {many(profile.examples, 'scene')} of up to {many(profile.steps, 'step')}"


def _finding(number: int, finding: Failure, command: str) -> Section:
    where = [
        ("role", finding.role.value if finding.role else ""),
        ("graph", str(finding.entry or "")),
        ("batch", finding.batch),
        ("field", finding.field),
        ("axis", finding.axis),
        ("seen with garbage in", ", ".join(finding.causes)),
    ]
    steps = describe_case(loads(finding.case)) if finding.case else ()
    again = (f"again: {command}",) if command else ()
    return Section(
        name=f"finding-{number}",
        title=f"Finding {number}: {finding.check.value}",
        warnings=(finding.message,),
        lines=(f"does not hold: {finding.check.law}",),
        grid=Grid(columns=("", ""), rows=tuple((name, text) for name, text in where if text)),
        notes=(*(f"{index}. {step}" for index, step in enumerate(steps, 1)), *again),
    )


PER_FORWARD = frozenset(
    {Check.DISPATCHED, Check.FILLED, Check.BOUNDED, Check.UNTOUCHED, Check.FROZEN, Check.RAN}
)
"""Checks around every forward, whoever began it; most of the others compare the rows of a step."""


def tried(check: Check, log: Log, shapes: int) -> tuple[int, str]:
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
        count, what = tried(check, report.log, len(report.outcome.shapes))
        if check is Check.AGREED and check not in broken:
            continue  # One rank alone.
        held = "broken" if check in broken else "held" if count else "not tried"
        rows.append((check.value, held, many(count, what), check.law))
    notes: tuple[str, ...] = ()
    if broken:
        notes = (
            "the search ends with the first finding; the numbers are without the cases that made it small",
        )
    grid = Grid(columns=("check", "", "tried on", "law"), rows=tuple(rows))
    return Section(name="checks", title="Checks", grid=grid, notes=notes)


def _steps(report: Conformance) -> Section:
    log = report.log
    rows = tuple((name, f"{count:,}") for name, count in sorted(log.steps.items()))
    return Section(
        name="steps",
        title="Steps",
        lines=(f"{many(sum(log.steps.values()), 'step')} in {many(log.examples, 'scene')}",),
        grid=Grid(columns=("step", "times"), right=frozenset({"times"}), rows=rows),
    )


def _forwards(report: Conformance) -> Section:
    rows = tuple((role.value, mode, f"{count:,}") for (role, mode), count in forwards(report.log))
    reqs, tokens = report.log.largest
    return Section(
        name="forwards",
        title="Forwards",
        lines=(f"the largest batches had {many(reqs, 'request')}, and {many(tokens, 'token')}",)
        if rows
        else (),
        grid=Grid(columns=("role", "ran as", "forwards"), right=frozenset({"forwards"}), rows=rows),
    )


def forwards(log: Log) -> Iterator[tuple[tuple[Role, GraphMode], int]]:
    """Yield how many forwards each role had in each mode; a mode that none ran in is left out."""
    for role in Role:
        for mode in GraphMode:
            if count := log.forwards[f"{role.value} {mode.value}"]:
                yield (role, mode), count


def _shapes(report: Conformance) -> Section:
    used = ((str(shape), "used") for shape in report.outcome.shapes)
    refused = ((str(each.shape), f"refused: {each.reason}") for each in report.outcome.refused)
    return Section(name="shapes", title="Shapes", grid=Grid(columns=("shape", ""), rows=(*used, *refused)))


def _audits(report: Conformance) -> Iterator[Section]:
    audited = report.outcome.audited
    if not audited:
        return
    by_field: dict[tuple[Role, str], list[AuditResult]] = {}
    for each in audited:
        by_field.setdefault((each.role, each.field), []).append(each)
    rows = []
    for field, verdict in verdicts(audited).items():
        attacks = by_field[field]
        matter = ", ".join(each.attack.value for each in attacks if each.matters) or "none"
        rows.append(
            (field[0].value, field[1], attacks[0].axis, attacks[0].declared_by, verdict.value, matter)
        )
    columns = ("role", "field", "axis", "declared by", "verdict", "attacks that change real rows")
    tries = f"{many(len(audited), 'attack')} on {many(len(by_field), 'field')}, each alone"
    notes = (
        ("an over-declared field costs a copy at every step: no attack on it changed a real row",)
        if report.over_declared
        else ()
    )
    yield Section(
        name="audits",
        title="Audits",
        lines=(tries,),
        grid=Grid(columns=columns, rows=tuple(rows)),
        notes=notes,
    )


# Data ------------------------------------------------------------------------------------------


def conformance_data(report: Conformance) -> dict[str, Any]:
    """Return the report as plain data, for ``--format json``. Two runs of a seed differ in ``seconds`` alone.

    ``backend``, ``distribution``, ``version``, ``environment``, ``differences``, ``host``: what was tested,
    and where. ``seed``, ``profile`` (null for a printed case), ``drafts``: what was asked. ``passed``,
    ``interrupted``. ``findings``: each with its ``law``, its ``case`` as ``--case`` takes it, the ``steps``
    of that in words, and a ``command``. ``scenes``, ``steps``, ``forwards``, ``largest``, ``shapes``,
    ``refused``: what was tried. ``audited``: each attack on a declared field; ``fields``: what they come to.
    """
    outcome, log = report.outcome, report.log
    reqs, tokens = log.largest
    return {
        "backend": report.backend,
        "distribution": report.distribution,
        "version": report.version,
        "environment": _plain(report.environment),
        "differences": list(report.differences),
        "host": dict(report.host),
        "seed": report.seed,
        "profile": report.profile and _plain(report.profile),
        "drafts": list(report.drafts),
        "passed": report.passed,
        "interrupted": report.interrupted,
        "findings": [
            _plain(finding)
            | {
                "command": report.command(finding.case),
                "law": finding.check.law,
                "steps": list(describe_case(loads(finding.case))) if finding.case else [],
            }
            for finding in outcome.failures
        ],
        "scenes": log.examples,
        "steps": dict(sorted(log.steps.items())),
        "forwards": [
            {"role": role.value, "mode": mode.value, "count": count} for (role, mode), count in forwards(log)
        ],
        "largest": {"num_reqs": reqs, "num_tokens": tokens},
        "shapes": [_plain(shape) for shape in outcome.shapes],
        "refused": [_plain(each) for each in outcome.refused],
        "audited": [
            _plain(each) | {"command": report.command(each.case, each) if each.matters else ""}
            for each in outcome.audited
        ],
        "fields": [
            {"role": role.value, "field": field, "verdict": verdict.value}
            for (role, field), verdict in verdicts(outcome.audited).items()
        ],
        "seconds": round(outcome.seconds, 2),
    }


_KEYS = {"message": "says"}
"""Keys of the documents that differ from the names in Python."""


def _plain(value: Any) -> Any:
    if isinstance(value, Entry):
        return entry_data(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if attrs.has(type(value)):
        fields = attrs.fields_dict(type(value))
        return {_KEYS.get(name, name): _plain(getattr(value, name)) for name in fields}
    return getattr(value, "value", value)
