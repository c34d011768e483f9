"""Requests of random tokens: generated, or with the arrivals and lengths of a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np

from capture_planner.analysis.trace import MAX_LENGTH, read_trace
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.records._base import raise_any
from capture_planner_runner.serving.workload.request import Request, outside

MAX_TOKENS = 1 << 28
"""Most prompt tokens of a workload; they take 2 GiB."""


def generated(
    count: int,
    *,
    seed: int,
    rate: float | None,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    vocab_size: int,
) -> tuple[Request, ...]:
    """Return ``count`` requests that arrive as a Poisson process.

    ``rate`` is in requests per second; None or infinity: all arrive at 0. Lengths are uniform between
    the two ends of a range, both included. A smaller ``count`` gives the first requests of a larger
    one, and ``rate`` changes arrivals only. Raises ``InvalidValue`` for numbers that are no workload.
    """
    rate = math.inf if rate is None else rate
    problems = [
        *outside("count", count, 0, MAX_LENGTH),
        *outside("seed", seed, 0),
        *outside("rate", rate, 1e-6),
        *outside("vocab_size", vocab_size, 1, MAX_LENGTH),
    ]
    for name, (low, high) in {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}.items():
        if not 1 <= low <= high <= MAX_LENGTH:
            message = f"expected a range within 1 to {MAX_LENGTH}, got {low} to {high}"
            problems.append(Problem(path=(name,), message=message))
    if not problems and (most := count * prompt_tokens[1]) > MAX_TOKENS:
        message = f"the prompts may have {most} tokens in all, more than {MAX_TOKENS}"
        problems.append(Problem(path=("count",), message=message, remedy="ask for fewer requests"))
    raise_any(problems)
    rng = np.random.Generator(np.random.PCG64(seed))
    tokens = _tokens(rng, vocab_size)
    requests = []
    now = 0.0
    for index in range(count):
        now += rng.standard_exponential() / rate
        length = int(rng.integers(*prompt_tokens, endpoint=True))
        most = int(rng.integers(*output_tokens, endpoint=True))
        requests.append(Request(name=f"request-{index}", arrival=now, max_new_tokens=most, prompt=tokens(length)))
    return tuple(requests)


def with_adapters(requests: Sequence[Request], count: int, *, seed: int) -> tuple[Request, ...]:
    """Return the requests, each with one of ``count`` LoRA adapters or with none, all as often."""
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(count, size=len(requests), endpoint=True)
    return tuple(attrs.evolve(each, adapter=int(adapter)) for each, adapter in zip(requests, drawn, strict=True))


def from_trace(
    path: str | Path, *, vocab_size: int, seed: int, limit: int | None = None, speed: float = 1.0
) -> tuple[Request, ...]:
    """Return the requests of a CSV trace, with random tokens of the lengths that it gives.

    The header names three columns, in any case and order; others are ignored. They are the arrival
    (``t``, ``timestamp``, ``arrival``, ``arrival_time``), the tokens of the prompt (``in_len``,
    ``ContextTokens``, ``input_tokens``, ``input_length``, ``prompt_tokens``) and of the output
    (``out_len``, ``GeneratedTokens``, ``output_tokens``, ``output_length``). Arrivals are seconds from
    the start, or dates with a time of day, which count from the earliest. Rows need no order.

    ``limit`` keeps the first to arrive. ``speed`` divides arrivals; infinity: all arrive at 0. A
    request is named after its file and line. Raises ``InvalidDocument`` with every problem of the file
    (up to 100), and ``InvalidValue`` for the other arguments.
    """
    problems = [
        *outside("vocab_size", vocab_size, 1, MAX_LENGTH),
        *outside("seed", seed, 0),
        *outside("limit", 1 if limit is None else limit, 1),
        *outside("speed", speed, 1e-6),
    ]
    raise_any(problems)
    rows = sorted(read_trace(path), key=lambda row: row.arrival)[:limit]
    if (total := sum(row.prompt for row in rows)) > MAX_TOKENS:
        message = f"the prompts have {total} tokens in all, more than {MAX_TOKENS}"
        raise InvalidDocument([Problem(file=str(path), message=message, remedy="limit the requests")])
    tokens = _tokens(np.random.Generator(np.random.PCG64(seed)), vocab_size)
    names = (f"{Path(path).name}:{row.line}" for row in rows)
    return tuple(
        Request(name=name, arrival=row.arrival / speed, prompt=tokens(row.prompt), max_new_tokens=row.output)
        for name, row in zip(names, rows, strict=True)
    )


def _tokens(rng: np.random.Generator, vocab_size: int) -> Callable[[int], tuple[int, ...]]:
    # One object for each id, shared by all prompts: 8 bytes a token, where traces have many millions.
    ids = np.arange(vocab_size).astype(object)
    return lambda length: tuple(ids[rng.integers(vocab_size, size=length)])
