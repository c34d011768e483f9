"""Read the newest files in ``benchmarks/results``, and write their figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = "not measured"
NO_VALUE = "-"
"""A figure that does not apply."""
MIBI = 1 << 20

# Files -----------------------------------------------------------------------------------------


def files(pattern: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the content of the matching files, oldest first, each with its ``name``."""
    documents = [{"name": path.name, **json.loads(path.read_text("utf-8"))} for path in sorted(folder.glob(pattern))]
    # By the date inside: a name has the day alone, and words in front of it.
    return sorted(documents, key=lambda file: datetime.fromisoformat(file["provenance"]["date"]))


def bench(folder: Path = RESULTS) -> dict[str, Any]:
    """Return the newest bench; raises ``FileNotFoundError``."""
    documents = files("gpu_bench-*.json", folder)
    if not documents:
        raise FileNotFoundError(f"{folder.name} has no gpu_bench-*.json: run benchmarks/gpu_bench.py --output")
    return documents[-1]


def campaigns(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the newest result of each backend in the equality campaign, with its ``file``, by name."""
    newest = {
        result["backend"]: {**result, "file": file}
        for file in files("gpu_equality-*.json", folder)
        for result in file["results"]
        if "steps" in result
    }
    return dict(sorted(newest.items()))


def reports(k: int | None = None) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the measured plans of the bench, by backend and K."""
    by_name = {}
    for name, report in bench()["results"].items():
        backend, _, drafts = name.partition(", K=")
        if k in (None, int(drafts)):
            by_name[backend, int(drafts)] = report
    return dict(sorted(by_name.items()))


def of(figure: str, k: int | None = None) -> Iterable[tuple[str, Any]]:
    """Yield each backend that measured a figure, with the figure."""
    for (backend, _), report in reports(k).items():
        # A figure that is empty was not measured.
        if report.get(figure):
            yield backend, report[figure]


# Writing ---------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], text: int = 1) -> str:
    """Return a table whose first ``text`` columns are text, the others numbers."""
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * text}{' --: |' * (len(columns) - text)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def scaled(value: float | None, scale: float, digits: int) -> str:
    """Return a value times ``scale``."""
    return NO_VALUE if value is None else f"{value * scale:,.{digits}f}"


def ms(seconds: float | None) -> str:
    """Return seconds as milliseconds."""
    return scaled(seconds, 1e3, 2)


def us(seconds: float | None) -> str:
    """Return seconds as microseconds."""
    return scaled(seconds, 1e6, 1)


def mib(size: float | None) -> str:
    """Return bytes as MiB."""
    return scaled(size, 1 / MIBI, 1)


def times(value: float | None) -> str:
    """Return a ratio."""
    return scaled(value, 1, 3 if value is not None and value < 10 else 1)


def percent(part: float) -> str:
    """Return a share in %; a small share that is not zero is not shown as 0."""
    return f"{100 * part:.1f} %" if part >= 0.0005 or not part else "under 0.1 %"


def share(part: float, whole: float) -> str:
    """Return ``part / whole`` in %."""
    return percent(part / whole) if whole else NO_VALUE


def singular(text: str) -> str:
    """Return a sentence with "1 request" in place of "1 requests"."""
    return re.sub(r"\b1 requests", "1 request", text)
