"""The start of ranks: before anything is loaded or captured, all are shown to run the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capture_planner.errors import RankError
from capture_planner.records._base import grouped
from capture_planner.records.batch_space import union
from capture_planner.runtime.ranks.majority import minority
from capture_planner.runtime.ranks.peers import Peers, Plain


def refuse_differences(peers: Peers, topic: str, facts: Mapping[str, str]) -> None:
    """Compare facts of all ranks: digests, versions, seeds. Raises ``RankError`` with what differs, on every rank."""
    mine: Mapping[str, Plain] = {"": peers.place.host, **facts}
    cards = [dict(card) for card in peers.exchange(topic, mine) if isinstance(card, Mapping)]
    hosts = [str(card.pop("")) for card in cards]
    found = differences([{name: str(value) for name, value in card.items()} for card in cards], hosts)
    if found:
        few = min((ranks for ranks in _others(cards)), key=len, default=())
        raise RankError(f"the ranks do not run the same: {'; '.join(found)}; start all of them alike", few)


def differences(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> tuple[str, ...]:
    """Return what differs between ranks, a sentence for each fact: its values with the ranks that have it.

    :param facts: of each rank, by name; ``hosts``: the machine of each.
    """
    names = dict.fromkeys(name for each in facts for name in each)
    found = []
    for name in names:
        groups = _by_value(facts, name)
        if len(groups) > 1:
            values = (f"{value} on {_ranks(ranks, hosts)}" for value, ranks in groups.items())
            found.append(f"{name}: {', '.join(values)}")
    return tuple(found)


def _by_value(facts: Sequence[Mapping[str, object]], name: str) -> dict[str, list[int]]:
    return grouped(range(len(facts)), lambda rank: str(facts[rank].get(name, "nothing")))


def _others(facts: Sequence[Mapping[str, object]]) -> list[tuple[int, ...]]:
    """Return, for each fact that differs, the ranks that do not have what most have."""
    names = dict.fromkeys(name for each in facts for name in each)
    return [ranks for name in names if (ranks := minority(_by_value(facts, name)))]


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks as ``ranks 0 to 3, 6 (host)``."""
    runs = union((rank, rank) for rank in ranks)
    text = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in runs)
    machines = dict.fromkeys(hosts[rank] for rank in ranks)
    shown = ", ".join(list(machines)[:3]) + (", …" if len(machines) > 3 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {text} ({shown})"
