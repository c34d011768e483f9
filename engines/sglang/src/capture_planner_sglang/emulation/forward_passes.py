"""Forward-pass metrics as JSON lines: Dynamo's and SGLang's (0.5.23, srt/observability/forward_pass_metrics.py).

On the wire they are msgpack; a line here is one message as an object with the names of its fields.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from capture_planner.measuring.traffic.formats import DECODE, PROMPTS, Key, LineFormat, Shape, prompts
from capture_planner.measuring.traffic.source import SourceCounts, SourceOptions
from capture_planner.modes import Role
from capture_planner.records.traffic import TrafficCount

_SCHEDULED = ("scheduled_requests", "scheduled")
_FIELDS = ("num_prefill_requests", "sum_prefill_tokens", "num_decode_requests")


def _find(block: bytes) -> list[Key]:
    return [key for line in block.splitlines() if b'"scheduled' in line and (key := _key(line)) is not None]


def _key(line: bytes) -> Key | None:
    """Return rank, requests of prompts, their tokens, decodes and milliseconds; None for another line."""
    try:
        data = json.loads(line)
        scheduled: Any = next((data[name] for name in _SCHEDULED if name in data), None)
        numbers = [scheduled.get(name, 0) for name in _FIELDS]
        seconds = data.get("wall_time") or 0.0
        rank = f"{data.get('worker_id', '')}/{data.get('dp_rank', 0)}"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    if any(type(number) is not int or not 0 <= number < 1e9 for number in numbers):  # `true` is an int, too
        return None
    if type(seconds) not in (int, float) or not 0 <= seconds < 1e9:  # also no NaN
        return None
    return rank, *numbers, seconds * 1000


def _shape(key: Key) -> Shape:
    prompted, tokens, decoding = map(int, key[1:])
    if not prompted:
        return DECODE, decoding, 0
    # The message has the tokens of prompts only, so the number of decodes is kept for --query-len.
    return (PROMPTS, decoding) if decoding else PROMPTS, prompted + decoding, tokens


def _count(shapes: Counter[Shape], options: SourceOptions) -> SourceCounts:
    batches = [batch for batch in prompts(shapes) if batch.num_tokens]
    unknown = 0
    for (kind, reqs, tokens), count in shapes.items():
        if kind == DECODE and reqs:
            batches.append(TrafficCount(role=Role.TARGET, num_reqs=reqs, past_prompt=True, count=count))
        elif isinstance(kind, tuple):
            _, decoding = kind
            each = options.query_len
            unknown += count if each is None else 0
            batch = TrafficCount(
                role=Role.TARGET,
                num_reqs=reqs,
                num_tokens=None if each is None else tokens + decoding * each,
                past_prompt=False,
                count=count,
            )
            batches.append(batch)
    notes = ["forward-pass metrics do not say how many tokens a decode has"]
    if unknown:
        notes.append(f"so the tokens of {unknown} batches of prompts and decodes are not known; give --query-len")
    return SourceCounts(batches=batches, notes=tuple(notes))


FORWARD_PASSES = LineFormat(
    name="forward-pass metrics",
    engine="forward passes",
    detail=1,
    markers=tuple(f'"{name}":'.encode() for name in _SCHEDULED),
    example='{"dp_rank": 0, "wall_time": 0.0098, "scheduled_requests": {"num_prefill_requests": 0, '
    '"sum_prefill_tokens": 0, "num_decode_requests": 12}}',
    find=_find,
    milliseconds=4,
    shape=_shape,
    count=_count,
)
