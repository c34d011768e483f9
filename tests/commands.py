"""What tests of the commands share: what one did, and a spec that is executed in a moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen
class Ran:
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


Run = Callable[..., Ran]


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
sizes: {{policy: powers_of_two}}
"""
