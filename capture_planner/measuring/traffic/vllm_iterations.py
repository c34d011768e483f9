"""vLLM's iteration lines: ``--enable-logging-iteration-details`` (0.33.0, v1/metrics/loggers.py)."""

from __future__ import annotations

import re
from collections import Counter

from capture_planner.measuring.traffic.lines import DECODE, PROMPTS, Key, LineCounts, LineFormat, Shape
from capture_planner.measuring.traffic.shapes import decodes, prompts, uniform_note
from capture_planner.measuring.traffic.source import SourceOptions

DUMMY, EMPTY = "dummy", "empty"

_LINE = re.compile(
    rb"Iteration\((?:(?<=(\d\d\d): Iteration\()|)\d+\): (\d+) context requests, (\d+) context tokens, "
    rb"(\d+) generation requests, (\d+) generation tokens(?:, )iteration elapsed time: (\d+\.?\d*) ms"
    rb'(?=( \(dummy\))?(?:[,\r\n"\\\x1b]|\Z))'
)
CLOCK = re.compile(rb"INFO\S* \S*?(\d\d-\d\d \d\d:\d\d:\d\d)\S* \S*(?:loggers|cuda_graph)\.py:")


def _shape(key: Key) -> Shape:
    _, context_reqs, context_tokens, reqs, tokens, dummy = key
    if dummy:
        return DUMMY, 0, 0
    num_reqs, num_tokens = int(context_reqs) + int(reqs), int(context_tokens) + int(tokens)
    if not num_reqs or not num_tokens:
        return EMPTY, 0, 0
    return PROMPTS if int(context_reqs) else DECODE, num_reqs, num_tokens


def _count(shapes: Counter[Shape], options: SourceOptions) -> LineCounts:
    notes = [
        f"{count} {kind}"
        for name, kind in ((DUMMY, "dummy steps of idle data-parallel ranks"), (EMPTY, "steps without requests"))
        if (count := sum(count for (each, *_), count in shapes.items() if each == name))
    ]
    listed = [f"{' and '.join(notes)} are not counted"] if notes else []
    batches = [*decodes(shapes), *prompts(shapes)]
    return LineCounts(batches=batches, notes=(*listed, *uniform_note(batches)))


ITERATIONS = LineFormat(
    name="vLLM iteration lines",
    engine="vllm",
    detail=2,
    markers=(b"Iteration(",),
    example="Engine 000: Iteration(41): 1 context requests, 512 context tokens, 12 generation requests, 48 generation "
    "tokens, iteration elapsed time: 9.81 ms, GPU KV cache usage: 3.1%",
    find=_LINE.findall,
    milliseconds=5,
    shape=_shape,
    count=_count,
    clock=CLOCK,
)
