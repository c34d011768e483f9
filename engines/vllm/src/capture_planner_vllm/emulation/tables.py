"""Tables as JSON: what was recorded from the followed release (flags, names), and rules that are lists."""

from __future__ import annotations

from functools import cache
from typing import Any

from capture_planner.engines.history import json_table
from capture_planner_vllm.emulation.releases import base, differences_to


@cache
def _flags(release: str) -> dict[str, dict[str, Any]]:
    table = json_table(__package__, "flags.json")
    for older in differences_to(release):
        table = {
            dest: with_negatives(entry, older["negatives"]) for dest, entry in (table | older["flags"]).items() if entry
        }
    return table


def with_negatives(entry: dict[str, Any], negatives: str) -> dict[str, Any]:
    """Return a flag with the negative names that begin as ``negatives`` does."""
    return entry | {"no": [name for name in entry["no"] if name.startswith(negatives)]} if "no" in entry else entry


@cache
def _names(release: str) -> dict[str, list[str]]:
    table = json_table(__package__, "names.json")
    for older in differences_to(release):
        table = dict(table)
        for kind, change in older["names"].items():
            table[kind] = [name for name in table[kind] if name not in change["without"]] + change["with"]
    return table


def flag_table() -> dict[str, dict[str, Any]]:
    """Return every flag of ``vllm serve`` by its name in vLLM: its spellings, kind, and choices."""
    return _flags(base())


def names() -> dict[str, list[str]]:
    """Return the names of vLLM's JSON fields, backends, methods and architectures."""
    return _names(base())


def rules() -> dict[str, Any]:
    """Return the emulation's own tables: flags with their help, and what is ignored or not emulated."""
    return json_table(__package__, "rules.json")


def older() -> dict[str, Any]:
    """Return what older releases called differently, and what they do differently by default."""
    return json_table(__package__, "history.json")
