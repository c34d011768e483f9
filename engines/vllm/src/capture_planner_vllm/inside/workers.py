"""All workers of one vLLM capture the same graphs, or none captures: law 14.

One that captures others waits in a collective for ever, and so do the rest: a plan that is missing or another on one
host is enough. So each worker writes what it will capture into the store of its process group, and reads what the
others wrote, before anything is captured. Every worker then raises the same error.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from capture_planner.errors import RunError, class_and_message
from capture_planner.records.text import counted
from capture_planner_vllm.inside.log import LOG

SECONDS = 60.0
"""Seconds that a worker waits for the others, which make their managers at about the same time."""

_turns: Counter[str] = Counter()


class Store(Protocol):
    """What is needed of torch's ``Store``."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


def refuse_differences(store: Store, rank: int, size: int, topic: str, graphs: str, seconds: float) -> None:
    """Compare what all workers will capture; each of them calls this with the same topic, once.

    :param graphs: what this worker captures, in a few words that are equal for equal graphs.
    :raises RunError: on every worker, where one captures other graphs; or where one did not answer.
    """
    keys = [f"capture_planner/{topic}/{each}" for each in range(size)]
    store.set(keys[rank], graphs)
    until = time.monotonic() + seconds
    while not store.check(keys):  # its wait would hold the store, which other threads need
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        if missing and time.monotonic() > until:
            raise RunError(
                f"{topic}: {_workers(missing)} of {size} did not say within {seconds:g} s what they capture; "
                "capture-planner-vllm and CAPTURE_PLANNER_PLAN must be there for every worker, on each host"
            )
        time.sleep(0.01)
    answers: dict[str, list[int]] = {}
    for each, key in enumerate(keys):
        answers.setdefault(store.get(key).decode(), []).append(each)
    if len(answers) > 1:
        different = "; ".join(f"{_workers(ranks)}: {graphs}" for graphs, ranks in answers.items())
        raise RunError(f"{topic}: workers would capture different graphs, and wait for each other: {different}")


def _workers(ranks: list[int]) -> str:
    return f"worker{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def compare(manager: Any, topic: str, plan: str) -> None:
    """Compare what a graph manager will capture with its like on the other workers, where there are any.

    :param plan: the digest of the plan, or that this worker has no plan.
    :raises RunError: as ``refuse_differences`` does; where the workers cannot be compared, a warning says why.
    """
    try:
        place = _place()
        # Stages have other managers: only the last one drafts.
        if place is not None and manager.vllm_config.parallel_config.pipeline_parallel_size == 1:
            # Keys of a store stay: the managers that memory profiling makes and the real ones need different ones.
            _turns[topic] += 1
            refuse_differences(*place, f"{topic}, {_turns[topic]}", summary(manager._capture_descs, plan), SECONDS)
    # The one error that ends the start: a worker that went on alone would wait for ever.
    except RunError:
        raise
    except Exception as error:
        LOG.warning("%s: workers are not compared: %s", topic, class_and_message(error))


def all_profile(*, profiles: bool) -> bool:
    """Return whether this worker and all others of its vLLM profile: dummy runs have collectives of all of them."""
    try:
        place = _place()
        if place is None:
            return profiles
        _turns["profile"] += 1
        return all_go_on(*place, f"profile, {_turns['profile']}", seconds=SECONDS, goes=profiles)
    except Exception as error:
        LOG.warning("profile: workers are not compared: %s", class_and_message(error))
        return False


def all_go_on(store: Store, rank: int, size: int, topic: str, *, seconds: float, goes: bool) -> bool:
    """Return whether all workers go on and say so in time: the same on each; one that does not go on never waits."""
    keys = [f"capture_planner/{topic}/{each}" for each in range(size)]
    store.set(keys[rank], str(int(goes)))
    until = time.monotonic() + seconds
    while goes and not store.check(keys) and time.monotonic() < until:
        time.sleep(0.01)
    goes = goes and store.check(keys) and all(store.get(key) == b"1" for key in keys)
    # The first that knows decides: one that sees a late answer would else go on without those that gave up.
    return store.compare_set(f"capture_planner/{topic}", "", str(int(goes))) == b"1"


def _place() -> tuple[Store, int, int] | None:
    """Return the store of all workers, this one's rank, and how many there are; None where it is alone."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()


def summary(descriptors: Mapping[Any, list[Any]], plan: str) -> str:
    """Return what a manager captures, in a few words that are equal for equal graphs in the same order."""
    rows = [repr(desc) for listed in descriptors.values() for desc in listed]
    return f"{counted(len(rows), 'graph')} ({hashlib.sha256(repr(rows).encode()).hexdigest()[:8]}) of {plan}"
