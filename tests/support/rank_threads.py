"""Ranks as threads of one process: many in a second, each with the peers that a process would have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.errors import RankError
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.ranks.collectives import Collectives
from capture_planner_runner.ranks.peers import Place
from support.worlds import CPU, World

PATIENCE = 30.0
"""Seconds that a rank waits for the others before the test fails: longer than any step takes."""


@attrs.define(eq=False)
class Meeting:
    """Where the threads meet: each leaves a value, and takes all when the last one has come."""

    size: int
    values: dict[int, tuple[str, Any]] = attrs.Factory(dict)
    gone: dict[int, str] = attrs.Factory(dict)
    round: int = 0
    last: tuple[tuple[str, Any], ...] = ()
    condition: threading.Condition = attrs.Factory(threading.Condition)

    def exchange(self, rank: int, topic: str, value: Any) -> tuple[Any, ...]:
        with self.condition:
            mine = self.round
            self.values[rank] = topic, value
            if len(self.values) == self.size:
                self.last = tuple(self.values[each] for each in range(self.size))
                self.values, self.round = {}, self.round + 1
                self.condition.notify_all()
            else:
                arrived = self.condition.wait_for(lambda: self.round > mine or self.gone, PATIENCE)
                assert arrived, f"rank {rank} waited at {topic!r} for {set(range(self.size)) - set(self.values)}"
                if self.round == mine:
                    raise RankError(f"{topic}: gone: {self.gone}", self.gone)
            last = self.last
        others = [each for each, (name, _) in enumerate(last) if name != topic]
        if others:
            raise RankError(f"{topic}: " + ", ".join(f"rank {each} is at {last[each][0]!r}" for each in others), others)
        return tuple(value for _, value in last)

    def leave(self, rank: int, reason: str) -> None:
        with self.condition:
            self.gone[rank] = reason
            self.condition.notify_all()


@attrs.frozen
class ThreadPeers:
    """The peers of a thread; topics are kept, in order."""

    place: Place
    meeting: Meeting
    topics: list[str] = attrs.Factory(list)

    def exchange(self, topic: str, value: Any) -> tuple[Any, ...]:
        self.topics.append(topic)
        return self.meeting.exchange(self.place.rank, topic, value)

    def agree(self, numbers: Sequence[int]) -> np.ndarray:
        return np.array(self.meeting.exchange(self.place.rank, "agree", list(numbers)), np.int64)

    def tensor_group(self) -> None:
        return None

    def close(self) -> None:
        return None


@attrs.define(eq=False)
class ThreadCollectives(Collectives):
    """Collectives between threads, for models that run eagerly."""

    rank: int
    size: int
    meeting: Meeting
    calls: int = 0
    facts: Mapping[str, str] = attrs.Factory(dict)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return self.gather(partial).sum(dim=0)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.stack(self.meeting.exchange(self.rank, "collective", part.clone()))

    def keep(self, graph: object) -> None:
        return None

    def release(self) -> None:
        return None


def collectives(size: int) -> list[Collectives]:
    """Return the collectives of so many threads."""
    meeting = Meeting(size)
    return [ThreadCollectives(rank, size, meeting) for rank in range(size)]


def on_ranks(size: int, work: Callable[[ThreadPeers], Any], *, tensor: int = 1) -> list[Any]:
    """Run ``work`` on so many threads at once; return by rank what it returned or raised."""
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        peers = ThreadPeers(Place(rank, tensor_size=tensor, data_size=size // tensor, host="thread"), meeting)
        torch.set_num_threads(1)
        try:
            return work(peers)
        except Exception as error:
            meeting.leave(rank, str(error))
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def replicas_of(world: World, size: int) -> list[World]:
    """Return a world for each of so many data-parallel ranks, with a model and a drafter of its own.

    Models of threads cannot be shared: a forward puts hooks on its model.
    """
    spec = replace(world.spec, parallel=replace(world.spec.parallel, data=size))
    plan = make_plan(spec, CPU, world.registry)
    drafter = world.drafter
    found = []
    for _ in range(size):
        target = load_target(None, spec.model, device=torch.device("cpu"), dtype=torch.float64, seed=world.seed)
        if plan.speculative is not None:
            drafter = choose_drafter(
                "random", plan.speculative, target, num_states=plan.limits.max_num_reqs, length=0, seed=world.seed + 1
            )
        found.append(attrs.evolve(world, plan=plan, spec=spec, target=target, drafter=drafter))
    return found
