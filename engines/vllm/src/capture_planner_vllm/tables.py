"""Tables as JSON: what was recorded from the release (flags, names), and rules that are lists."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def _load(file: str) -> dict[str, Any]:
    text = (resources.files(__package__) / file).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def flag_table() -> dict[str, dict[str, Any]]:
    """Return every flag of ``vllm serve`` by its name in vLLM: its spellings, kind, and choices."""
    return _load("flags.json")


def names() -> dict[str, list[str]]:
    """Return the names of vLLM's JSON fields, backends, methods and architectures."""
    return _load("names.json")


def rules() -> dict[str, Any]:
    """Return the emulation's own tables: flags with their help, and what is ignored or not emulated."""
    return _load("rules.json")


def older() -> dict[str, Any]:
    """Return what older releases called differently, and what they do differently by default."""
    return _load("history.json")
