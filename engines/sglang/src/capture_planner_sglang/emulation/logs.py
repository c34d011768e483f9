"""What SGLang 0.5.23 writes about its batches: decode and prefill lines, and forward-pass metrics.

They are from ``srt/managers/scheduler_components/metrics_reporter.py``. Its metrics have no batch shapes.
"""

from __future__ import annotations

import re
from collections import Counter

import attrs

from capture_planner.errors import InvalidValue, Problem
from capture_planner.measuring.traffic.formats import (
    DECODE,
    PROMPTS,
    Key,
    LineFormat,
    LogFormats,
    MetricFormat,
    Samples,
    Shape,
    decodes,
    prompts,
)
from capture_planner.measuring.traffic.source import SourceCounts, SourceOptions
from capture_planner.modes import Role
from capture_planner.records.traffic import TrafficCount
from capture_planner_sglang.emulation.forward_passes import FORWARD_PASSES

_SPECULATIVE = "speculative"

# Every repetition is bounded, so that no line takes more time than its length: a log may hold anything.
_CLOCK = re.compile(rb"\[\d{4}-(\d\d-\d\d \d\d:\d\d:\d\d)[^\]\n]{0,99}\] \S{0,99}(?:Decode|Prefill) batch")
_DECODE = re.compile(
    rb"Decode batch(?: \[\d{1,18}\])?, #running-req: (\d{1,9}), ([^\n]{0,500}?)"
    rb"(?:cuda|cpu|npu|musa) graph: \w+, gen throughput \(token/s\): [\d.]+"
)
_PREFILL = re.compile(
    rb"Prefill batch(?: \[\d{1,18}\])?, #new-seq: (\d{1,9}), #new-token: (\d{1,9}), ([^\n]{0,500}?)"
    rb"(?:cuda|cpu|npu|musa) graph: \w+, input throughput \(token/s\): [\d.]+"
)
_REPLAY = re.compile(rb"#replay-token: (\d{1,9}), ")


def _find_decodes(block: bytes) -> list[Key]:
    # Two lines that were written into each other are left out, as neither's numbers are sure.
    return [(reqs, b"accept len: " in rest) for reqs, rest in _DECODE.findall(block) if b" batch" not in rest]


def _find_prefills(block: bytes) -> list[Key]:
    return [
        # Replayed tokens are not new, and run in the batch all the same.
        (seqs, int(tokens) + (int(again[1]) if (again := _REPLAY.search(rest)) else 0))
        for seqs, tokens, rest in _PREFILL.findall(block)
        if b" batch" not in rest
    ]


def _decode_shape(key: Key) -> Shape:
    reqs, speculative = int(key[0]), key[1]
    # A line does not say how many tokens are verified of each request.
    return _SPECULATIVE if speculative else DECODE, reqs, 0 if speculative else reqs


def _prefill_shape(key: Key) -> Shape:
    return PROMPTS, int(key[0]), key[1]


def _count_decodes(shapes: Counter[Shape], options: SourceOptions) -> SourceCounts:
    shapes = Counter({shape: count for shape, count in shapes.items() if shape[1]})
    interval = options.decode_log_interval
    batches = [
        *decodes(shapes),
        *(
            TrafficCount(role=Role.TARGET, num_reqs=reqs, past_prompt=True, count=count)
            for (kind, reqs, _), count in shapes.items()
            if kind == _SPECULATIVE
        ),
    ]
    notes = []
    if interval > 1:
        notes.append(
            f"each of SGLang's {sum(shapes.values())} decode lines counts as {interval} steps, because SGLang logs one "
            f"decode in {interval}; start it with --decode-log-interval 1 for all"
        )
    return SourceCounts(
        batches=[attrs.evolve(batch, count=batch.count * interval) for batch in batches],
        lines=sum(shapes.values()),
        notes=tuple(notes),
    )


def _count_prefills(shapes: Counter[Shape], options: SourceOptions) -> SourceCounts:
    batches = [batch for batch in prompts(shapes) if batch.num_tokens]
    note = "decodes that SGLang runs within a batch of prompts (--enable-mixed-chunk) are not in its lines"
    return SourceCounts(batches=batches, notes=(note,))


_DECODES = LineFormat(
    name="SGLang decode lines",
    engine="sglang",
    detail=1,
    markers=(b"Decode batch",),
    example="Decode batch, #running-req: 12, #token: 3456, token usage: 0.05, cuda graph: True, gen throughput "
    "(token/s): 812.00, #queue-req: 0",
    find=_find_decodes,
    shape=_decode_shape,
    count=_count_decodes,
    clock=_CLOCK,
)
_PREFILLS = LineFormat(
    name="SGLang prefill lines",
    engine="sglang",
    detail=1,
    markers=(b"Prefill batch",),
    example="Prefill batch, #new-seq: 2, #new-token: 512, #cached-token: 0, token usage: 0.05, #running-req: 12, "
    "#queue-req: 0, #pending-token: 0, cuda graph: False, input throughput (token/s): 9000.00",
    find=_find_prefills,
    shape=_prefill_shape,
    count=_count_prefills,
    clock=_CLOCK,
)


def _count_metrics(samples: Samples) -> SourceCounts:
    has_passes = any(name.startswith("sglang:cuda_graph_passes_total") for name, _ in samples)
    reason = "SGLang counts passes by mode, which are no batch shapes" if has_passes else "no batch shapes of SGLang"
    raise InvalidValue([Problem(message=reason, remedy="give SGLang's log")])


LOGS = LogFormats(
    lines=(_DECODES, _PREFILLS, FORWARD_PASSES), metrics=MetricFormat(prefix="sglang:", count=_count_metrics)
)
