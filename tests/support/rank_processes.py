"""Ranks as processes: forked from the test's own, connected over gloo as those of a run are."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from capture_planner_runner.ranks.connection import connected
from capture_planner_runner.ranks.group import RankGroup
from capture_planner_runner.ranks.processes import run_ranks
from capture_planner_runner.ranks.watch import WaitLimits

START = 60.0
"""Seconds for all ranks to start: a machine that runs other tests is slow."""


def on_processes(size: int, work: Callable[[RankGroup], Any], folder: Path, *, tensor: int) -> list[Any]:
    """Run ``work`` on so many ranks, ``tensor`` of which share a model; return by rank what it returned.

    What it returns is pickled. Fails where a rank ends with an error.
    """

    def run(me: Any, say: Callable[[str], None]) -> int:
        torch.set_num_threads(1)
        try:
            with connected(me, WaitLimits(start=START), lambda verdict, raised: os._exit(1)) as connection:
                group = RankGroup(connection, tensor_size=tensor, data_size=size // tensor, device=torch.device("cpu"))
                (folder / f"{me.rank}.pickle").write_bytes(pickle.dumps(work(group)))
                group.close()
        except Exception as error:
            say(f"rank {me.rank}: {type(error).__name__}: {error}")
            return 1
        return 0

    said: list[str] = []
    code = run_ranks(size, run, said.append)
    assert code == 0, said
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]
