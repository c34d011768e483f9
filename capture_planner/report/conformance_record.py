"""What the conformance suite was asked, what came of it, and the JSON of both."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from capture_planner.codec import json_of, plain, plain_fields
from capture_planner.codec.plain import plain_some
from capture_planner.conformance import AuditResult, Log, SearchProfile, SuiteResult, Verdict, loads, verdicts
from capture_planner.conformance.case_text import describe_case
from capture_planner.modes import GraphMode, Role
from capture_planner.records.environment import Environment
from capture_planner.records.text import counted


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
