"""FlashAttention's splits under a plan: bounded where attention is captured, FlashAttention's own choice elsewhere.

vLLM's metadata builder for FlashAttention 3 (vllm/v1/attention/backends/flash_attn.py, 0.33) bounds the splits of the
keys by 32 in every batch of at most ``max_cudagraph_capture_size`` tokens, because a captured kernel cannot have more
than it was captured with. Under that bound each call allocates float32 outputs for all splits, heads and tokens
(``out_accum`` in FlashAttention's hopper/flash_api.cpp), outside the memory that vLLM profiled: 4 GiB for 8,192 tokens
of 32 heads of 128. vLLM's own lists end at 512 tokens. A plan may have PIECEWISE graphs up to
``max_num_batched_tokens``, and attention between those runs eager, so it needs no bound.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import attrs

from capture_planner.modes import GraphMode
from capture_planner_vllm.inside.log import report
from capture_planner_vllm.inside.seam import method_problems, wrap

BACKEND = "vllm.v1.attention.backends.flash_attn"

OWN_BOUND = 512
"""Tokens of the largest graph of vLLM's own lists on Hopper: batches up to there have the bound without a plan, too."""

_REQUIRED = {"self", "common_prefix_len", "common_attn_metadata"}


@attrs.define
class FullGraphs:
    """The largest full graph of all managers that were made in this process."""

    tokens: int | None = None
    """It never shrinks: a graph that is captured under the bound is replayed under it. None: no manager was seen."""

    def add(self, manager: Any) -> None:
        """Count the full graphs in a manager's tables, the plan's or vLLM's own."""
        tables = getattr(manager, "_capture_descs", None)
        if tables is None:
            self.tokens = sys.maxsize  # its graphs may be of any size
            return
        full = [descs for mode, descs in tables.items() if mode.name == GraphMode.FULL.name]
        self.tokens = max([self.tokens or 0, *(desc.num_tokens for descs in full for desc in descs)])


FULL_GRAPHS = FullGraphs()


def bound_splits(module: ModuleType) -> None:
    """Let FlashAttention's builder bound the splits of batches up to the largest full graph, and of no larger ones."""
    known = {*_REQUIRED, "fast_build"}
    problems = [*method_problems(module, "FlashAttentionMetadataBuilder", "build", _REQUIRED, known)]
    if problems:
        lines = [
            f"attention of every batch up to the largest graph keeps room for 32 splits: {each}" for each in problems
        ]
        report(logging.WARNING, lines)
        return
    wrap(module.FlashAttentionMetadataBuilder, "build", _bounded)


def _bounded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build(builder: Any, *args: Any, **kwargs: Any) -> Any:
        own, full = getattr(builder, "max_cudagraph_size", None), FULL_GRAPHS.tokens
        # Full graphs of model runner V1, and of unknown managers, are not counted.
        if own is None or full is None:
            return original(builder, *args, **kwargs)
        # At every batch: builders are made before the managers whose graphs count, and trials raise the bound.
        builder.max_cudagraph_size = min(own, max(full, OWN_BOUND))
        try:
            return original(builder, *args, **kwargs)
        finally:
            builder.max_cudagraph_size = own

    return build
