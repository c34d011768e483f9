"""Dumps of graphs, for a person to read or to compare: files of a folder, and the text of a recorded operator."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from capture_planner.errors import RunError
from capture_planner.records.batch import Entry
from capture_planner.runtime.graphs.graph import Graph
from capture_planner.runtime.graphs.pool import OwnTensor


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
    except OSError as error:
        raise RunError(f"{folder}: graphs cannot be dumped: {error}; name another folder") from error
    return files


def write_lines(stem: Path, items: Iterable[object]) -> list[Path]:
    """Write each item in a line of ``stem.txt``, and return the file."""
    file = stem.with_name(f"{stem.name}.txt")
    file.write_text("".join(f"{item}\n" for item in items), encoding="utf-8")
    return [file]


def operator_text(op: Any, args: Any, kwargs: Any, results: Any) -> str:
    """Return an operator with its arguments; a tensor is its dtype and shape, after + where it lies in the pool."""
    given = [*map(_text, args), *(f"{name}={_text(value)}" for name, value in kwargs.items())]
    landing = [_text(result) for result in results if result is not None]
    return f"{op}({', '.join(given)})" + (f" -> {', '.join(landing)}" if landing else "")


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor | OwnTensor):
        own = "+" if isinstance(value, OwnTensor) else ""
        return f"{own}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
