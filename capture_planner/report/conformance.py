"""The report of the conformance suite: sections for a terminal and a page, and its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from capture_planner.conformance import Check, Failure, Log, loads, verdicts
from capture_planner.conformance.case_text import describe_case
from capture_planner.records._base import grouped
from capture_planner.records.text import counted
from capture_planner.report.conformance_charts import conformance_charts
from capture_planner.report.conformance_record import Conformance, forwards
from capture_planner.report.writing import Grid, Report, Section, seconds

STOPPED = "the suite was stopped before its end; what it did until then is below"


def conformance_report(report: Conformance, *, commands: bool = False) -> Report:
    """Return the report of the suite for ``terminal.tables`` and ``page.page``.

    ``commands``: with the commands that reproduce findings, for a page; a terminal would break their lines.
    """
    alert = f"INTERRUPTED: {STOPPED}" if report.interrupted else None
    if report.outcome.failures:
        alert = f"{counted(len(report.outcome.failures), 'finding')}: what is marked as broken does not hold"
    return Report(
        kind="conformance run",
        title=f"Conformance of {report.backend}: {report.says}",
        alert=alert,
        sections=tuple(_sections(report, commands=commands)),
        charts=partial(conformance_charts, report),
    )


def _sections(report: Conformance, *, commands: bool) -> Iterator[Section]:
    """Yield the parts of the report in the order in which they are read."""
    yield _subject(report)
    for number, finding in enumerate(report.outcome.failures, 1):
        yield _finding(number, finding, report.command(finding.case) if commands else "")
    if not report.attack:
        yield from (_checks(report), _steps(report), _forwards(report))
    yield _shapes(report)
    if report.outcome.untried:
        yield Section(name="not-tried", title="Not tried", lines=report.outcome.untried)
    yield from _audits(report)


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
        warnings=(*((STOPPED,) if report.interrupted else ()), *report.differences, *left_out, *over),
        grid=Grid.facts(facts),
        notes=(f"it took {seconds(report.outcome.seconds)}",),
    )


def _finding(number: int, finding: Failure, command: str) -> Section:
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
    again = (f"again: {command}",) if command else ()
    return Section(
        name=f"finding-{number}",
        title=f"Finding {number}: {finding.check.value}",
        warnings=(finding.message,),
        lines=(f"does not hold: {finding.check.law}",),
        grid=Grid.facts((name, text) for name, text in where if text),
        notes=(*(f"{index}. {step}" for index, step in enumerate(steps, 1)), *again),
    )


PER_FORWARD = frozenset({Check.DISPATCHED, Check.FILLED, Check.BOUNDED, Check.UNTOUCHED, Check.FROZEN, Check.RAN})
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
    if check in (Check.TOKENS, Check.VERIFIED):
        return log.steps["serve"], "load"
    return log.steps["forward"], "step"


def _checks(report: Conformance) -> Section:
    broken = {finding.check for finding in report.outcome.failures}
    rows = []
    for check in Check:
        count, unit = attempts(check, report.log, len(report.outcome.shapes))
        if check is Check.AGREED and check not in broken:
            continue  # One rank alone.
        verdict = "broken" if check in broken else "held" if count else "not tried"
        rows.append((check.value, verdict, counted(count, unit), check.law))
    note = "the search ends with the first finding; the numbers are without the cases that made it small"
    grid = Grid.of(("check", "", "tried on", "law"), rows)
    return Section(name="checks", grid=grid, notes=(note,) if broken else ())


def _steps(report: Conformance) -> Section:
    log = report.log
    rows = tuple((name, f"{count:,}") for name, count in sorted(log.steps.items()))
    line = f"{counted(sum(log.steps.values()), 'step')} in {counted(log.examples, 'scene')}"
    return Section(name="steps", lines=(line,), grid=Grid.of(("step", "times"), rows, text=1))


def _forwards(report: Conformance) -> Section:
    rows = tuple((role.value, mode, f"{count:,}") for (role, mode), count in forwards(report.log))
    reqs, tokens = report.log.largest
    line = f"the largest batches had {counted(reqs, 'request')}, and {counted(tokens, 'token')}"
    line += f"; the longest sequence had {counted(report.log.longest, 'key')}"
    grid = Grid.of(("role", "ran as", "forwards"), rows, text=2)
    return Section(name="forwards", lines=(line,) if rows else (), grid=grid)


def _shapes(report: Conformance) -> Section:
    rows = [(str(shape), "used") for shape in report.outcome.shapes]
    rows += [(str(each.shape), f"refused: {each.reason}") for each in report.outcome.refused]
    return Section(name="shapes", grid=Grid.of(("shape", ""), rows))


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
    notes = (note,) if report.over_declared else ()
    yield Section(name="audits", lines=(tries,), grid=Grid.of(columns, rows), notes=notes)
