"""All sets of a few things, those that cost least first, one by one: there may be too many to list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from heapq import heappop, heappush
from itertools import combinations

Subset = frozenset[int]


def by_sum(costs: Mapping[int, int]) -> Iterator[tuple[int, Subset]]:
    """Yield each set of keys with the sum of its costs, ascending; costs may be negative.

    The first set has the negative costs. Each other one differs from it by some keys, in the order of how little they
    change the sum: the next one by the key after its last one too, or instead of it.
    """
    order = sorted(costs, key=lambda key: (abs(costs[key]), key))
    steps = [abs(costs[key]) for key in order]
    first = frozenset(key for key in costs if costs[key] < 0)
    heap: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []

    def push(total: int, changed: tuple[int, ...]) -> None:
        members = tuple(sorted(first.symmetric_difference(order[place] for place in changed)))
        heappush(heap, (total, len(members), members, changed))

    push(sum(costs[key] for key in first), ())
    while heap:
        total, _, members, changed = heappop(heap)
        yield total, frozenset(members)
        last = changed[-1] if changed else -1
        if last + 1 < len(order):
            push(total + steps[last + 1], (*changed, last + 1))
            if changed:
                push(total - steps[last] + steps[last + 1], (*changed[:-1], last + 1))


def by_largest(ratios: Mapping[int, Fraction]) -> Iterator[tuple[Fraction, Subset]]:
    """Yield each set of keys with its largest ratio, ascending; of the empty set that is one."""
    yield Fraction(1), frozenset()
    order = sorted(ratios, key=lambda key: (ratios[key], key))
    for place, key in enumerate(order):
        for number in range(place + 1):
            for others in combinations(order[:place], number):
                yield max(ratios[key], Fraction(1)), frozenset((key, *others))
