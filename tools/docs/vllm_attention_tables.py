"""The tables of vLLM's attention backends in the conformance suite, from the newest ``vllm_backends-*.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from conformance_tables import row_of
from results import NO_VALUE, RESULTS, files, table

CASES = ("vllm_flash_attn", "vllm_triton_attn")
AS_IS = " as is"

THREADS = {"written": ("M: padded rows of the output are left unwritten, and hold what was in the pool", "vllm#57136")}
"""The class of a finding by the check that failed, and the thread where it was reported."""


def newest(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the newest result of each case that was run, with its ``file``, by name."""
    return {
        result["case"]: {**result, "file": file}
        for file in files("vllm_backends-*.json", folder)
        for result in file["results"]
        if "skipped" not in result and result["scenes"]
    }


def results(folder: Path = RESULTS) -> str:
    """What each backend was put through, at which versions, and what was found."""
    found = newest(folder)
    columns = ("backend", "date", "on", "versions", "result", "scenes", "steps", "forwards", "attacks")
    rows = [row_of(name, found.get(name)) for name in dict.fromkeys((*CASES, *sorted(found)))]
    return table(columns, rows, text=5)


def findings(folder: Path = RESULTS) -> str:
    """Each kind of finding, with its class and thread; a kind is a check and a role."""
    rows = [row for name, result in sorted(newest(folder).items()) for row in _kinds(name, result)]
    columns = ("backend", "check", "in", "class", "thread", "the first one", "times")
    return table(columns, rows or [(NO_VALUE,) * len(columns)], text=6)


def _kinds(name: str, result: dict[str, Any]) -> Iterable[tuple[object, ...]]:
    first: dict[tuple[str, str], str] = {}
    times: Counter[tuple[str, str]] = Counter()
    for finding in result["findings"]:
        kind = finding["check"], finding.get("role") or NO_VALUE
        first.setdefault(kind, finding["message"])
        times[kind] += 1
    for check, role in times:
        what, thread = THREADS.get(check, ("not classified", NO_VALUE))
        yield name, check, role, what, thread, first[check, role], times[check, role]


PARTS: dict[str, Callable[[], str]] = {"vllm-attention": results, "vllm-attention-findings": findings}
