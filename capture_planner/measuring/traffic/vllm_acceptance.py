"""vLLM's lines about speculative decoding (0.33.0, v1/spec_decode/metrics.py): accepted drafts by position."""

from __future__ import annotations

import re
from collections import Counter

from capture_planner.measuring.traffic.lines import Key, LineCounts, LineFormat, Shape
from capture_planner.measuring.traffic.source import SourceOptions

_LINE = re.compile(
    rb"SpecDecoding metrics: Mean acceptance length: [^\n]*?Drafted: (\d+) tokens, "
    rb"Per-position acceptance rate: ((?:\d\.\d+(?:, )?)+), Avg"
)


def _count(shapes: Counter[Shape], options: SourceOptions) -> LineCounts:
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for ((tokens, text), *_), times in shapes.items():
        rates = [float(rate) for rate in text.split(", ")]
        each = int(tokens) / len(rates) * times
        for position, rate in enumerate(rates):
            drafted[position] += round(each)
            accepted[position] += round(each * rate)
    note = "accepted drafts by position are from vLLM's rounded rates, and taken as equally many at each position"
    return LineCounts(
        batches=(),
        drafted=tuple(drafted[position] for position in sorted(drafted)),
        accepted=tuple(accepted[position] for position in sorted(drafted)),
        notes=(note,),
    )


def _shape(key: Key) -> Shape:
    return (key[0].decode(), key[1].decode()), 0, 0


ACCEPTANCE = LineFormat(
    name="vLLM acceptance lines",
    engine="vllm",
    detail=0,
    markers=(b"SpecDecoding metrics: Mean acceptance length",),
    example="SpecDecoding metrics: Mean acceptance length: 2.40, ..., Per-position acceptance rate: 0.800, 0.600, ...",
    find=_LINE.findall,
    shape=_shape,
    count=_count,
)
