"""Rows that ranks of one host share: every rank has the same rows in every round, and none is waited for in vain."""

import random
import threading
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RankError
from capture_planner_runner.ranks.group import MOST, SharedRows, create, usable

pytestmark = pytest.mark.skipif(not usable(), reason="rows are shared on x86-64 processors")


@contextmanager
def opened(size, check=lambda: None):
    """Rows of ranks, each with a map of its own, as processes have."""
    path = Path(create(size))
    try:
        yield [SharedRows(path, rank, size, check) for rank in range(size)]
    finally:
        path.unlink()


@given(st.integers(2, 4), st.integers(1, 6), st.integers(0, 999), st.sampled_from((1, 7, MOST)))
def test_every_rank_gathers_what_all_gave(size, rounds, seed, width):
    """Whoever is late, in each round."""
    given_rows = np.random.default_rng(seed).integers(-9, 9, (rounds, size, width))
    gathered = np.zeros((size, *given_rows.shape), np.int64)

    def work(rank, rows):
        late = random.Random(seed + rank)
        for number in range(rounds):
            sleep(late.choice((0, 0, 0.0003)))
            gathered[rank, number] = rows.gather(given_rows[number, rank].tolist())

    with opened(size) as ranks:
        threads = [threading.Thread(target=work, args=each) for each in enumerate(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (gathered == given_rows).all()


def test_rank_that_will_not_come_is_not_waited_for():
    """The watch raises its verdict inside of the wait."""

    def check():
        raise RankError("rank 1 died", (1,))

    with opened(2, check) as (first, _), pytest.raises(RankError, match="rank 1 died"):
        first.gather([1])


def test_file_of_another_machine_is_not_opened():
    """So that all take the other way."""
    with pytest.raises(OSError, match="No such file"):
        SharedRows(Path("absent") / "rows", 0, 2, lambda: None)
