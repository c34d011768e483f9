"""What TensorRT-LLM 1.2 logs about its batches: ``print_iter_log`` (``_torch/pyexecutor/py_executor.py``).

``num_scheduled_requests`` stands after ``rank`` since 1.3, and before ``states`` until then.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from capture_planner.measuring.traffic.formats import (
    DECODE,
    PROMPTS,
    Key,
    LineFormat,
    LogFormats,
    Shape,
    decodes,
    prompts,
    uniform_note,
)
from capture_planner.measuring.traffic.source import SourceCounts, SourceOptions

# Every repetition is bounded, so that no line takes more time than its length: a log may hold anything.
_LINE = re.compile(
    rb"iter = \d{1,18}, global_rank = (\d{1,5}), rank = \d{1,9}, (?:num_scheduled_requests = (\d{1,9}), )?"
    rb"(?:kv_cache_util = [^,\n]{1,40}, )?currank_total_requests = \d{1,9}/\d{1,9}, "
    rb"(?:host_step_time = (\d{1,18}\.?\d{0,18}(?:e-\d\d)?)ms, prev_device_step_time = [^,\n]{1,40}"
    rb"|elapsed_time = \d{1,18}\.?\d{0,18}(?:e-\d\d)?s), timestamp = [^,\n]{1,40}, "
    rb"(?:num_scheduled_requests: (\d{1,9}), )?"
    rb"states = \{'num_ctx_requests': (\d{1,9}), 'num_ctx_tokens': (\d{1,9}), 'num_generation_tokens': (\d{1,9})[,}]"
)
_CLOCK = re.compile(rb"timestamp = \d{4}-(\d\d-\d\d \d\d:\d\d:\d\d), ")


def _find(block: bytes) -> list[Key]:
    found = _LINE.findall(block)
    # Only a line without its requests, which no release has, is left out.
    return found if all(key[1] or key[3] for key in found) else [key for key in found if key[1] or key[3]]


def _shape(key: Key) -> Shape:
    rank, reqs, older, context_reqs, context_tokens, tokens = key
    kind = PROMPTS if int(context_reqs) else DECODE
    return (int(rank), kind), int(reqs or older), int(context_tokens) + int(tokens)


def _repeats(shapes: Counter[Shape]) -> frozenset[Any]:
    """Return the kinds of all ranks but the first, where all show the same steps."""
    ranks: dict[int, Counter[Shape]] = {}
    for ((rank, kind), reqs, tokens), count in shapes.items():
        if reqs and tokens:
            ranks.setdefault(rank, Counter())[kind, reqs, tokens] += count
    first, *others = list(ranks) or [0]
    if any(ranks[rank] != ranks[first] for rank in others):
        return frozenset()
    return frozenset((rank, kind) for rank in others for kind in (PROMPTS, DECODE))


def _count(shapes: Counter[Shape], options: SourceOptions) -> SourceCounts:
    added: Counter[Shape] = Counter()
    # Ranks of attention DP schedule batches of their own, so their lines add up.
    for ((_, kind), reqs, tokens), count in shapes.items():
        if reqs and tokens:
            added[kind, reqs, tokens] += count
    batches = [*decodes(added), *prompts(added)]
    return SourceCounts(batches=batches, notes=tuple(uniform_note(batches)))


_ITERATIONS = LineFormat(
    name="TensorRT-LLM iteration lines",
    engine="tensorrt_llm",
    detail=1,
    markers=(b"currank_total_requests = ",),
    example="iter = 41, global_rank = 0, rank = 0, num_scheduled_requests = 12, kv_cache_util = 0.100, "
    "currank_total_requests = 0/12, host_step_time = 7.4ms, prev_device_step_time = 7.1ms, timestamp = "
    "2026-11-22 05:51:30, states = {'num_ctx_requests': 0, 'num_ctx_tokens': 0, 'num_generation_tokens': 12}",
    find=_find,
    milliseconds=2,
    shape=_shape,
    count=_count,
    repeats=_repeats,
    clock=_CLOCK,
)

LOGS = LogFormats(lines=(_ITERATIONS,))
