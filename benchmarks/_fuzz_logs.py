"""Hostile sources for the fuzzer: odd numbers in lines of every format, lines without an end, and odd compression."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

from _fuzz_inputs import Input, changed

from capture_planner.engines.logs import log_formats

MOST_BYTES = 1 << 17
"""Text of one input: a pattern that is quadratic takes seconds for it."""

_NUMBERS = ("0", "1", "-1", "7", "255", "1.5", "1e999", "1e308", "NaN", "inf", "0x10", "1_0", "", ".", "\u0663", "3e-9")
_DIGITS = (2, 18, 19, 30, 400, 5000)
_CLOCKS = (
    "(EngineCore pid=1) INFO 11-22 05:51:30 [loggers.py:257] ",
    "INFO 11-22 05:51:30 [v1/cuda_graph.py:1] ",
    "[2026-11-22 05:51:30 TP0] ",
    "",
)
_FORWARD_PASS = (
    '{"version": 1, "worker_id": "0", "dp_rank": 0, "counter_id": 1, "wall_time": 0.0098, "scheduled_requests": '
    '{"num_prefill_requests": 0, "sum_prefill_tokens": 0, "var_prefill_length": 0.0, "sum_prefill_kv_tokens": 0, '
    '"num_decode_requests": 12, "sum_decode_kv_tokens": 30, "var_decode_kv_tokens": 0.5}, "queued_requests": {}}'
)
_METRICS = (
    'vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 12.0',
    'vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 14.0',
    'vllm:spec_decode_num_drafts_total{engine="0"} 9.0',
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 7.0',
    "sglang:cuda_graph_passes_total 3.0",
)
_ACCEPTANCE = (
    "SpecDecoding metrics: Mean acceptance length: 2.40, Accepted throughput: 9.1 tokens/s, Drafted throughput: 13.0 "
    "tokens/s, Accepted: 91 tokens, Drafted: 130 tokens, Per-position acceptance rate: 0.800, 0.600, Avg Draft "
    "acceptance rate: 70.0%"
)
_TRACES = ("t,in_len,out_len\n0.0,4,3", '{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [0]}')
_REPORT = json.dumps(
    {
        "environment": {},
        "captured": 1,
        "steps": [{"index": 0, "seconds": 0.5, "drafted": 0}],
        "forwards": [{"step": 0, "role": "target", "num_reqs": 2, "num_tokens": 2, "query_len": 1, "repeats": 1}],
    }
)
_OPTIONS = ("--step-ms", "--query-len", "--decode-log-interval", "--acceptance", "--part")


def log(rng: random.Random, folder: Path, index: int) -> Input:
    """Write a source: some lines with odd numbers, or one good line next to a long hostile one."""
    steps = [line.example for each in log_formats() for line in each.lines if line.detail]
    steps += [_FORWARD_PASS]
    lines = [*steps, _ACCEPTANCE, *_METRICS, *_TRACES, _REPORT]
    must_read = False
    made_by = rng.choice(("numbers",) * 6 + ("repeated", "ranks", "shapes", "nested", "changed"))
    if made_by == "numbers":
        chosen = rng.choice(([rng.choice(steps)], [rng.choice(lines)], _METRICS, rng.choices(lines, k=3)))
        must_read = set(chosen) <= set(steps)
        written = [rng.choice(_CLOCKS) + rng.choice((line, _odd(rng, line))) for line in rng.choices(chosen, k=8)]
        text = "\n".join([chosen[0], *written, ""])
    elif made_by == "repeated":
        line = rng.choice(_CLOCKS) + rng.choice(lines)
        start = rng.randrange(len(line))
        bit = line[start : start + rng.choice((1, 2, 5, 20, 60, 200))] + rng.choice(("", "", " ", ", ", "1", "|"))
        text = f"{line}\n{line[:start]}{bit * (MOST_BYTES // len(bit))}\n{line}\n"
    elif made_by in ("ranks", "shapes"):
        line = rng.choice(lines)
        numbers = list(re.finditer(r"\d+", line))
        few = rng.sample(numbers, min(len(numbers), rng.choice((1, 1, 2))))
        text = "\n".join(_counting(line, few, index) for index in range(MOST_BYTES // len(line)))
    elif made_by == "nested":
        bit = rng.choice(("[", '{"a":', '{"scheduled":', '{"scheduled_requests": {"num_prefill_requests":'))
        text = f"{rng.choice(('', lines[-1], _FORWARD_PASS))}\n{bit * rng.choice((5000, 20_000))}\n{_FORWARD_PASS}\n"
    else:
        text = "\n".join(rng.choices(lines, k=6)) + "\n"
    data = changed(rng, text) if made_by == "changed" else text.encode()
    if rng.random() < 0.2:
        data = _compressed(rng, data)
        made_by, must_read = made_by + ", gzip", False  # it may be cut short
    file = folder / "source.log"
    file.write_bytes(data)
    words = (rng.choice(_OPTIONS), rng.choice(("nan", "inf", "1e308", "0", "4", "0.5:1"))) * (rng.random() < 0.2)
    made_by = " ".join((made_by, *words))
    return Input(made_by=made_by, files=(file,), must_read=must_read and not words, words=words)


def _odd(rng: random.Random, line: str) -> str:
    """Return a line with one or two numbers replaced."""
    for _ in range(rng.choice((1, 1, 2))):
        numbers = list(re.finditer(r"\d+(?:\.\d+)?", line))
        if numbers:
            at = rng.choice(numbers)
            other = rng.choice((rng.choice(_NUMBERS), "9" * rng.choice(_DIGITS)))
            line = line[: at.start()] + other + line[at.end() :]
    return line


def _counting(line: str, numbers: list[re.Match[str]], index: int) -> str:
    """Return a line with some of its numbers replaced by an index."""
    for at in sorted(numbers, key=lambda match: -match.start()):
        line = f"{line[: at.start()]}{index}{line[at.end() :]}"
    return line


def _compressed(rng: random.Random, data: bytes) -> bytes:
    """Compress, as one member or as many, whole or cut short."""
    size = rng.choice((len(data), 1000, 50, 1))
    parts = [data[at : at + size] for at in range(0, min(len(data), 4000 * size), size)]
    whole = b"".join(gzip.compress(part, 1) for part in parts)
    return whole[: rng.choice((len(whole), len(whole), rng.randrange(len(whole) + 1)))]
