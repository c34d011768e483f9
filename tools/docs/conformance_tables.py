"""The table of the conformance suite's thorough runs, from the newest files in ``benchmarks/results``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from results import NO_VALUE, NOT_MEASURED, RESULTS, files, table

from capture_planner.records.text import counted

BACKENDS = ("flash_attention", "flashinfer", "flashinfer_wrappers", "reference", "triton")
"""Those that a thorough run is wanted of; a row is there whether there is a result or not."""


def newest(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the newest result of each backend that was run, with its ``file``, by name."""
    return {
        result["case"]: {**result, "file": file}
        for file in files("conformance-*.json", folder)
        for result in file["results"]
        if "skipped" not in result
    }


def kept(folder: Path = RESULTS) -> str:
    """What each backend was put through, at which versions, and what was found."""
    results = newest(folder)
    columns = ("backend", "date", "on", "versions", "result", "scenes", "steps", "forwards", "attacks")
    rows = [row_of(name, results.get(name)) for name in dict.fromkeys((*BACKENDS, *results))]
    return "\n".join([table(columns, rows, text=5), *_remarks(results)])


def row_of(name: str, result: dict[str, Any] | None) -> tuple[object, ...]:
    """Return the row of one backend; what it lacks is not measured."""
    if result is None:
        return (name, NO_VALUE, NO_VALUE, NO_VALUE, NOT_MEASURED, *[NO_VALUE] * 4)
    provenance = result["file"]["provenance"]
    on = provenance["hardware"].get("gpu", provenance["hardware"]["cpu"])
    if "broke" in result:
        return (name, provenance["date"][:10], on, NO_VALUE, "broke", *[NO_VALUE] * 4)
    host = result["host"]
    # A host without a GPU has no driver.
    versions = {"torch": host["torch"], "driver": host.get("driver"), **_libraries(result, provenance)}
    return (
        name,
        provenance["date"][:10],
        on,
        ", ".join(f"{package} {version}" for package, version in versions.items() if version),
        "passed" if result["passed"] else counted(len(result["findings"]), "finding"),
        f"{result['scenes']:,}",
        f"{sum(result['steps'].values()):,}",
        f"{sum(each['count'] for each in result['forwards']):,}",
        len(result["audited"]),
    )


LIBRARIES = {
    "flash_attention": "flash-attn-4",
    "flashinfer": "flashinfer-python",
    "triton": "triton",
    "vllm_flash_attn": "vllm",
    "vllm_triton_attn": "vllm",
}


def _libraries(result: dict[str, Any], provenance: dict[str, Any]) -> dict[str, str]:
    """Return the version of the library that a backend is about."""
    package = LIBRARIES.get(result["backend"])
    version = provenance["packages"].get(package)
    return {package: version} if package and version else {}


def _remarks(results: dict[str, dict[str, Any]]) -> Iterable[str]:
    """Yield what was found, what broke, and fields that are over-declared, each on a line."""
    lines = []
    for name, result in results.items():
        if "broke" in result:
            lines.append(f"- {name} broke: {result['broke']}")
        lines += [f"- {name}: {each['check']}: {each['message']}" for each in result.get("findings", ())]
        roles: dict[str, list[str]] = {}
        for each in result.get("fields", ()):
            if each["verdict"] == "over-declared":
                roles.setdefault(each["field"], []).append(each["role"])
        if roles:
            fields = (f"`{field}` of {', '.join(each)}" for field, each in roles.items())
            lines.append(f"- {name}: over-declared are {'; '.join(fields)}")
    return ["", *lines] if lines else []


PARTS: dict[str, Callable[[], str]] = {"conformance": kept}
