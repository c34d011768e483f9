"""Rows of numbers that the ranks of one host share: an all-gather of a few microseconds, where gloo takes a hundred."""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

from capture_planner_runner.ranks.peers import Array

MOST = 62
"""Limit of numbers in a row."""

_SPIN, _PAUSE = 0.002, 0.0001
"""Seconds of waiting without a pause, and the pause after that."""
_YIELD: Callable[[], None] = getattr(os, "sched_yield", partial(sleep, 0))
"""Yields the processor. ``sleep(0)`` is a timer on Linux, and takes its slack: 50 to 70 us."""
_LENGTH, _COUNT, _NUMBERS = 0, 1, 2
"""Columns of a row: the number of values, their round, and the first value."""


def usable() -> bool:
    """Return True if this machine's processors publish writes in program order."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(mmap, "MAP_SHARED")


def create(size: int) -> str:
    """Make the file of the rows of ``size`` ranks, in memory where a folder is there; return its path."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix="capture-planner-ranks-", dir=folder)
    os.ftruncate(descriptor, 2 * size * (_NUMBERS + MOST) * np.dtype(np.int64).itemsize)
    os.close(descriptor)
    return path


class SharedRows:
    """The rows of all ranks, of which each writes its own.

    Each round has one of two sets of rows in turn: a rank begins a round when all have begun the one before, and so
    have read the one before that.

    :param path: of a file that ``create`` made; raises ``OSError`` where this process cannot open it.
    :param check: called now and then while others are waited for; raises where they will not come.
    """

    def __init__(self, path: Path, rank: int, size: int, check: Callable[[], None]) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        shape = 2, size, _NUMBERS + MOST
        self._rows: Array = np.frombuffer(self._memory, np.int64, int(np.prod(shape))).reshape(shape)
        self._rank, self._check, self._round = rank, check, 0

    def gather(self, numbers: Sequence[int]) -> Array:
        """Return the numbers of all ranks, ``int64[size, n]``: at most ``MOST``, and as many on every rank."""
        self._round += 1
        rows, count = self._rows[self._round % 2], self._round
        mine, until = rows[self._rank], perf_counter() + _SPIN
        mine[_NUMBERS : _NUMBERS + len(numbers)] = numbers
        mine[_LENGTH] = len(numbers)
        mine[_COUNT] = count  # last: a rank that sees it may read the others
        while not (rows[:, _COUNT] == count).all():
            if perf_counter() < until:
                _YIELD()
            else:
                self._check()
                sleep(_PAUSE)
        assert (rows[:, _LENGTH] == len(numbers)).all(), "ranks of one plan have as many numbers"
        found: Array = rows[:, _NUMBERS : _NUMBERS + len(numbers)].copy()
        return found
