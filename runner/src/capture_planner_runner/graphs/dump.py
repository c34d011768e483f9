"""Dumps of graphs, for a person to read or to compare."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from capture_planner.errors import RunError
from capture_planner.records.batch import Entry
from capture_planner_runner.graphs.graph import Graph


def dump_graphs(graphs: Iterable[tuple[str, Entry, Graph]], folder: Path) -> list[Path]:
    """Write each graph into ``folder``, under its role and entry, and return the files.

    Raises ``RunError`` where the folder cannot be written.
    """
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for role, entry, graph in graphs:
            name = re.sub(r"[^a-z0-9_]+", "-", f"{role} {entry}".lower()).strip("-")
            files += graph.dump(folder / name)
    except (OSError, RuntimeError) as error:  # the latter from CUDA
        raise RunError(f"{folder}: graphs cannot be dumped: {error}; name another folder") from error
    return files


def write_operators(stem: Path, operators: Iterable[tuple[str, str]]) -> list[Path]:
    """Write each operator with its arguments in a line of ``stem.txt``, and return the file."""
    file = stem.with_name(f"{stem.name}.txt")
    file.write_text("".join(f"{name} {arguments}\n" for name, arguments in operators), encoding="utf-8")
    return [file]
