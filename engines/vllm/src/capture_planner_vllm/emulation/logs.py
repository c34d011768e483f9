"""What vLLM 0.33.0 writes about its batches, in its log and in its metrics.

Iteration lines are from ``v1/metrics/loggers.py`` (``--enable-logging-iteration-details``), tables of CUDA graphs from
``compilation/cuda_graph.py`` (``--cudagraph-metrics``), accepted drafts from ``v1/spec_decode/metrics.py``, and metrics
from ``v1/metrics``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

from capture_planner.codec.rows import MAX_TOKENS
from capture_planner.errors import InvalidValue, Problem
from capture_planner.measuring.traffic.formats import (
    DECODE,
    PROMPTS,
    Key,
    Labels,
    LineFormat,
    LogFormats,
    MetricFormat,
    Samples,
    Shape,
    decodes,
    prompts,
    uniform_note,
)
from capture_planner.measuring.traffic.source import SourceCounts, SourceOptions
from capture_planner.modes import Role
from capture_planner.records.traffic import TrafficCount

_DUMMY, _EMPTY = "dummy", "empty"

# Every repetition is bounded, so that no line takes more time than its length: a log may hold anything.
_ITERATION = re.compile(
    # The engine's number stands before the match, so that a search begins at the marker.
    rb"Iteration\((?:(?<=(\d\d\d): Iteration\()|)\d+\): (\d{1,9}) context requests, (\d{1,9}) context tokens, "
    rb"(\d{1,9}) generation requests, (\d{1,9}) generation tokens(?:, )iteration elapsed time: (\d{1,18}\.?\d{0,18}) ms"
    # A line ends plainly, in a JSON string, or before a colour code.
    rb'(?=( \(dummy\))?(?:[,\r\n"\\\x1b]|\Z))'
)
_CLOCK = re.compile(rb"INFO\S{0,20} \S{0,20}?(\d\d-\d\d \d\d:\d\d:\d\d)\S{0,20} \S{0,200}(?:loggers|cuda_graph)\.py:")


def _iteration_shape(key: Key) -> Shape:
    _, context_reqs, context_tokens, reqs, tokens, dummy = key
    if dummy:
        return _DUMMY, 0, 0
    num_reqs, num_tokens = int(context_reqs) + int(reqs), int(context_tokens) + int(tokens)
    if not num_reqs or not num_tokens:
        return _EMPTY, 0, 0
    return PROMPTS if int(context_reqs) else DECODE, num_reqs, num_tokens


def _count_iterations(shapes: Counter[Shape], options: SourceOptions) -> SourceCounts:
    notes = [
        f"{count} {kind}"
        for name, kind in ((_DUMMY, "dummy steps of idle data-parallel ranks"), (_EMPTY, "steps without requests"))
        if (count := sum(count for (each, *_), count in shapes.items() if each == name))
    ]
    listed = [f"{' and '.join(notes)} are not counted"] if notes else []
    batches = [*decodes(shapes), *prompts(shapes)]
    return SourceCounts(batches=batches, notes=(*listed, *uniform_note(batches)))


_ITERATIONS = LineFormat(
    name="vLLM iteration lines",
    engine="vllm",
    detail=2,
    markers=(b"Iteration(",),
    example="Engine 000: Iteration(41): 1 context requests, 512 context tokens, 12 generation requests, 48 generation "
    "tokens, iteration elapsed time: 9.81 ms, GPU KV cache usage: 3.1%",
    find=_ITERATION.findall,
    milliseconds=5,
    shape=_iteration_shape,
    count=_count_iterations,
    clock=_CLOCK,
)


_ROW = re.compile(rb"\| +?(\d{1,9}) +\| \d{1,9} +\| \d{1,9} +\| (NONE|PIECEWISE|FULL) +\| (\d{1,18}) +\|")
_MODE = re.compile(rb"- Mode: (\w{1,99})")


def _find_rows(block: bytes) -> list[Key]:
    return [*_ROW.findall(block), *((0, b"Mode", mode) for mode in _MODE.findall(block))]


def _row_shape(key: Key) -> Shape:
    tokens, mode, named = key
    return ("Mode", named.decode()) if mode == b"Mode" else (mode.decode(),), 0, int(tokens)


def _row_times(key: Key) -> int:
    return 1 if key[1] == b"Mode" else int(key[2])


def _count_rows(shapes: Counter[Shape], options: SourceOptions) -> SourceCounts:
    modes = {kind[1] for kind, *_ in shapes if kind[0] == "Mode"}
    # Where decodes have graphs of their own, a FULL graph serves nothing else.
    separate = bool(modes) and modes <= {"FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"}
    batches = []
    for ((mode, *_), _, tokens), count in shapes.items():
        if mode != "Mode" and tokens and count:
            past_prompt = True if mode == "FULL" and separate else None
            batches.append(TrafficCount(role=Role.TARGET, num_tokens=tokens, past_prompt=past_prompt, count=count))
    notes = ["vLLM's table of graphs has tokens only: neither requests nor query lengths"]
    if not separate:
        notes.append("which batches are decodes is not known: the table does not name a mode that separates them")
    return SourceCounts(batches=batches, notes=tuple(notes))


# Written every few seconds, and counted from 0 each time, so the tables of a log add up.
_GRAPH_TABLE = LineFormat(
    name="vLLM CUDA-graph tables",
    engine="vllm",
    detail=1,
    markers=(b"| NONE ", b"| PIECEWISE ", b"| FULL ", b"- Mode: "),
    example="| 12              | 16            | 4            | FULL         | 305   |",
    find=_find_rows,
    shape=_row_shape,
    times=_row_times,
    count=_count_rows,
    clock=_CLOCK,
)


_ACCEPTANCE_LINE = re.compile(
    rb"SpecDecoding metrics: Mean acceptance length: [^\n]{0,300}?Drafted: (\d{1,15}) tokens, "
    rb"Per-position acceptance rate: (\d\.\d{1,9}(?:, \d\.\d{1,9}){0,63}), Avg"
)


def _count_acceptance(shapes: Counter[Shape], options: SourceOptions) -> SourceCounts:
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for ((tokens, text), *_), times in shapes.items():
        rates = [float(rate) for rate in text.split(", ")]
        each = int(tokens) / len(rates) * times
        for position, rate in enumerate(rates):
            drafted[position] += round(each)
            accepted[position] += round(each * min(rate, 1.0))
    note = "accepted drafts by position are from vLLM's rounded rates, and taken as equally many at each position"
    return SourceCounts(
        batches=(),
        drafted=tuple(drafted[position] for position in sorted(drafted)),
        accepted=tuple(accepted[position] for position in sorted(drafted)),
        notes=(note,),
    )


def _acceptance_shape(key: Key) -> Shape:
    return (key[0].decode(), key[1].decode()), 0, 0


_ACCEPTANCE = LineFormat(
    name="vLLM acceptance lines",
    engine="vllm",
    detail=0,
    markers=(b"SpecDecoding metrics: Mean acceptance length",),
    example="SpecDecoding metrics: Mean acceptance length: 2.40, ..., Per-position acceptance rate: 0.800, 0.600, ...",
    find=_ACCEPTANCE_LINE.findall,
    shape=_acceptance_shape,
    count=_count_acceptance,
)


_TOKENS = "vllm:iteration_tokens_total_bucket"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"

BUCKETS = (*range(1, 17), *range(24, 257, 8), *range(272, 513, 16), 1024, 2048, 4096, 8192, 16384)
"""Bounds for ``--custom-histogram-buckets`` of vLLM that are as fine as its list of capture sizes."""


def _count_metrics(samples: Samples) -> SourceCounts:
    steps, above = _histogram(samples)
    if not steps:
        remedy = f"scrape a vLLM that ran steps ({_TOKENS}), or give the engine's log"
        raise InvalidValue([Problem(message="no histogram of batch shapes", remedy=remedy)])
    drafted, accepted = _drafts(samples)
    setting = json.dumps({"iteration_tokens": BUCKETS}, separators=(",", ":"))
    notes = [
        "the histogram has tokens only, and counts accepted tokens: under speculation a step runs more than it shows",
        f"its buckets are coarse: each step counts as the upper bound of its bucket, one of "
        f"{', '.join(map(str, steps))}; finer ones: vllm serve --custom-histogram-buckets '{setting}'",
    ]
    if above:
        notes.append(f"{above} steps above the last bucket are not counted")
    return SourceCounts(
        batches=[TrafficCount(role=Role.TARGET, num_tokens=tokens, count=count) for tokens, count in steps.items()],
        drafted=drafted,
        accepted=accepted,
        notes=tuple(notes),
    )


def _histogram(samples: Samples) -> tuple[dict[int, int], int]:
    """Return how many steps each bucket has, over all engines, and how many are above the last."""
    series: dict[Labels, dict[float, float]] = {}
    for (metric, labels), value in samples.items():
        if metric == _TOKENS:
            bound = _bound(dict(labels).get("le", ""))
            series.setdefault(tuple(label for label in labels if label[0] != "le"), {})[bound] = value
    steps: Counter[int] = Counter()
    above = 0
    for buckets in series.values():
        before = 0.0
        for bound, value in sorted(buckets.items()):
            count, before = round(value - before), value  # Prometheus' buckets are cumulative
            if bound > MAX_TOKENS:  # the last one, +Inf
                above += count
            elif count > 0 and bound >= 1:
                steps[int(bound)] += count
    return dict(sorted(steps.items())), above


def _bound(text: str) -> float:
    """Return the upper bound of a bucket; one that is no number is none of a batch."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _drafts(samples: Samples) -> tuple[tuple[int, ...], tuple[int, ...]]:
    drafts = round(sum(value for (metric, _), value in samples.items() if metric == _DRAFTS))
    accepted: Counter[int] = Counter()
    for position, value in _positions(samples):
        accepted[position] += round(value)
    most = max(accepted, default=-1) + 1
    # Counters are read one by one while vLLM counts on.
    return (drafts,) * most, tuple(min(accepted[position], drafts) for position in range(most))


def _positions(samples: Samples) -> Iterator[tuple[int, float]]:
    for (metric, labels), value in samples.items():
        position = dict(labels).get("position", "")
        if metric == _ACCEPTED and re.fullmatch(r"\d{1,2}", position):
            yield int(position), value


LOGS = LogFormats(
    lines=(_ITERATIONS, _GRAPH_TABLE, _ACCEPTANCE),
    metrics=MetricFormat(
        prefix="vllm:", example='vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 12.0', count=_count_metrics
    ),
)
