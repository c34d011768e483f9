"""The batches that recorded steps of engines are (``tests/measuring/data/log_lines.json``), by definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from support.traffic_shapes import shapes

Count = tuple[int, int]
"""Requests and tokens."""


def uniform(requests: int, tokens: int) -> int | None:
    return tokens // requests if tokens % requests == 0 else None


def batches_of_iterations(steps: Iterable[tuple[Count, Count]]) -> Counter[Any]:
    """Return what iterations are, by the definition of a batch: context and generation as (requests, tokens)."""
    counts: Counter[Any] = Counter()
    for context, generation in steps:
        requests, tokens = context[0] + generation[0], context[1] + generation[1]
        if requests and tokens:
            counts[requests, tokens, None if context[0] else uniform(requests, tokens)] += 1
    return counts


def batches_of(name: str, steps: Sequence[Any]) -> Counter[Any]:
    """Return what the recorded steps of a format come to, as ``read_batches`` counts what was read."""
    if name.startswith("vllm_iterations"):
        pairs = (
            (
                (step["num_ctx_requests"], step["num_ctx_tokens"]),
                (step["num_generation_requests"], step["num_generation_tokens"]),
            )
            for step in steps
            if not step["is_dummy"]
        )
        return batches_of_iterations(pairs)
    if name == "vllm_graph_tables":
        return Counter((tokens, True if mode == "FULL" else None) for tokens, _, mode in steps)
    if name == "forward_passes":
        return Counter(step["num_prefill_requests"] + step["num_decode_requests"] for step in steps)
    counts: Counter[Any] = Counter()
    for step in steps:
        if "prefill" in step:
            # Replayed tokens are run too.
            seqs, tokens, replayed = step["prefill"]
            counts[seqs, tokens + replayed, None] += 1
        else:
            reqs, speculative = step["decode"]
            counts[(reqs, None, None) if speculative else (reqs, reqs, 1)] += 1
    return counts


def read_batches(name: str, traffic: Any) -> Counter[Any]:
    """Return the batches that were read, by what a format says of them."""
    if name not in ("vllm_graph_tables", "forward_passes"):
        return Counter(shapes(traffic))
    counts: Counter[Any] = Counter()
    for batch in traffic.batches:
        counts[(batch.num_tokens, batch.past_prompt) if name == "vllm_graph_tables" else batch.num_reqs] += batch.count
    return counts
