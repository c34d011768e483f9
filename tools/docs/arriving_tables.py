"""Engines under requests that keep arriving, from the newest files of vllm_arriving.py and sglang_arriving.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import NO_VALUE, RESULTS, files, table

VLLM, TURNS, SGLANG = "vllm_arriving*.json", "vllm_turns*.json", "sglang_arriving*.json"
HEADLINE = "0.6b-3"
ITSELF, EXPERT, TUNED = COLUMNS = ("by itself", "expert's list", "tuned")
MISSING = "Not measured yet."

SHAPES = {"0.6b": "Qwen3-0.6B", "8b": "Qwen3-8B", "30b-a3b": "Qwen3-30B-A3B"}
# Of the models as published; a run may have fewer.
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
        if ITSELF in (result["medians"] if pattern != TURNS else result["turns"]["all_loads"]["step_ms"] or ())
    }


def grid(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the groups that have an expert's list, by shape, those with a drafter first."""
    found = [(name, result) for name, result in newest(VLLM, folder).items() if EXPERT in result["medians"]]
    return dict(sorted(found, key=lambda each: ([*SHAPES].index(each[1]["shape"]), -each[1]["k"])))


def title(result: Mapping[str, Any]) -> str:
    """Return what a group of the grid is called: its shape, its layers where they are fewer, and K."""
    shape, layers = result["shape"], result["layers"]
    fewer = "" if layers == LAYERS[shape] else f", {layers} of {LAYERS[shape]} layers"
    return f"{SHAPES[shape]}{fewer}, {'K=' + str(result['k']) if result['k'] else 'no drafter'}"


def spread(values: Sequence[float] | None, form: str) -> str:
    """Return a median, with the least and the largest value where there are several rounds."""
    if values is None:
        return NO_VALUE
    middle, least, most = (form.format(value) for value in values)
    return middle if least == most else f"{middle} ({least} to {most})"


def ratio(result: Mapping[str, Any], column: str, load: str, figure: str) -> str:
    """Return the ratio of a figure to the baseline of the same round."""
    return spread(result["ratios"].get(f"{column} / {ITSELF}", {}).get(load, {}).get(figure), "{:.2f}")


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


def throughput(folder: Path = RESULTS) -> str:
    """Return tokens per second of each load by group, and latencies, as ratios to the engine by itself."""
    rows = [
        (
            title(result),
            load,
            _middle(result, ITSELF, load, "tokens_per_second", "{:,.0f}"),
            *[ratio(result, column, load, "tokens_per_second") for column in (EXPERT, TUNED)],
            ratio(result, TUNED, load, "itl_ms_p99"),
        )
        for result in grid(folder).values()
        for load in result["medians"].get(TUNED, {})
    ]
    columns = ("deployment", "load", f"{ITSELF}, tokens/s", EXPERT, TUNED, "tuned, p99 latency")
    return table(columns, rows, text=2) if rows else MISSING


def start(folder: Path = RESULTS) -> str:
    """Return what each engine captured, and how many steps of the target run without a graph: of the three in turn."""
    columns = ("deployment", "graphs", "capture, s", "graph memory, MiB", "target's steps without a graph")
    rows = [(title(result), *_start(result)) for result in grid(folder).values()]
    return table(columns, rows) if rows else MISSING


def _start(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield graphs, seconds, memory and steps without a graph of the three engines."""
    facts = [found for column in COLUMNS if (found := engine(result, column))]
    yield "/".join(str(sum(each["graphs"].values())) for each in facts)
    yield "/".join(f"{each['capture_seconds']:.1f}" for each in facts)
    # Other engines of the GPU gave memory back meanwhile where captures seem to have taken none.
    yield "/".join(f"{each['graph_mib']:,.0f}" if each["graph_mib"] else NO_VALUE for each in facts)
    shares = (result["without_graph"].get(column, {}) for column in COLUMNS)
    yield "/".join(f"{each['target']:.1%}" for each in shares if each)


def promises(folder: Path = RESULTS) -> str:
    """Return how far the mean step that ``tune`` stated is off the measured one, as observed and under the plan."""
    rows = [
        (name, *(_promise(result["promise"].get(when)) for when in ("before", "after")))
        # What took turns has one host for both engines.
        for name, result in (newest(VLLM, folder) | newest(TURNS, folder)).items()
    ]
    return table(("group", "as observed, ms", "under the plan, ms"), rows) if rows else MISSING


def _promise(found: Mapping[str, float] | None) -> str:
    if found is None:
        return NO_VALUE
    # Times by how much the host slowed down since the observation, as the engine by itself shows.
    stated = found["stated_ms"] * found.get("drift", 1.0)
    return f"{stated:.2f}, took {found['measured_ms']:.2f} ({found['off']:+.1%})"


def turns(folder: Path = RESULTS) -> str:
    """Return the time of an equal step per plan, relative to the expert's list or else to the engine by itself."""
    found = newest(TURNS, folder)
    steps = {name: result["turns"]["all_loads"]["step_ms"] for name, result in found.items()}
    others = sorted({column for columns in steps.values() for column in columns} - {*COLUMNS})
    rows = []
    for name, result in found.items():
        reference = EXPERT if EXPERT in steps[name] else ITSELF
        ratios = {column: each / steps[name][reference] for column, each in steps[name].items()}
        errors = result["turns"]["all_loads"]["errors"]
        error = errors.get(f"{TUNED} / {reference}", errors.get(f"{reference} / {TUNED}"))
        rows.append(
            (
                title(result) if EXPERT in steps[name] else name.replace("-", " "),
                f"{steps[name][ITSELF]:.2f}",
                f"{ratios[ITSELF]:.3f}",
                NO_VALUE if error is None else f"{ratios[TUNED]:.3f} ± {error:.3f}",
                *[f"{ratios[column]:.3f}" if column in ratios else NO_VALUE for column in others],
            )
        )
    return table(("deployment", f"{ITSELF}, ms", ITSELF, TUNED, *others), rows) if rows else MISSING


def deployments(folder: Path = RESULTS) -> str:
    """Return the gain in tokens per second of the other deployments, by load, and what ``tune`` said."""
    found = {name: result for name, result in newest(VLLM, folder).items() if EXPERT not in result["medians"]}
    rows = [
        (
            name.replace("-", " "),
            "/".join(str(sum(engine(result, column)["graphs"].values())) for column in (ITSELF, TUNED)),
            (result.get("tune") or {}).get("verdict") or NO_VALUE,
            # These groups have two loads, in the order of the columns.
            *[ratio(result, TUNED, load, "tokens_per_second") for load in result["loads"]],
        )
        for name, result in found.items()
    ]
    columns = ("deployment", "graphs", "`tune` says", "tuned, wave", "tuned, 32 in flight")
    return table(columns, rows) if rows else MISSING


def targets(pattern: str = VLLM, folder: Path = RESULTS) -> str:
    """Return how many targets of each kind are met, by the newest file that has each group."""
    kinds: dict[str, list[bool]] = {}
    for name, result in newest(pattern, folder).items():
        # A file has the targets of all its groups, as ``group: load, target (figures)``.
        for text, met in result["file"]["targets"].items():
            group, _, target = text.partition(" (")[0].partition(": ")
            if group == name:
                kinds.setdefault(target.rpartition(", ")[2], []).append(met)
    rows = [(kind, f"{sum(found)} of {len(found)}") for kind, found in kinds.items()]
    return table(("target", "met"), rows) if rows else MISSING


def machine(pattern: str = VLLM, folder: Path = RESULTS) -> str:
    """Return the machine and the versions of the newest results, with a link to each file, which has its command."""
    found = list(newest(pattern, folder).values())
    if not found:
        return MISSING
    host, facts = found[-1]["file"]["provenance"], engine(found[-1], ITSELF)
    name = next(name for name in ("vllm", "sglang") if name in facts)
    names = (path.stem for path in sorted(folder.glob(pattern)))
    return (
        f"{facts['device']}, {host['hardware']['cores']} cores of {host['hardware']['cpu']}, {name} {facts[name]}, "
        f"torch {facts['torch']}, {host['python']}, {host['date'][:10]}. The commands: "
        + ", ".join(f"[{each}](../../benchmarks/results/{each}.json)" for each in names)
    )


def sglang(folder: Path = RESULTS) -> str:
    """Return SGLang's tokens per second and what it captured."""
    found = newest(SGLANG, folder)
    rows: list[Sequence[object]] = [
        (
            load,
            _middle(result, ITSELF, load, "tokens_per_second", "{:,.0f}"),
            *[ratio(result, column, load, "tokens_per_second") for column in (EXPERT, TUNED)],
        )
        for result in found.values()
        for load in result["loads"]
    ]
    return table(("load", f"{ITSELF}, tokens/s", EXPERT, TUNED), rows) if rows else MISSING


PARTS: dict[str, Callable[[], str]] = {
    "arriving-headline": headline,
    "arriving-machine": machine,
    "arriving-throughput": throughput,
    "arriving-start": start,
    "arriving-promises": promises,
    "arriving-deployments": deployments,
    "arriving-turns": turns,
    "arriving-targets": targets,
    "arriving-targets-turns": functools.partial(targets, TURNS),
    "arriving-sglang": sglang,
}
