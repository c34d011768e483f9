"""``diff`` of two JSON reports of ``run``: which of their graphs are made of something else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from capture_planner.analysis.diff import Change, changed
from capture_planner.codec import structure
from capture_planner.errors import CapturePlannerError, InvalidValue
from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.records.fingerprint import Fingerprint

MAX_BYTES = 1 << 28
"""A report has a row for every forward."""

Graphs = Mapping[tuple[Role, Entry], Fingerprint | None]


def run_graphs(path: str) -> Graphs | None:
    """Return the graphs of a JSON report of ``run`` with their fingerprints; None for any other file.

    Raises ``CapturePlannerError`` for a report whose graphs cannot be read.
    """
    file = Path(path)
    if file.suffix != ".json" or not file.is_file() or file.stat().st_size > MAX_BYTES:
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # the reader of plans says what is wrong with it
    if not (isinstance(data, dict) and {"captured", "served_from", "forwards"} <= data.keys()):
        return None
    try:
        return dict(map(_graph, data["captured"]["entries"]))
    except (InvalidValue, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CapturePlannerError(
            f"{path}: its captured.entries cannot be read ({reason}); run the plan again"
        ) from None


def _graph(row: Mapping[str, Any]) -> tuple[tuple[Role, Entry], Fingerprint | None]:
    entry = structure({name: value for name, value in row["entry"].items() if value is not None}, Entry)
    found = row["fingerprint"]
    return (Role(row["role"]), entry), None if found is None else structure(found, Fingerprint)


def diff_runs(old: str, new: str) -> tuple[Change, ...] | None:
    """Return what changed in the graphs from one report of ``run`` to another; None where neither is a report.

    Raises ``click.UsageError`` where only one of them is a report, and where one has no fingerprints.
    """
    before, after = run_graphs(old), run_graphs(new)
    if before is None and after is None:
        return None
    if before is None or after is None:
        other = old if before is None else new
        raise click.UsageError(f"{other} is no JSON report of run, and the other file is; give two reports.")
    for path, graphs in ((old, before), (new, after)):
        if graphs and not any(graphs.values()):
            raise click.UsageError(
                f"{path} has no fingerprints of its graphs; install cuda-bindings, and run it again."
            )
    known, known_after = ({key: found for key, found in graphs.items() if found} for graphs in (before, after))
    changes = [
        Change(role, "fingerprint", f"{role} {entry}: {text}", entries=(entry,))
        for (role, entry), text in changed(known, known_after)
    ]
    for subject, word, keys in (
        ("added", "also captured", after.keys() - before.keys()),
        ("gone", "no longer captured", before.keys() - after.keys()),
    ):
        for role, entry in sorted(keys, key=lambda key: (key[0].value, key[1].capture_order)):
            changes.append(Change(role, subject, f"{role} {entry} is {word}", entries=(entry,)))
    return tuple(changes)
