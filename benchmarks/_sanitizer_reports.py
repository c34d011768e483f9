"""What compute-sanitizer prints: errors and warnings, by kernel, and which of them are known."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import attrs

SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)"),
)
_PLACE = re.compile(r"(?:\bat |access at )(?:void )?([\w:]+?)(?:<.*>)?\(.*\)\+0x")
_API = re.compile(r"on CUDA API call to (\w+)")


@attrs.frozen
class Exemption:
    """A report that is no finding of ours, and why."""

    tool: str
    where: str
    """The name of the kernel, or of the function of the driver."""
    is_open: bool
    """Whether it is a question that has no answer yet."""
    reason: str


EXEMPTIONS = (
    Exemption(
        "memcheck",
        "cuGetProcAddress_v2",
        False,
        "cuda-bindings asks the driver for each function by its name when it is imported, and takes a refusal for an "
        "answer",
    ),
    Exemption(
        "racecheck",
        "kernel_mha",
        True,
        "FlashInfer 0.6.9, XQA (csrc/xqa/mha.cu). Warps that multiply with keys hand tiles to warps that multiply with "
        "values. Both orders are kept by mbarriers in inline PTX (barriers.cuh: arrive.release, try_wait.parity), "
        "some of which cp.async arrives at. racecheck follows cuda::barrier since 2021.2; whether it follows these is "
        "not documented. TensorRT-LLM#18141 adds synchronization of asynchronous K/V tiles here, so the hazards "
        "may be real",
    ),
)


def read(output: str, tool: str) -> dict[str, Any]:
    """Return what a tool's output says: errors and warnings, of what kernels, the first of them, and what is known.

    ``unexplained`` counts the errors that ``EXEMPTIONS`` does not have, those that were not printed included.
    """
    data: dict[str, Any] = {}
    for summary in SUMMARIES:
        if last := summary.findall(output)[-1:]:
            numbers = last[0] if isinstance(last[0], tuple) else (last[0], "0")
            data |= {"errors": int(numbers[0]), "warnings": int(numbers[1])}
    if not data:
        return data
    errors = [block for block in _blocks(output) if not block[0].startswith("Warning")]
    places = Counter(_place(block) for block in errors)
    known = [each for each in EXEMPTIONS if each.tool == tool and places[each.where]]
    data["unexplained"] = data["errors"] - sum(places[each.where] for each in known)
    if errors:
        unknown = [block for block in errors if _place(block) not in {each.where for each in known}]
        data |= {"places": dict(places.most_common()), "first": (unknown or errors)[0][:8]}
    if known:
        data["known"] = {each.where: f"{'open: ' if each.is_open else ''}{each.reason}" for each in known}
    return data


def _blocks(output: str) -> list[list[str]]:
    """Return the lines of each report. An empty line of the tool ends one."""
    blocks: list[list[str]] = [[]]
    for line in output.splitlines():
        if line.startswith("========="):
            text = line.removeprefix("=========")
            if not text.strip():
                blocks.append([])
            elif "SUMMARY" not in text and "COMPUTE-SANITIZER" not in text:
                # What begins a report is not indented, what belongs to it is.
                if not text.startswith("  ") and blocks[-1]:
                    blocks.append([])
                blocks[-1].append(text.strip())
    return [block for block in blocks if block and (_API.search(block[0]) or any(map(_PLACE.search, block)))]


def _place(block: list[str]) -> str:
    """Return the kernel of a report, or the function of the driver that refused."""
    found = _API.search(block[0]) or next(filter(None, map(_PLACE.search, block)))
    return found[1].rpartition("::")[2]
