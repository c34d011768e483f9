"""What a plan changes in real vLLM, from the newest files of benchmarks/vllm_in_process.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from results import NO_VALUE, files, table

CASES = {
    "vLLM by itself": "by itself",
    "flags of check": "with the flag of `check`",
    "plan": "under a plan",
    "plan, draft decodes eager": "draft decodes eager",
    "all eager": "all eager",
}
COMPARED = ("vLLM by itself", "flags of check", "plan")
DRAFTERS = ("plan", "plan, draft decodes eager", "all eager")


def _group(name: str) -> dict[str, Any]:
    """Return the newest measured group of that name."""
    return next(file["results"][name] for file in reversed(files("vllm_*.json")) if name in file["results"])


def _columns(group: Mapping[str, Any], cases: Collection[str]) -> dict[str, str]:
    return {case: CASES[case] for case in cases if group["medians"].get(case)}


def _loads(group: Mapping[str, Any]) -> list[str]:
    return list(next(iter(group["medians"].values())))


def headline() -> str:
    """Return the medians of tokens per second, graphs and capture of vLLM by itself, with a flag, and under a plan."""
    group = _group("main")
    cases = [case for case in COMPARED if case in group["medians"]]
    rows = [
        (
            f"tokens/s, {load} request{'s' if load != '1' else ''}",
            *[f"{_median(group, case, load):,.0f}" for case in cases],
        )
        for load in _loads(group)
        if load not in ("16", "48")
    ]
    facts = [group["engines"][case]["facts"] for case in cases]
    rows += [
        ("CUDA graphs", *[str(sum(fact["graphs"].values())) for fact in facts]),
        ("capture", *[f"{fact['capture_seconds']:.1f} s" for fact in facts]),
    ]
    return table(("", *[CASES[case] for case in cases]), rows)


def _median(group: Mapping[str, Any], case: str, load: str) -> float:
    value: float = group["medians"][case][load]["tokens_per_second"][0]
    return value


def _cell(group: Mapping[str, Any], case: str, load: str, figure: str, form: str) -> str:
    values = group["medians"][case].get(load, {}).get(figure)
    if values is None:
        return NO_VALUE
    middle, least, most = (form.format(value) for value in values)
    return f"{middle} ({least} to {most})"


def _figures(name: str, figure: str, form: str, cases: Collection[str] = COMPARED) -> Callable[[], str]:
    def part() -> str:
        group = _group(name)
        columns = _columns(group, cases)
        rows = [(load, *[_cell(group, case, load, figure, form) for case in columns]) for load in _loads(group)]
        return table(("requests", *columns.values()), rows)

    return part


def start(name: str) -> Callable[[], str]:
    """Return a part that says what each engine of a group captured, and what is left for the KV cache."""

    def part() -> str:
        group = _group(name)
        columns = _columns(group, COMPARED)
        facts = [group["engines"][case]["facts"] for case in columns]
        rows = [
            (
                "graphs of target" + ", draft prefill, draft decode" * (len(facts[0]["graphs"]) > 1),
                *[" + ".join(map(str, fact["graphs"].values())) for fact in facts],
            ),
            ("capture, s", *[f"{fact['capture_seconds']:.1f}" for fact in facts]),
            ("graph memory, MiB", *[f"{fact['graph_mib']:,.0f}" for fact in facts]),
            ("KV blocks", *[f"{fact['kv_blocks']:,}" for fact in facts]),
        ]
        return table(("", *columns.values()), rows)

    return part


def eager() -> str:
    """Return the share of steps that ran eager, by role; steps with prompts always do here."""
    group = _group("main")
    columns = _columns(group, COMPARED)
    rows = []
    for load in _loads(group):
        cells = []
        for case in columns:
            shares = group["medians"][case][load].get("eager_share", {})
            cells.append(" / ".join(f"{share:.0%}" for share in shares.values()) or NO_VALUE)
        rows.append((load, *cells))
    return table(("requests", *columns.values()), rows)


def device(name: str) -> Callable[[], str]:
    """Return a part: milliseconds of a decode pass of each role on the device, by the engines' observations."""

    def part() -> str:
        group = _group(name)
        columns = _columns(group, COMPARED)
        rows = []
        for load in _loads(group):
            passes = [[times.get(load) for times in group["engines"][case]["device_ms"].values()] for case in columns]
            cells = [" / ".join(NO_VALUE if ms is None else f"{ms:.2f}" for ms in times) for times in passes]
            rows.append((load, *cells))
        return table(("requests", *columns.values()), rows)

    return part


def steps() -> str:
    """Return how fast steps under a plan are, against the engine of the same steps without, with 95 % intervals."""
    rows = []
    for name in ("main", "large", "compile"):
        compared = _group(name)["engines"]["plan"]["steps_compared"]
        for load, figures in compared["loads"].items():
            low, high = figures["interval"]
            cells = (f"{1 / (1 + value):.3f}" for value in (figures["cost"], high, low))
            middle, least, most = cells
            rows.append((f"{name}, {load}", CASES[compared["with"]], f"{middle} ({least} to {most})", figures["pairs"]))
    return table(("group, requests", "against vLLM", "speed (95 %)", "pairs"), rows, text=2)


def targets() -> str:
    """Return which targets the newest run meets."""
    file = files("vllm_in_process-*.json")[-1]
    return table(
        ("target", "met"), [(text, "yes" if met else "**no**") for text, met in file["targets"].items()], text=2
    )


def machine() -> str:
    """Return the machine, the versions and the command of the newest run."""
    file = files("vllm_in_process-*.json")[-1]
    facts = next(engine["facts"] for group in file["results"].values() for engine in group["engines"].values())
    host = file["provenance"]
    return (
        f"{facts['device']}, {host['hardware']['cores']} cores of {host['hardware']['cpu']}, vLLM {facts['vllm']}, "
        f"torch {facts['torch']}, {host['python']}, {host['date'][:10]}: `{host['command']}`"
    )


PARTS: dict[str, Callable[[], str]] = {
    "vllm-headline": headline,
    "vllm-machine": machine,
    "vllm-throughput": _figures("main", "tokens_per_second", "{:,.0f}"),
    "vllm-tpot": _figures("main", "tpot_ms_p50", "{:.2f}"),
    "vllm-tpot-p99": _figures("main", "tpot_ms_p99", "{:.2f}"),
    "vllm-start": start("main"),
    "vllm-eager": eager,
    "vllm-drafter": _figures("main", "tokens_per_second", "{:,.0f}", DRAFTERS),
    "vllm-drafter-tpot": _figures("main", "tpot_ms_p50", "{:.2f}", DRAFTERS),
    "vllm-drafter-itl": _figures("main", "itl_ms_p50", "{:.2f}", DRAFTERS),
    "vllm-dynamic": _figures("dynamic", "tokens_per_second", "{:,.0f}"),
    "vllm-dynamic-start": start("dynamic"),
    "vllm-device": device("main"),
    "vllm-steps": steps,
    "vllm-large": _figures("large", "tokens_per_second", "{:,.0f}"),
    "vllm-large-start": start("large"),
    "vllm-large-device": device("large"),
    "vllm-compile": _figures("compile", "tokens_per_second", "{:,.0f}"),
    "vllm-compile-start": start("compile"),
    "vllm-targets": targets,
}
