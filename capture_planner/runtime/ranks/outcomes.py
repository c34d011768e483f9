"""What a stage came to on every rank: all go on alike, leave out the same, or stop with the same error."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import attrs
import torch

from capture_planner.errors import RankError
from capture_planner.records._base import grouped
from capture_planner.runtime.ranks.majority import minority
from capture_planner.runtime.ranks.peers import Peers, Plain

Result = TypeVar("Result")


@attrs.frozen
class StageOutcome(Generic[Result]):
    """What a stage came to: its result on this rank, or why it did not fit into the memory of some rank."""

    result: Result | None
    unfit: str | None = None
    """The reason, with the ranks where there are several; None: it fitted on every rank."""


def on_every_rank(
    peers: Peers,
    topic: str,
    stage: Callable[[], Result],
    *,
    awaits: tuple[type[Exception], ...] = (Exception,),
    state: Callable[[], Plain] = lambda: None,
) -> StageOutcome[Result]:
    """Run a stage on all ranks, and return its outcome when all are through with it.

    An error of any rank is raised on every one, before anything else is done together: its own on the rank that has
    it, ``RankError`` with the rank and its message on the others. So is a difference of ``state`` after the stage.

    :param awaits: errors after which this rank waits for the others; one of another type leaves at once.
    """
    result: Result | None = None
    failure: Exception | None = None
    unfit: str | None = None
    try:
        result = stage()
    except awaits as error:
        if isinstance(error, torch.OutOfMemoryError):
            unfit = _line(error)
        else:
            failure = error
    broken = None if failure is None else _line(failure)
    outcomes = cast("list[list[Any]]", peers.exchange(topic, [broken, unfit, state()]))
    if failure is not None:
        try:
            raise failure
        finally:
            # Else it would hold this frame, and the frame it: what the stage had made would wait for the collector.
            failure = None
    faults = {rank: each[0] for rank, each in enumerate(outcomes) if each[0] is not None}
    if faults:
        raise RankError(f"{topic}: " + "; ".join(f"rank {rank}: {line}" for rank, line in faults.items()), faults)
    unfits = {rank: each[1] for rank, each in enumerate(outcomes) if each[1] is not None}
    if not unfits:
        refuse_differences(topic, [each[2] for each in outcomes])
        return StageOutcome(result)
    reasons = unfits.values() if len(outcomes) == 1 else (f"rank {rank}: {line}" for rank, line in unfits.items())
    return StageOutcome(None, "; ".join(reasons))


def refuse_differences(topic: str, values: Sequence[Plain]) -> None:
    """Raise ``RankError`` with the ranks whose value is not the most frequent one, of equally frequent the first."""
    texts = [str(value) for value in values]
    others = sorted(minority(grouped(range(len(texts)), texts.__getitem__)))
    if others:
        most = next(rank for rank in range(len(texts)) if rank not in others)
        raise RankError(
            f"{topic}: "
            + "; ".join(f"rank {rank} has {texts[rank]}" for rank in others)
            + f"; rank {most} has {texts[most]}",
            others,
        )


def _line(error: Exception) -> str:
    message = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        # torch goes on with other processes, its allocator's state and its settings.
        return re.split(r" (?=Process \d|Including non-PyTorch|Of the allocated)", message, maxsplit=1)[0]
    return f"{type(error).__name__}: {message}"
