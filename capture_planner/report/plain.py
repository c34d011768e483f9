"""The JSON of what the commands print, where it is not simply the fields of a record.

``plain`` is what ``--format json`` goes through. Classes of the layers below have their hooks here; a class
of the report layer has its hook in its own module. Runs, benches and conformance need torch: their hooks are in the
modules that report them.
"""

from __future__ import annotations

from typing import Any

from capture_planner.analysis.coverage import Cell, Coverage
from capture_planner.analysis.diff import Change
from capture_planner.analysis.explain import Explanation
from capture_planner.analysis.lint import Diagnostic, Finding
from capture_planner.codec import json_fields, json_of, plain, plain_fields
from capture_planner.codec.plain import json_some, plain_some
from capture_planner.engines.check import Diagnosis, EngineFinding
from capture_planner.engines.deployments import ObservedCoverage, runs, walk
from capture_planner.engines.emulation import CapturedGraph, Emulation
from capture_planner.engines.export import BatchDifference, Export, Loss, Proof
from capture_planner.engines.verdict import verdict
from capture_planner.records._base import grouped

__all__ = ["plain"]


json_fields(Change, subject="what")
json_fields(Loss, omit={"scope"}, says="message")
json_some(Coverage, "covered", "cells")
json_some(ObservedCoverage, "covered", "cells")
json_some(Export, "engine", "flags", "file", "sizes", "losses", "proof", "unproved")


@json_of(Explanation)
def _explanation(explained: Explanation) -> dict[str, Any]:
    return {
        "batch": plain(explained.batch),
        **plain_some(explained.answer, "mode", "entry", "padded_tokens", "padded_reqs", "reason"),
        "message": explained.message,
        "rejected": plain(explained.near_misses),
    }


@json_of(Cell)
def _cell(cell: Cell) -> dict[str, Any]:
    return plain_fields(cell, omit={"answer"}) | {
        "mode": cell.answer.mode.value,
        "entry": plain(cell.entry),
        "reason": plain(cell.answer.reason),
        "share_padded": round(cell.padded, 4),
        "worst_ratio": round(cell.worst, 4),
    }


@json_of(CapturedGraph)
def _graph(graph: CapturedGraph) -> dict[str, Any]:
    entry = plain(graph.entry)
    # An entry of a plan has these keys always; most graphs of engines have no use for them.
    own = {name: entry.pop(name) for name in ("max_query_len", "draft_steps")}
    optional = own | {"max_query_len": graph.max_query_len}
    return {"role": graph.role.value, **entry} | {name: value for name, value in optional.items() if value is not None}


@json_of(Emulation)
def _emulation(emulation: Emulation) -> dict[str, Any]:
    answers = walk(emulation)
    rows = grouped(answers, lambda one: (one.answer.mode, one.answer.reason))
    return {
        **plain_some(emulation, "engine", "version"),
        "verdict": plain(verdict(emulation, answers)),
        **plain_some(emulation, "assumptions", "notes", "sizes", "graphs"),
        "mode": plain(emulation.modes),
        "decisions": [
            plain_some(decision, "rule", "role", "before", "after", "message") for decision in emulation.decisions
        ],
        "settings": {s.name: {"value": plain(s.value), "source": s.source} for s in emulation.settings},
        "batches": [
            plain_some(run.batch, "role", "kind", "query_len", "active_loras")
            | {"first": run.first, "last": run.last, "mode": mode.value, "reason": plain(reason)}
            for (mode, reason), answers in rows.items()
            for run in runs(answers)
        ],
    }


def finding_json(finding: Finding | EngineFinding, reported: Diagnostic | Diagnosis, **own: Any) -> dict[str, Any]:
    """Return the JSON of what a rule ``reported``; ``own``: what only findings of its kind have."""
    rule = finding.rule
    return {
        **plain_some(rule, "code", "name"),
        "severity": finding.severity.value,
        "class": rule.bug_class.name,
        **plain_some(reported, "role", "message"),
        **own,
        "threads": list(rule.threads),
    }


@json_of(EngineFinding)
def _engine_finding(finding: EngineFinding) -> dict[str, Any]:
    # Without an observation the batches concerned are counted; with one, the steps.
    if finding.total is None:
        return finding_json(finding, finding.diagnosis, count=finding.diagnosis.count, mend=finding.fix)
    own = {"count": finding.diagnosis.count, "steps": finding.steps, "of": finding.total, "remedy": finding.fix}
    return finding_json(finding, finding.diagnosis, **own)


@json_of(Proof)
def _proof(proof: Proof) -> dict[str, Any]:
    return {"exact": proof.exact} | plain_fields(proof) | {"same": len(proof.same)}


@json_of(BatchDifference)
def _difference(difference: BatchDifference) -> dict[str, Any]:
    sides = {"planned": difference.planned, "emulated": difference.emulated}
    return plain_fields(difference) | {side: None if entry is None else str(entry) for side, entry in sides.items()}
