"""The last rewrites of vLLM's mode, by the attention backends (``resolve_cudagraph_mode_and_sizes``)."""

from __future__ import annotations

from collections.abc import Callable

from capture_planner.engines.parsing import refusal
from capture_planner.modes import GraphMode, GraphSupport


def resolve_mode(
    mode: GraphMode,
    *,
    support: GraphSupport,
    backend: str,
    query_len: int,
    splits_attention: bool,
    graph_partition: bool,
    compiles: bool,
    piecewise_capture: bool,
    note: Callable[[str, GraphMode, GraphMode, str], None],
) -> GraphMode:
    """Return the mode that the weakest ``backend`` supports; raises ``FlagError`` if it supports none.

    ``query_len`` is 1 + K, ``compiles`` means vLLM's own piecewise compilation; ``note`` is called for each
    rewrite with its rule, the modes before and after, and a message.
    """

    def step(rule: str, after: GraphMode, message: str) -> GraphMode:
        note(rule, mode, after, f"{message}, so {mode.value} becomes {after.value}")
        return after

    # In vLLM's order: what one step leaves is the request of the next, so the order decides the result.
    if mode.mixed_mode is GraphMode.FULL and support < GraphSupport.ALWAYS:
        if support is GraphSupport.NEVER:
            message = f"vLLM cannot run {mode.value}: {backend} captures no attention"
            raise refusal("--compilation-config", message, "ask for PIECEWISE", "cudagraph_mode")
        after = GraphMode.FULL_AND_PIECEWISE if splits_attention else GraphMode.FULL_DECODE_ONLY
        mode = step("mixed-support", after, f"{backend} captures no mixed batches")
    if mode.decode_mode is GraphMode.FULL and support is GraphSupport.NEVER:
        pieces = compiles and (splits_attention or graph_partition)  # inductor's partitions leave attention out too
        after = GraphMode.PIECEWISE if pieces else GraphMode.NONE
        mode = step("decode-support", after, f"{backend} captures no attention at all")
    if mode.decode_mode is GraphMode.FULL and query_len > 1 and support < GraphSupport.UNIFORM_BATCH:
        after = GraphMode.PIECEWISE if splits_attention else GraphMode.NONE
        message = f"{backend} captures decodes of one token, and they have {query_len}"
        mode = step("speculative-support", after, message)
    if mode.has_piecewise and not piecewise_capture:
        mode = step("piecewise-capture", mode.without_piecewise, "nothing is compiled piecewise")
    return mode
