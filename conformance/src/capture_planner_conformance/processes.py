"""Several processes for the independent parts of a run: the scenes of each seed, and the attacks on fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory

from capture_planner.errors import RunError

Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""As ``map``: the results of a function for each of some values, in their order."""


@contextmanager
def workers(jobs: int) -> Iterator[Each]:
    """Give ``map``, or for several jobs one whose function runs in as many processes.

    Leaving waits for what runs, and begins nothing more. Raises ``RunError`` where a process was killed.
    """
    if jobs == 1:
        yield map
        return
    # Spawned: a process that has used a GPU cannot be forked.
    started = torch.get_num_threads(), str(storage_directory())
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _start, started)
    try:
        yield pool.map
    except BrokenProcessPool as error:
        raise RunError(
            "a process of the suite was killed, perhaps for lack of memory; give fewer jobs: with 1, the crash of a "
            "kernel shows its place"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(threads: int, home: str) -> None:
    """Let operators run as in the first process, and Hypothesis leave nothing in the working folder."""
    torch.set_num_threads(threads)
    set_hypothesis_home_dir(home)
