"""What compiling kernels takes: a process pays it where no cache on disk has them, and later processes do not."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def compiled_seconds() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each kernel that Triton compiles within the context, in order.

    Kernels that are in Triton's cache on disk are not among them, nor what other libraries compile. The list stays
    empty without Triton 3.4 or later.
    """
    seconds: list[float] = []
    try:
        compilation = importlib.import_module("triton.knobs").compilation
    except ImportError:
        yield seconds
        return
    before = compilation.listener

    def listener(*, times: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            seconds.append(times.total * 1e-6)
        if before is not None:
            before(times=times, cache_hit=cache_hit, **others)

    compilation.listener = listener
    try:
        yield seconds
    finally:
        compilation.listener = before
