"""Ranks of real processes and gloo: one is killed, runs out of memory, hangs, or never starts. None waits for ever.

Deployments run at once, in one fixture: they wait more than they compute. Those that end by time run after the others.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from time import sleep

import attrs
import numpy as np
import pytest
import torch

from capture_planner.errors import RankError
from capture_planner_runner.ranks.connection import connected
from capture_planner_runner.ranks.group import RankGroup
from capture_planner_runner.ranks.outcomes import refuse_differences
from capture_planner_runner.ranks.processes import RankProcess
from capture_planner_runner.ranks.watch import WaitLimits
from support.forks import Fork, fork, free_port, wait

PATIENT = WaitLimits(beat=0.1, silence=30.0, grace=5.0, start=30.0, parting=20.0)
"""Dozens of processes share the cores of the machine: a healthy rank may not get one for seconds."""
HASTY = attrs.evolve(PATIENT, silence=4.0, grace=2.0, start=6.0)
"""Where time itself is the cause."""
LONGEST = 60.0
"""Seconds until a deployment that has not ended fails its test: far more than any of them takes on an idle machine."""


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_out() -> None:
    raise torch.OutOfMemoryError("out of memory at capture 1 of 2")


def interrupt() -> None:
    raise KeyboardInterrupt


@attrs.frozen(kw_only=True)
class Case:
    """What rank 1 of three does, and what the others end with."""

    does: object = None
    at: str = "step"
    says: str = ""
    code: int = 1
    culprit: int | None = 1
    """The exit code of rank 1; None: any."""
    limits: WaitLimits = PATIENT
    has_store: bool = False


CASES = {
    "nothing": Case(code=0, culprit=0),
    "killed in a step": Case(does=kill, says="rank 1 (", culprit=-signal.SIGKILL),
    "killed in a collective of the model": Case(does=kill, at="collective", says="rank 1 (", culprit=-signal.SIGKILL),
    "killed between exchanges": Case(does=kill, at="exchange", says="died, last met at '", culprit=-signal.SIGKILL),
    "out of memory at capture": Case(
        does=run_out, at="exchange", says="ended: OutOfMemoryError: out of memory at capture 1 of 2"
    ),
    "stopped in a step": Case(does=stop, says="has not answered for 4 s", culprit=None, limits=HASTY),
    "stopped in a collective of the model": Case(
        does=stop, at="collective", says="has not answered for 4 s", culprit=None, limits=HASTY
    ),
    "never started": Case(
        at="never", says="rank 1 of 3 has not started within 6 s of the others", culprit=None, limits=HASTY
    ),
    "another plan": Case(at="plan", says="plan: 1 on ranks 0, 2 (", culprit=1),
    "slow": Case(does=lambda: sleep(0.5), at="exchange", code=0, culprit=0),
    "too slow": Case(
        does=lambda: sleep(60.0),
        at="exchange",
        says="answers, but has not come to 'capture 2' within 4 s (--rank-timeout), and is at 'capture 1'",
        limits=attrs.evolve(HASTY, slow=4.0),
    ),
    "at another point": Case(at="topic", says="ranks are at different points: "),
    "interrupted": Case(does=interrupt, code=130, culprit=130),
}


def run_rank(case: Case, me: RankProcess) -> int:
    """Do what a run does: meet, compare, capture, step, part."""

    def end(verdict, is_raised):
        sys.stdout.write(f"around the main thread: {verdict.says}\n")
        sys.stdout.flush()
        os._exit(130 if verdict.interrupted else 1)

    def here(at: str) -> None:
        if case.at == at and me.rank == 1 and case.does is not None:
            case.does()

    try:
        with connected(me, case.limits, end) as connection:
            peers = RankGroup(connection, tensor_size=3, data_size=1, device=torch.device("cpu"))
            refuse_differences(peers, "what they run", {"plan": "2" if case.at == "plan" and me.rank == 1 else "1"})
            peers.exchange("capture 1", None)
            here("exchange")
            topic = "other" if case.at == "topic" and me.rank == 1 else "capture 2"
            assert peers.exchange(topic, [me.rank]) == ([0], [1], [2])
            assert np.array_equal(peers.agree([me.rank, 7]), [[0, 7], [1, 7], [2, 7]])
            here("step")
            peers.agree([1])
            here("collective")
            total = torch.ones(3)
            torch.distributed.all_reduce(total, group=peers.tensor_group())
            assert total.tolist() == [3.0] * 3
            values = peers.collect("the report", me.rank)
            assert values == ((0, 1, 2) if me.rank == 0 else (None, None, None))
            peers.close()
    except RankError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    except torch.OutOfMemoryError:
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


@pytest.fixture(scope="module")
def deployments() -> Iterator[dict[str, list[Fork]]]:
    """Return the processes of all cases, which have ended but for those that cannot end by themselves."""
    started: dict[str, list[Fork]] = {}
    for is_patient in (True, False):
        names = [name for name, case in CASES.items() if (case.limits is PATIENT) is is_patient]
        started |= {name: start(CASES[name]) for name in names}
        wait([each for name in names for each in others(started[name])], LONGEST)
    yield started
    for forks in started.values():
        wait(forks, 0)


def start(case: Case) -> list[Fork]:
    port = free_port()
    ranks = [RankProcess(rank=rank, size=3, local_rank=rank, address="127.0.0.1", port=port) for rank in range(3)]
    return [fork(lambda me=me: run_rank(case, me)) for me in ranks if starts(case, me)]


def others(forks: list[Fork]) -> list[Fork]:
    """Return the processes of ranks 0 and 2."""
    return [forks[0], forks[-1]]


def starts(case: Case, me: RankProcess) -> bool:
    return case.at != "never" or me.rank != 1


@pytest.mark.parametrize("name", CASES)
def test_ranks_end_together_with_the_name_of_the_culprit(name, deployments):
    """Or go on: a slow rank is waited for."""
    case, forks = CASES[name], deployments[name]
    for each in others(forks):
        assert each.code == case.code, each.out + each.err
        assert case.says in each.out
    forks[1].end()
    assert case.culprit in (None, forks[1].code), forks[1].out + forks[1].err
