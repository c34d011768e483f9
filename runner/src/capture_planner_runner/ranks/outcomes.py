"""Stages that all ranks do together: they start alike, go on alike, or stop with the same error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import attrs
import torch

from capture_planner.errors import RankError, class_and_message, one_line
from capture_planner.records._base import grouped
from capture_planner.records.batch_space import union
from capture_planner_runner.ranks.peers import Peers, Plain

Result = TypeVar("Result")


def minority(groups: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest group: they are taken for the cause of a difference.

    :param groups: ranks by their value; at least one group. Of equally large groups, the first counts as the largest.
    """
    largest = max(groups.values(), key=len)
    return tuple(rank for ranks in groups.values() if ranks is not largest for rank in ranks)


# The start ----------------------------------------------------------------------------------------


def refuse_differences(peers: Peers, topic: str, facts: Mapping[str, str]) -> None:
    """Raise ``RankError`` with the differences, on every rank, where facts differ: digests, versions, seeds."""
    mine: Mapping[str, Plain] = {"": peers.place.host, **facts}
    cards = [dict(card) for card in peers.exchange(topic, mine) if isinstance(card, Mapping)]
    hosts = [str(card.pop("")) for card in cards]
    texts = [{name: str(value) for name, value in card.items()} for card in cards]
    found = differences(texts, hosts)
    if found:
        # The fact that the fewest ranks differ in points at the culprit best.
        others = (minority(groups) for groups in _groups(texts).values())
        few = min(filter(None, others), key=len, default=())
        raise RankError(f"the ranks do not run the same: {'; '.join(found)}; start all of them alike", few)


def differences(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence for each fact that differs between ranks: its values, and the ranks of each.

    :param facts: of each rank, by name.
    :param hosts: name of each rank's machine.
    """
    return tuple(
        f"{name}: {', '.join(f'{value} on {_ranks(ranks, hosts)}' for value, ranks in groups.items())}"
        for name, groups in _groups(facts).items()
        if len(groups) > 1
    )


def _groups(facts: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Return, for each fact, the ranks by their value."""
    found: dict[str, dict[str, list[int]]] = {}
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name, "nothing") for each in facts]
        found[name] = grouped(range(len(facts)), values.__getitem__)
    return found


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks as ``ranks 0 to 3, 6 (host)``."""
    runs = union((rank, rank) for rank in ranks)
    text = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in runs)
    machines = dict.fromkeys(hosts[rank] for rank in ranks)
    shown = ", ".join(list(machines)[:3]) + (", …" if len(machines) > 3 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {text} ({shown})"


# Each stage ---------------------------------------------------------------------------------------


@attrs.frozen
class StageOutcome(Generic[Result]):
    """The outcome of a stage: its result on this rank, or why it did not fit into the memory of some rank."""

    result: Result | None
    unfit: str | None = None
    """Reason, with the ranks if there are several; None: it fitted on every rank."""


def on_every_rank(
    peers: Peers,
    topic: str,
    stage: Callable[[], Result],
    *,
    awaits: tuple[type[Exception], ...] = (Exception,),
    state: Callable[[], Plain] = lambda: None,
) -> StageOutcome[Result]:
    """Run a stage on all ranks, and return its outcome once all have finished it.

    An error of any rank is raised on every one, before anything else is done together: its own on the rank that has
    it, ``RankError`` with the rank and its message on the others. So is a difference of ``state`` after the stage.

    :param awaits: errors after which this rank waits for the others; after another type it leaves at once.
    """
    result: Result | None = None
    failure: Exception | None = None
    unfit: str | None = None
    try:
        result = stage()
    except awaits as error:
        # A lack of memory ends no run: the ranks agree on it, and drop the graph together.
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
            # The error holds this frame, and the frame the error: without this, tensors of the stage stay alive.
            failure = None
    faults = {rank: each[0] for rank, each in enumerate(outcomes) if each[0] is not None}
    if faults:
        raise RankError(f"{topic}: " + "; ".join(f"rank {rank}: {line}" for rank, line in faults.items()), faults)
    unfits = {rank: each[1] for rank, each in enumerate(outcomes) if each[1] is not None}
    if not unfits:
        refuse_other_states(topic, [each[2] for each in outcomes])
        return StageOutcome(result)
    reasons = unfits.values() if len(outcomes) == 1 else (f"rank {rank}: {line}" for rank, line in unfits.items())
    return StageOutcome(None, "; ".join(reasons))


def refuse_other_states(topic: str, states: Sequence[Plain]) -> None:
    """Raise ``RankError`` with the ranks whose state is not the most frequent one, of equally frequent the first."""
    texts = [str(state) for state in states]
    others = sorted(minority(grouped(range(len(texts)), texts.__getitem__)))
    if others:
        most = next(rank for rank in range(len(texts)) if rank not in others)
        listed = "; ".join(f"rank {rank} has {texts[rank]}" for rank in others)
        raise RankError(f"{topic}: {listed}; rank {most} has {texts[most]}", others)


def _line(error: Exception) -> str:
    message = one_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        # The rest of torch's message is about other processes, its allocator's state and its settings.
        return re.split(r" (?=Process \d|Including non-PyTorch|Of the allocated)", message, maxsplit=1)[0]
    return class_and_message(error)
