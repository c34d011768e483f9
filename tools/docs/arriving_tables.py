"""Engines under requests that keep arriving, from the newest files of vllm_arriving.py and sglang_arriving.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import NO_VALUE, RESULTS, files, percent, table

VLLM, SGLANG = "vllm_arriving*.json", "sglang_arriving*.json"
HEADLINE = "0.6b-3"
ITSELF, EXPERT, TUNED = COLUMNS = ("by itself", "expert's list", "tuned")
MISSING = "Not measured yet."

SHAPES = {"0.6b": "Qwen3-0.6B", "8b": "Qwen3-8B", "30b-a3b": "Qwen3-30B-A3B"}
LAYERS = {"0.6b": 28, "8b": 36, "30b-a3b": 48}

ARRIVING = (
    "vLLM 0.33 in its default mode on an H200, with an EAGLE-3 drafter (K=3), under requests that keep arriving: as it "
    "is, with a list that an engineer wrote by hand, and under the plan that `tune` made of one observation:"
)


def newest(pattern: str, folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the newest result of each group in which an engine by itself was measured, with its ``file``."""
    return {
        name: {**result, "file": file}
        for file in files(pattern, folder)
        for name, result in file["results"].items()
        if ITSELF in result["medians"]
    }


def grid(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the groups that have an expert's list: shapes and draft lengths."""
    return {name: result for name, result in newest(VLLM, folder).items() if EXPERT in result["medians"]}


def title(result: Mapping[str, Any]) -> str:
    """Return what a group of the grid is called: its shape, its layers where they are fewer, and K."""
    shape, layers = result["shape"], result["layers"]
    fewer = "" if layers == LAYERS[shape] else f", {layers} of {LAYERS[shape]} layers"
    return f"{SHAPES[shape]}{fewer}, {'K=' + str(result['k']) if result['k'] else 'no drafter'}"


def cell(result: Mapping[str, Any], column: str, load: str, figure: str, form: str = "{:,.0f}") -> str:
    """Return the median of a figure, with the least and the largest value where there are several rounds."""
    values = result["medians"].get(column, {}).get(load, {}).get(figure)
    if values is None:
        return NO_VALUE
    middle, least, most = (form.format(value) for value in values)
    return middle if least == most else f"{middle} ({least} to {most})"


def engine(result: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    """Return the facts of an engine; where ``tune`` keeps what is, those of the engine by itself."""
    engines = result["engines"]
    found: Mapping[str, Any] = engines.get(column) or (engines[ITSELF] if column == TUNED else {})
    return found


def headline(folder: Path = RESULTS) -> str:
    """Return the README's table, with what it is about."""
    result = grid(folder).get(HEADLINE)
    if result is None or TUNED not in result["medians"]:
        return MISSING
    rows: list[Sequence[object]] = [
        (f"tokens/s, {load}", *[_middle(result, column, load, "tokens_per_second", "{:,.0f}") for column in COLUMNS])
        for load in result["loads"]
    ]
    wave = result["loads"][0]
    rows += [
        (
            f"inter-token latency, p99, {wave}",
            *[_middle(result, column, wave, "itl_ms_p99", "{:.1f} ms") for column in COLUMNS],
        ),
        ("CUDA graphs", *[str(sum(engine(result, column)["graphs"].values())) for column in COLUMNS]),
        ("capture", *[f"{engine(result, column)['capture_seconds']:.1f} s" for column in COLUMNS]),
    ]
    return f"{ARRIVING}\n\n{table(('', *COLUMNS), rows)}"


def _middle(result: Mapping[str, Any], column: str, load: str, figure: str, form: str) -> str:
    values = result["medians"].get(column, {}).get(load, {}).get(figure)
    return NO_VALUE if values is None else form.format(values[0])


def figures(figure: str, form: str) -> Callable[[], str]:
    """Return a part: a figure of each load, by group."""

    def part(folder: Path = RESULTS) -> str:
        rows = [
            (title(result), load, *[cell(result, column, load, figure, form) for column in COLUMNS])
            for result in grid(folder).values()
            for load in result["loads"]
        ]
        return table(("deployment", "load", *COLUMNS), rows, text=2) if rows else MISSING

    return part


def start(folder: Path = RESULTS) -> str:
    """Return what each engine captured, and how much of the steps runs without a graph."""
    rows = [row for result in grid(folder).values() for row in _start(result)]
    return table(("deployment", "", *COLUMNS), rows, text=2) if rows else MISSING


def _start(result: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    facts = [engine(result, column) for column in COLUMNS]
    roles = [role.replace("_", " ") for role in facts[0]["graphs"]]
    shares = [result["without_graph"].get(column, {}) for column in COLUMNS]
    yield (
        title(result),
        f"graphs of {', '.join(roles)}",
        *[" + ".join(map(str, fact["graphs"].values())) if fact else NO_VALUE for fact in facts],
    )
    yield "", "capture, s", *[f"{fact['capture_seconds']:.1f}" if fact else NO_VALUE for fact in facts]
    yield "", "graph memory, MiB", *[f"{fact['graph_mib']:,.0f}" if fact else NO_VALUE for fact in facts]
    yield (
        "",
        f"steps without a graph, {', '.join(roles)}",
        *[" / ".join(map(percent, each.values())) or NO_VALUE for each in shares],
    )


def promises(folder: Path = RESULTS) -> str:
    """Return the mean step that ``tune`` stated, and the one that was measured, before and under the plan."""
    rows = [
        (
            name,
            "as observed" if when == "before" else "under the plan",
            f"{each['stated_ms']:.2f} ms",
            f"{each['measured_ms']:.2f} ms",
            f"{each['off']:+.1%}",
        )
        for name, result in newest(VLLM, folder).items()
        for when, each in result["promise"].items()
    ]
    return table(("group", "", "stated", "measured", "off by"), rows, text=2) if rows else MISSING


def deployments(folder: Path = RESULTS) -> str:
    """Return tokens per second of the other deployments, by itself and tuned, and what ``tune`` said."""
    rows = [
        (
            name.replace("-", " "),
            load,
            cell(result, ITSELF, load, "tokens_per_second"),
            cell(result, TUNED, load, "tokens_per_second"),
            (result.get("tune") or {}).get("verdict") or NO_VALUE,
        )
        for name, result in newest(VLLM, folder).items()
        if EXPERT not in result["medians"]
        for load in result["loads"]
    ]
    return table(("deployment", "load", ITSELF, TUNED, "`tune` says"), rows, text=2) if rows else MISSING


def targets(pattern: str = VLLM, folder: Path = RESULTS) -> str:
    """Return how many targets are met, by the newest file that has each group, and those that are missed."""
    found = {
        text: met
        for name, result in newest(pattern, folder).items()
        for text, met in result["file"]["targets"].items()
        if text.startswith(f"{name}: ")
    }
    if not found:
        return MISSING
    lines = [f"{sum(found.values())} of {len(found)} targets are met."]
    missed = [f"- {text}" for text, met in found.items() if not met]
    return "\n".join([*lines, "", "Missed:", "", *missed] if missed else lines)


def machine(pattern: str = VLLM, folder: Path = RESULTS) -> str:
    """Return the machine, the versions and the commands of the newest results."""
    found = list(newest(pattern, folder).values())
    if not found:
        return MISSING
    commands = dict.fromkeys(result["file"]["provenance"]["command"] for result in found)
    host, facts = found[-1]["file"]["provenance"], engine(found[-1], ITSELF)
    name = next(name for name in ("vllm", "sglang") if name in facts)
    return (
        f"{facts['device']}, {host['hardware']['cores']} cores of {host['hardware']['cpu']}, {name} {facts[name]}, "
        f"torch {facts['torch']}, {host['python']}, {host['date'][:10]}: " + ", ".join(f"`{each}`" for each in commands)
    )


def sglang(folder: Path = RESULTS) -> str:
    """Return SGLang's tokens per second, graphs and capture."""
    found = newest(SGLANG, folder)
    rows: list[Sequence[object]] = [
        (f"tokens/s, {load}", *[cell(result, column, load, "tokens_per_second") for column in COLUMNS])
        for result in found.values()
        for load in result["loads"]
    ]
    rows += [row[1:] for result in found.values() for row in _start(result)]
    return table(("", *COLUMNS), rows) if rows else MISSING


PARTS: dict[str, Callable[[], str]] = {
    "arriving-headline": headline,
    "arriving-machine": machine,
    "arriving-throughput": figures("tokens_per_second", "{:,.0f}"),
    "arriving-itl-p99": figures("itl_ms_p99", "{:.1f}"),
    "arriving-start": start,
    "arriving-promises": promises,
    "arriving-deployments": deployments,
    "arriving-targets": targets,
    "arriving-sglang": sglang,
}
