"""TensorRT-LLM's rules of its decode graphs, each a function of plain numbers.

Read in NVIDIA/TensorRT-LLM, which has no release on a public index, at the last commits that could be had:

- ``tensorrt_llm/llmapi/llm_args.py`` at 0004396720054fd8e205cbf616f21f0b57c6b412: ``BaseCudaGraphConfig``,
  ``DecodeCudaGraphConfig``, the decoding configurations, ``TorchLlmArgs``;
- ``tensorrt_llm/_torch/pyexecutor/engine/cuda_graph.py`` and ``cuda_graph_runner.py`` next to it at
  c0edad93fd1620b2c95e3c2add800eb2243249bc: the filter, the key, the padding and the look-up;
- ``tensorrt_llm/_torch/pyexecutor/engine/runners/decoder/runner.py`` at
  0ea8c1debd2aae24c7fceaf5474f0c627114cc6a: which shapes are captured;
- ``tensorrt_llm/_torch/speculative/interface.py``, of which there was a text and no commit: what a method can
  do. Texts disagree on a changing draft length for vanilla MTP, which is therefore not emulated.

A *draft length* is what the engine calls so: the logical number of draft tokens, which is part of a
graph's key. A request's tokens follow from it; see ``settings.Drafting.width``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from capture_planner.planning.sizing import engine_lists as engines

DEFAULT_MAX_BATCH_SIZE = 128
"""Largest graph where the configuration names neither sizes nor a maximum."""

Shape = tuple[int, int]
"""A captured graph: requests, and the draft length that all of them have."""


def configured_sizes(batch_sizes: Sequence[int] | None, max_batch_size: int, padding: bool) -> tuple[int, ...]:
    """Return the sizes given, ascending, or where empty the list up to ``max_batch_size``, or for 0 the default."""
    if batch_sizes:
        return tuple(sorted(batch_sizes))
    return engines.tensorrt_llm_requests(max_batch_size or DEFAULT_MAX_BATCH_SIZE, padding=padding)


def with_thresholds(sizes: Sequence[int], schedule: Mapping[int, int]) -> tuple[int, ...]:
    """Return sizes with the thresholds of a draft-length schedule, those up to the largest size."""
    return tuple(sorted([*sizes, *(key for key in schedule if key <= sizes[-1] and key not in sizes)]))


def most_together(max_batch_size: int, max_num_tokens: int, width: int) -> int:
    """Return how many requests can decode together, each with up to ``width`` tokens."""
    return min(max_batch_size, max_num_tokens // width)


def admitted_sizes(sizes: Sequence[int], most: int, padding: bool) -> tuple[int, ...]:
    """Return the sizes captured for at most ``most`` requests; with padding, the first larger one becomes ``most``."""
    return engines.tensorrt_llm_admitted(sizes, most, padding=padding) if most >= 1 else ()


def scheduled_draft_len(schedule: Mapping[int, int], num_reqs: int) -> int:
    """Return the draft length of the least threshold that holds a batch, else 0; ``schedule`` ascends by threshold."""
    return next((draft_len for threshold, draft_len in schedule.items() if threshold >= num_reqs), 0)


def captured_shapes(
    sizes: Sequence[int], draft_lens: Sequence[int], schedule: Mapping[int, int] | None, max_draft_len: int
) -> tuple[Shape, ...]:
    """Return the shapes that are captured, in order: largest batch first, longest drafts first.

    Without a schedule each size has each of ``draft_lens``. With one, a size has the length of its own
    threshold alone, and one more graph is captured before all: the largest size with the longest drafts.
    """
    if not sizes:
        return ()
    if schedule is None:
        shapes = {(size, draft_len) for size in sizes for draft_len in draft_lens}
    else:
        shapes = {(size, scheduled_draft_len(schedule, size)) for size in sizes}
        shapes.add((max(sizes), max_draft_len))
    return tuple(sorted(shapes, reverse=True))


def rounded_up(sizes: Sequence[int], num_reqs: int, draft_len: int, schedule: Mapping[int, int] | None) -> int:
    """Return the size that a batch is padded to, or 0 where none holds it.

    With a schedule, that is the first size with this draft length. The search takes lengths to fall
    as sizes grow; where a schedule has them rise again, the engine misses sizes, and so does this.
    """
    first = bisect_left(sizes, num_reqs)
    if schedule is not None:
        lengths = [scheduled_draft_len(schedule, size) for size in sizes[first:]]
        # Negated, as ``bisect`` wants keys that rise.
        found = bisect_left(lengths, -draft_len, key=lambda length: -length)
        # No size has this length: its threshold is above the largest size.
        if found == len(lengths) or lengths[found] != draft_len:
            return 0
        first += found
    return sizes[first] if first < len(sizes) else 0


def padded_size(
    sizes: Sequence[int],
    num_reqs: int,
    largest_rank: int,
    draft_len: int,
    schedule: Mapping[int, int] | None,
    *,
    max_batch_size: int,
) -> int:
    """Return the size of a decode batch after dummy requests have joined it; its own where none do.

    ``largest_rank`` is the size of the largest batch of all attention-DP ranks, or ``num_reqs``. A batch is left as it
    is where no size holds it, or where the size is more than the engine's ``max_batch_size``.
    """
    # Dummies would join in vain: no graph holds the batch.
    if not sizes or largest_rank > sizes[-1]:
        return num_reqs
    size = rounded_up(sizes, largest_rank, draft_len, schedule)
    return size if num_reqs < size <= max_batch_size else num_reqs
