"""vLLM's table of CUDA graphs: ``--cudagraph-metrics`` (0.33.0, compilation/cuda_graph.py).

It is written every few seconds, and counts from 0 each time, so the tables of a log add up.
"""

from __future__ import annotations

import re
from collections import Counter

from capture_planner.measuring.traffic.lines import Key, LineCounts, LineFormat, Shape
from capture_planner.measuring.traffic.source import SourceOptions
from capture_planner.measuring.traffic.vllm_iterations import CLOCK
from capture_planner.modes import Role
from capture_planner.records.traffic import TrafficCount

_ROW = re.compile(rb"\| +?(\d+) +\| (\d+) +\| (\d+) +\| (NONE|PIECEWISE|FULL) +\| (\d+) +\|")
_MODE = re.compile(rb"- Mode: (\w+)")


def _find(block: bytes) -> list[Key]:
    rows = [(mode, tokens, int(count)) for tokens, _, _, mode, count in _ROW.findall(block)]
    return [*rows, *((b"Mode", mode, 0) for mode in _MODE.findall(block))]


def _shape(key: Key) -> Shape:
    """Keep how often each row occurs apart by its count, which is multiplied at the end."""
    mode, tokens, count = key
    return (mode.decode(), 0 if mode == b"Mode" else count, tokens.decode()), 0, 0


def _count(shapes: Counter[Shape], options: SourceOptions) -> LineCounts:
    modes = {text for ((kind, _, text), *_) in shapes if kind == "Mode"}
    # Where decodes have graphs of their own, a FULL graph serves nothing else.
    separate = bool(modes) and modes <= {"FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"}
    batches = []
    for ((mode, steps, text), *_), times in shapes.items():
        if mode != "Mode":
            batch = TrafficCount(
                role=Role.TARGET,
                num_tokens=int(text),
                past_prompt=True if mode == "FULL" and separate else None,
                count=steps * times,
            )
            batches.append(batch)
    notes = ["vLLM's table of graphs has tokens only: neither requests nor query lengths"]
    if not separate:
        notes.append("which batches are decodes is not known: the table does not name a mode that separates them")
    return LineCounts(batches=[batch for batch in batches if batch.count and batch.num_tokens], notes=tuple(notes))


GRAPH_TABLE = LineFormat(
    name="vLLM CUDA-graph tables",
    engine="vllm",
    detail=1,
    markers=(b"| NONE ", b"| PIECEWISE ", b"| FULL ", b"- Mode: "),
    example="| 12              | 16            | 4            | FULL         | 305   |",
    find=_find,
    shape=_shape,
    count=_count,
    clock=CLOCK,
)
