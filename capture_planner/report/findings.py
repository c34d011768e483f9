"""Findings and differences: a line each, as JSON, GitHub annotations and SARIF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from capture_planner.analysis.lint import RULES, Finding, Severity
from capture_planner.codec import json_of, plain
from capture_planner.codec.plain import plain_some
from capture_planner.engines.check import ENGINE_RULES, OBSERVED_RULES, EngineFinding
from capture_planner.records._base import grouped
from capture_planner.records.text import counted
from capture_planner.report.plain import finding_json
from capture_planner.report.writing import Report, Section, toned

DRIFT_CODE = "CP099"
"""A plan is not what its spec gives, or not what an engine did; found by comparison, not by a rule."""


@attrs.frozen(kw_only=True)
class FileFinding:
    """A finding with its place in a file."""

    finding: Finding | EngineFinding
    file: str
    line: int
    column: int

    @property
    def severity(self) -> Severity:
        return self.finding.severity


@attrs.frozen(kw_only=True)
class Drift:
    """A difference between a plan and what its spec gives now, or what an engine was observed to do with it."""

    file: str
    """Where a person changed something; the plan, where the engine did."""
    message: str
    line: int = 1
    column: int = 1


def check_report(
    placed: Sequence[FileFinding], drift: Sequence[Drift], budgets: Sequence[str], files: int, other: str
) -> Report:
    """Return a finding a line, what budgets cost, and how many findings; ``other``: what a drift differs from."""
    counts = {severity: sum(p.severity is severity for p in placed) for severity in Severity}
    found = [counted(count, severity.value) for severity, count in counts.items() if count]
    found += [f"{counted(len(drift), 'difference')} {other}"] if drift else []
    total = f"{counted(files, 'file')} checked: {', '.join(found) or 'nothing to report'}"
    lines = [f"{p.file}:{p.line}:{p.column}: {p.severity.value}: {p.finding}" for p in placed]
    lines += [f"{d.file}:{d.line}:{d.column}: error: {DRIFT_CODE} drift: {d.message}" for d in drift]
    parts = toned([*lines, *budgets, total], "verbatim")
    return Report(kind="check", title=total, sections=(Section(name="check", title="", parts=parts),))


def changes_report(changes: Sequence[str], same: str, notes: Sequence[str] = ()) -> Report:
    """Return one difference a line, then the notes; ``same``: what to say where there is no difference."""
    parts = toned([*(changes or [same]), *(f"note: {note}" for note in notes)], "verbatim")
    title = counted(len(changes), "difference") if changes else same
    return Report(kind="comparison", title=title, sections=(Section(name="changes", title="", parts=parts),))


@json_of(FileFinding)
def _placed(placed: FileFinding) -> dict[str, Any]:
    finding = placed.finding
    if isinstance(finding, EngineFinding):
        # These are reported without a file too, and so have a hook of their own.
        own: dict[str, Any] = plain(finding)
    else:
        own = finding_json(finding, finding.diagnostic, remedy=finding.rule.remedy)
    return own | plain_some(placed, "file", "line", "column")


def as_github(placed: Sequence[FileFinding], drift: Sequence[Drift]) -> str:
    """Workflow commands: GitHub shows them at their line, and only some of a step: differences of a line are one."""
    level = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
    lines = [
        f"::{level[p.severity]} file={_property(p.file)},line={p.line},col={p.column},"
        f"title={_property(f'{p.finding.rule.code} {p.finding.rule.name}')}::"
        f"{_escaped(p.finding.text)}"
        for p in placed
    ]
    for (file, line, column), alike in grouped(drift, lambda d: (d.file, d.line, d.column)).items():
        place, text = f"file={_property(file)},line={line},col={column}", "\n".join(d.message for d in alike)
        lines.append(f"::error {place},title={DRIFT_CODE} drift::{_escaped(text)}")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    # Colons and commas separate the properties of a workflow command.
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(placed: Sequence[FileFinding], drift: Sequence[Drift], version: str) -> dict[str, Any]:
    """SARIF 2.1.0, for code-scanning services; every rule is described, found or not."""
    rules = [
        {
            "id": rule.code,
            "name": rule.name,
            "shortDescription": {"text": rule.explanation.splitlines()[0]},
            "fullDescription": {"text": rule.explanation},
            "help": {"text": rule.remedy or rule.explanation},
            "defaultConfiguration": {"level": rule.severity.value},
            "properties": {"class": rule.bug_class.name, "threads": list(rule.threads)},
        }
        for rule in (*RULES.values(), *ENGINE_RULES.values(), *OBSERVED_RULES.values())
    ]
    drifts = {
        "id": DRIFT_CODE,
        "name": "drift",
        "shortDescription": {"text": "A plan is not what its spec gives, or what an engine did."},
        "help": {
            "text": "Plan the spec again, or change it; for an observation, look for what the engine did otherwise."
        },
    }
    results = [_result(p.finding.rule.code, p.severity.value, p.finding.text, p) for p in placed]
    results += [_result(DRIFT_CODE, "error", d.message, d) for d in drift]
    driver = {"name": "capture-planner", "version": version, "rules": [*rules, drifts]}
    run = {"tool": {"driver": driver}, "results": results}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _result(code: str, level: str, text: str, place: FileFinding | Drift) -> dict[str, Any]:
    region = {"startLine": place.line, "startColumn": place.column}
    location = {"physicalLocation": {"artifactLocation": {"uri": place.file}, "region": region}}
    return {"ruleId": code, "level": level, "message": {"text": text}, "locations": [location]}
