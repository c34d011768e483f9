"""What tests of the commands share: what one did, names of shipped files, and a spec that runs in a moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class CommandResult:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The one JSON document that it printed; an error fails the test with its text."""
        return self.document(0)

    def document(self, code: int) -> Any:
        """Return the one JSON document that it printed, beside the exit code that is expected."""
        assert self.code == code, self.err
        return json.loads(self.out)


Run = Callable[..., CommandResult]

SPEC = "plans/specs/qwen3-8b-eagle3.yaml"
PLAN = "plans/locked/qwen3-8b-eagle3.h100.yaml"
TINY = "plans/specs/tiny-reference-cpu.yaml"
TINY_PLAN = "plans/locked/tiny-reference-cpu.cpu.yaml"


def edited(name: str, source: str, *changes: tuple[str, str]) -> str:
    """Write a copy of a file in which each text is replaced, and return its name."""
    text = Path(source).read_text("utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    Path(name).write_text(text, "utf-8")
    return name


def spec_for(num_reqs: int) -> str:
    """Return the spec of a tiny model with two drafts, for so many requests."""
    return f"""\
version: 1
model: {{name: tiny, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 16, hidden_size: 32,
        vocab_size: 64, max_model_len: 64, dtype: float32}}
limits: {{max_num_reqs: {num_reqs}, max_num_tokens: 12}}
mode: FULL_AND_PIECEWISE
backend: reference
speculative: {{method: eagle, num_tokens: 2}}
sizes: {{policy: explicit, num_reqs: [1, {num_reqs}], num_tokens: [4, 12]}}
"""
