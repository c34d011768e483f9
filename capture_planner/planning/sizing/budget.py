"""Fit ladders into a number of graphs: coarser first, shorter only when that fails.

A coarser ladder pads more and covers the same batches. So padding is given up before coverage, LoRA cases before
either, as the largest case serves the others, and mixed batches before decodes.

The price of a budget says which of its limits is reached, and how much further batches are padded for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction

from capture_planner.modes import Reason, Role
from capture_planner.planning.sizing.ladder import Ladder
from capture_planner.records.batch import Kind
from capture_planner.records.spec import Budget

PRICE_RULE = "budget-price"
"""The decision of the first role that states the price for the whole plan."""

_GRAIN = 1 << 10
_LEAST_VALUABLE_FIRST = (
    (Kind.MIXED, Role.DRAFT_PREFILL),
    (Kind.MIXED, Role.TARGET),
    (Kind.DECODE, Role.DRAFT_PREFILL),
    (Kind.DECODE, Role.DRAFT_DECODE),
    (Kind.DECODE, Role.TARGET),
)

_BATCHES = {Kind.DECODE: "decodes", Kind.MIXED: "mixed batches"}


def total(ladders: Sequence[Ladder]) -> int:
    """Return how many graphs the ladders need."""
    return sum(ladder.num_graphs for ladder in ladders)


def fit(ladders: Sequence[Ladder], allowed: int, reason: Reason) -> tuple[Ladder, ...]:
    """Return ladders with at most ``allowed`` graphs in total, in the order given.

    All are thinned to the least common worst ratio that fits. The LoRA cases between none and the most are dropped
    where more sizes pad less; then whole ladders, least valuable first.

    :param reason: why a ladder is dropped, for its waivers.
    """
    if total(ladders) <= allowed:
        return tuple(ladders)
    plain = [ladder.reduced for ladder in ladders]
    # All cases are worth their graphs where the sizes left pad no more than those without the cases between.
    whole, thinned = _thinned(ladders, allowed), _thinned(plain, allowed)
    if whole is not None and thinned is not None and _worst(whole) <= _worst(thinned):
        return whole
    for position in sorted(range(len(plain)), key=lambda i: value(plain[i])):
        if (thinned := _thinned(plain, allowed)) is not None:
            return thinned
        plain[position] = plain[position].dropped(reason)
    return tuple(plain)


def value(ladder: Ladder) -> tuple[int, int]:
    """Order ladders by what dropping them costs; longer queries are rarer among decodes."""
    return _LEAST_VALUABLE_FIRST.index((ladder.kind, ladder.role)), -(ladder.query_len or 0)


def _worst(ladders: Sequence[Ladder]) -> Fraction:
    return max(ladder.worst for ladder in ladders if ladder.sizes)


def _thinned(ladders: Sequence[Ladder], allowed: int) -> tuple[Ladder, ...] | None:
    """Return the ladders at the least common ratio that fits, or None where one size each does not."""

    def at(grains: int) -> list[Ladder]:
        return [ladder.thinned(Fraction(grains, _GRAIN)) for ladder in ladders]

    grains = range(_GRAIN, _GRAIN * (1 + max((ladder.sizes[-1] for ladder in ladders if ladder.sizes), default=1)))
    # At this ratio the ladders are as short as they can be.
    if total(at(grains.stop)) > allowed:
        return None
    # A looser ratio needs no more graphs, so the tightest one that fits is found by bisection.
    thinned = at(grains.start + bisect_left(grains, True, key=lambda number: total(at(number)) <= allowed))
    # The same number of sizes may pad less than the common ratio allows.
    best = [new if new is old else new.tightened() for old, new in zip(ladders, thinned, strict=True)]
    # Tightened sizes may serve more LoRA cases, and so need more graphs.
    return tuple(best if total(best) <= allowed else thinned)


def price_of(budget: Budget, before: Sequence[Ladder], after: Sequence[Ladder]) -> str:
    """Say what it costs that ``before`` became ``after``, ladder by ladder."""
    reached, within = [], 0  # graphs that are wanted, those of each kind within its own limit
    for kind in Kind:
        wanted, most = (total([ladder for ladder in before if ladder.kind is kind]), budget.allowed_of(kind))
        within += wanted if most is None else min(wanted, most)
        if most is not None and wanted > most:
            reached.append(f"graphs.{kind.value} allows {most} of {wanted} graphs")
    # Graphs that the limits by kind drop do not count against the limits on all.
    left = total(before) if not reached else min(total(before), within)
    bounds = sorted(budget.bounds())
    if bounds and left > bounds[0][0]:
        others = "".join(f", {text} would allow {graphs}" for graphs, text in bounds[1:])
        reached.append(f"{bounds[0][1]} allows {bounds[0][0]} of {left} graphs{others}")
    sized = {ladder.kind for ladder in before if ladder.sizes}
    return "; ".join((*reached, *(_padding(kind, before, after) for kind in Kind if kind in sized)))


def _padding(kind: Kind, before: Sequence[Ladder], after: Sequence[Ladder]) -> str:
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0].kind is kind and pair[0].sizes]
    kept = [new for _, new in pairs if new.sizes]
    was = max(float(old.worst - 1) for old, _ in pairs)
    if not kept:
        return f"{_BATCHES[kind]} lose all graphs"
    now = max(float(new.worst - 1) for new in kept)
    gone = sum(not new.sizes for _, new in pairs)
    lost = f", and {gone} of {len(pairs)} lists of sizes are dropped" if gone else ""
    becomes = f"{was:.1%} becomes {now:.1%}" if now > was else f"stays {was:.1%}"
    return f"worst padding of {_BATCHES[kind]} {becomes}{lost}"
