"""What is known of a model by the name that an engine is given: its own config.json, a known one, or nothing.

Nothing is downloaded. ``known_models.json`` has for each of the models that are served most the fields of its
public ``config.json`` that the engines' rules read, and where they were found.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

FOLDER, KNOWN, ASSUMED = "model", "known", "assumed"
"""Where facts come from, as settings say it: the model's own folder, the list of known models, or nowhere."""


_NO_MODEL = (".yaml", ".yml", ".json", ".jsonl", ".csv")


@attrs.frozen
class Checkpoint:
    """A model's ``config.json``, as far as it is here; empty where nothing is known."""

    name: str
    source: str
    config: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, Any]:
        """The configuration of the language model, also where it is part of a larger one."""
        inner = self.config.get("text_config")
        return {**self.config, **inner} if isinstance(inner, dict) else self.config

    @property
    def rope(self) -> tuple[Mapping[str, Any], ...]:
        """The parameters of each rotary embedding, ``rope_type`` among them; one for all layers, or by kind."""
        found = self.text.get("rope_parameters") or self.text.get("rope_scaling") or {}
        parts = [part for part in found.values() if isinstance(part, dict)] or [found]
        return tuple({"rope_type": part.get("type", "default"), **part} for part in parts if part)


def find(name: str) -> Checkpoint:
    """Return what is known of a model; a folder wins over a known model of that name.

    A plan or another file of text is no model, whether it is there or not. Raises ``OSError`` for that, and for a
    folder without a ``config.json`` that can be read, ``ValueError`` where it is no JSON object.
    """
    if Path(name).is_dir():
        text = (Path(name) / "config.json").read_text(encoding="utf-8")
        try:
            config = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deep") from None
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
        return Checkpoint(name, FOLDER, config)
    if Path(name).suffix in _NO_MODEL:
        raise FileNotFoundError(name)
    if name in known():
        return Checkpoint(name, KNOWN, known()[name])
    return Checkpoint(name, ASSUMED, {})


@cache
def known() -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of each known model's ``config.json`` by its public name."""
    text = (resources.files(__package__) / "known_models.json").read_text(encoding="utf-8")
    return {name: entry["config"] for name, entry in json.loads(text).items()}


def says(source: str, stands_for: str) -> str:
    """Return in words what facts are, as the settings show it."""
    return {FOLDER: "config.json", KNOWN: "its public config.json"}.get(source, stands_for)


def assumption(name: str | None, counts_as: str) -> str:
    """Return the clause that says what a model without facts counts as; ``name`` is None where none was named."""
    if name is None:
        return f"no model was named, and {counts_as} is taken"
    spelled = {each.lower(): each for each in known()}
    near = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.85)
    known_as = f" ({spelled[near[0]]} is one)" if near else ""
    return f"{name} is no local folder and no known model{known_as}, and counts as {counts_as}"


def note(name: str | None, counts_as: str, results: str) -> str:
    """Return what the user should know of such a model: what it counts as, what rests on it, what to do."""
    return f"{assumption(name, counts_as)}; {results}; name a folder with its config.json"
