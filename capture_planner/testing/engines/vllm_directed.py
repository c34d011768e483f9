"""Command lines of vLLM that hardly any draw leads to, each with what vLLM answers on an H100.

The oracle gives them to vLLM, and the tests to us. Numbers in comments are lines of the release's files.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from capture_planner.testing.engines.vllm import Case

REFUSED: dict[str, Any] = {}
"""Stands for the answer of a command line that vLLM refuses."""


def _drafts(target: str, **config: Any) -> str:
    return f"{{models}}/{target} -sc {shlex.quote(json.dumps(config))}"


def _suffix(part: str, value: Any) -> str:
    return _drafts("dense", method="suffix", num_speculative_tokens=3, **{f"suffix_decoding_{part}": value})


DIRECTED: dict[str, dict[str, Any]] = {
    # config/speculative.py 1732: without a number, the depth of the tree is one; 1741: its ranges
    _drafts("dense", method="suffix", suffix_decoding_max_tree_depth=7): {"K": 7},
    _drafts("dense", method="suffix"): {"K": 24},
    _suffix("max_tree_depth", 0): REFUSED,
    _suffix("max_cached_requests", -1): REFUSED,
    _suffix("max_spec_factor", -0.5): REFUSED,
    _suffix("min_token_prob", 1.5): REFUSED,
    _suffix("min_token_prob", None): REFUSED,
}


def directed() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield each command line with the parts of the answer that it is about; ``REFUSED`` for a refusal."""
    for line, answer in DIRECTED.items():
        words = shlex.split(line)
        variables = []
        while words[0].startswith("VLLM_"):
            name, _, value = words.pop(0).partition("=")
            variables.append((name, value))
        yield Case(command=tuple(words), environment="h100", variables=tuple(variables)), answer
