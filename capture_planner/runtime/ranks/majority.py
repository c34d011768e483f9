"""Which ranks are taken for the cause where ranks differ: those outside of the largest group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def minority(groups: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks that are not in the largest group; of equally large ones, the first counts as the largest.

    :param groups: the ranks by what they have; at least one group.
    """
    largest = max(groups.values(), key=len)
    return tuple(rank for ranks in groups.values() if ranks is not largest for rank in ranks)
