"""Peers over torch.distributed: the control plane of a connection, gloo for the host, NCCL or gloo for the device."""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined, unused-ignore]

from capture_planner.errors import RankError, RunError
from capture_planner_runner.ranks.connection import Connection
from capture_planner_runner.ranks.peers import Array, Peers, Place, Plain

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
        # Copied, since the set is written again two rounds later.
        found: Array = rows[:, _NUMBERS : _NUMBERS + len(numbers)].copy()
        return found


STEP = "the agreement of a step"
FOREVER = timedelta(days=1)
"""Timeout of a collective: none, because the watch of the ranks finds the cause sooner."""

COLLECTING = 3.0
"""Seconds to wait for the last words of interrupted ranks."""


class RankGroup(Peers):
    """The other ranks of a connected process, see ``Peers``.

    The groups of torch.distributed are opened by the first call that needs one, on all ranks together.

    Raises ``RunError`` for a process that has opened the default group already.
    """

    def __init__(self, connection: Connection, *, tensor_size: int, data_size: int, device: torch.device) -> None:
        plane = connection.plane
        self.place = Place(plane.rank, tensor_size=tensor_size, data_size=data_size, host=connection.hosts[plane.rank])
        self._connection, self._plane, self._watch, self._device = connection, plane, plane.watch, device
        self._host: dist.ProcessGroup | None = None
        self._tensor: dist.ProcessGroup | None = None
        self._rows: SharedRows | None = None

    def exchange(self, topic: str, value: Plain) -> tuple[Plain, ...]:
        return self._plane.exchange(topic, value)

    def collect(self, topic: str, value: Plain, *, interrupted: bool = False) -> tuple[Plain, ...]:
        if interrupted:
            self._watch.interrupt()
            if self._host is not None:
                # No signal is handled inside an agreement: destroying its group wakes the ranks there with an error.
                dist.destroy_process_group(self._host)
        return self._plane.collect(topic, value, COLLECTING if interrupted else None)

    def agree(self, numbers: Sequence[int]) -> Array:
        host = self._opened()
        self._watch.check()
        self._watch.begin(STEP)
        found = self._gathered(host, numbers) if self._rows is None else self._rows.gather(numbers)
        self._watch.done()
        return found

    def _gathered(self, host: dist.ProcessGroup, numbers: Sequence[int]) -> Array:
        """Return the numbers of all ranks by gloo, as ranks of several hosts do."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        all_ranks = torch.empty(self.place.size * len(numbers), dtype=torch.int64)
        try:
            # dist.all_gather_into_tensor does the same, but its checks would double the time.
            host._allgather_base(all_ranks, mine).wait()
        except RuntimeError as error:
            self._connection.raise_cause(error)
            raise RankError(
                f"{self.place}: the agreement of a step broke: {str(error).partition(chr(10))[0]}"
            ) from error
        return all_ranks.numpy().reshape(self.place.size, -1)

    def tensor_group(self) -> dist.ProcessGroup | None:
        self._opened()
        return self._tensor

    def close(self) -> None:
        # A rank that ends its groups while others are inside a collective would break it.
        self.exchange("the end of the run", None)
        if self._host is not None:
            dist.destroy_process_group()
        self._host = self._tensor = None

    def _opened(self) -> dist.ProcessGroup:
        if self._host is None:
            if dist.is_initialized():
                raise RunError("this process has a group of torch.distributed already; end it before a plan is run")
            # First under the watch, which finds a missing rank: torch would wait for it FOREVER.
            self.exchange("opening the groups", None)
            try:
                place, is_gpu = self.place, self._device.type == "cuda"
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
                    store=PrefixStore("groups", self._connection.store),
                    rank=place.rank,
                    world_size=place.size,
                    timeout=FOREVER,
                )
                # A separate group, so that agreements cannot interleave with other collectives of the host.
                host: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=FOREVER)
                # Every rank opens the groups of all replicas: torch's new_group is collective over all ranks.
                for data in range(place.data_size if place.tensor_size > 1 else 0):
                    ranks = range(data * place.tensor_size, (data + 1) * place.tensor_size)
                    group = dist.new_group(list(ranks), backend="nccl" if is_gpu else "gloo", timeout=FOREVER)
                    self._tensor = group if data == place.data else self._tensor
                self._host = host
                self._rows = self._share_rows()
            except RuntimeError as error:
                self._connection.raise_cause(error)
                raise
        return self._host

    def _share_rows(self) -> SharedRows | None:
        """Open the rows that ranks of one host share; None, on all of them, where some cannot."""
        machines = set(self._connection.machines)
        is_first, are_near = self.place.rank == 0, len(machines) == 1 and "" not in machines
        path = create(self.place.size) if is_first and are_near and usable() else None
        file = self.exchange("the rows of a step", path)[0]
        rows = None
        with suppress(OSError):
            rows = SharedRows(Path(str(file)), self.place.rank, self.place.size, self._watch.check) if file else None
        are_open = all(self.exchange("the rows are open", rows is not None))
        # Mapped by now: without a name nothing is left behind, however this run ends.
        if path is not None:
            Path(path).unlink()
        return rows if are_open else None
