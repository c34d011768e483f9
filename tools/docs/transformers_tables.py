"""What a plan changes in transformers, from the newest file of benchmarks/transformers_in_process.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from results import files, table

ROWS = {
    "graphs at warm-up": ("graphs_at_warmup", "{:,.0f}"),
    "captures while serving": ("captures_while_serving", "{:,.0f}"),
    "warm-up, s": ("warmup_seconds", "{:.1f}"),
    "equal requests, tokens/s": ("fixed: tokens_per_second", "{:,.0f}"),
    "varied requests, tokens/s": ("varied: tokens_per_second", "{:,.0f}"),
    "varied requests, median step, ms": ("varied: step_p50_ms", "{:.1f}"),
    "varied requests, slowest of 100 steps, ms": ("varied: step_p99_ms", "{:.1f}"),
}


def _newest() -> dict[str, Any]:
    return files("transformers_in_process-*.json")[-1]


def _cell(value: Mapping[str, float] | float, form: str) -> str:
    if not isinstance(value, Mapping):
        return form.format(value)
    middle, least, most = (form.format(value[name]) for name in ("median", "least", "most"))
    return f"{middle} ({least} to {most})"


def figures() -> str:
    """Return medians over the rounds, with the least and the most."""
    contenders = _newest()["results"]["summary"]
    rows = [(text, *[_cell(each[name], form) for each in contenders.values()]) for text, (name, form) in ROWS.items()]
    return table(("", *("by itself" if name == "stock" else "under a plan" for name in contenders)), rows)


def machine() -> str:
    """Return the machine, the versions and the command."""
    file = _newest()
    host, packages = file["provenance"], file["provenance"]["packages"]
    return (
        f"{host['hardware']['gpu']}, transformers {packages['transformers']}, torch {packages['torch']}, "
        f"{host['date'][:10]}: `{host['command']}`"
    )


PARTS: dict[str, Callable[[], str]] = {"transformers-figures": figures, "transformers-machine": machine}
