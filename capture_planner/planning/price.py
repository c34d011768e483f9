"""The price of a budget: which of its limits is reached, and how much further batches are padded for it."""

from __future__ import annotations

from collections.abc import Sequence

from capture_planner.planning.sizing import Ladder, total
from capture_planner.records.batch import Kind
from capture_planner.records.spec import Budget

RULE = "budget-price"
"""The decision of the first role that states it for the whole plan."""

_BATCHES = {Kind.DECODE: "decodes", Kind.MIXED: "mixed batches"}


def price_of(budget: Budget, before: Sequence[Ladder], after: Sequence[Ladder]) -> str:
    """Say what it costs that ``before`` became ``after``, ladder by ladder."""
    reached = []
    for kind in Kind:
        wanted, most = (total([ladder for ladder in before if ladder.kind is kind]), budget.allowed_of(kind))
        if most is not None and wanted > most:
            reached.append(f"graphs.{kind.value} allows {most} of {wanted} graphs")
    left = total(before) if not reached else min(total(before), _within_kinds(budget, before))
    bounds = sorted(budget.bounds())
    if bounds and left > bounds[0][0]:
        others = "".join(f", {text} would allow {graphs}" for graphs, text in bounds[1:])
        reached.append(f"{bounds[0][1]} allows {bounds[0][0]} of {left} graphs{others}")
    return "; ".join((*reached, *(_padding(kind, before, after) for kind in Kind if _has(kind, before))))


def _within_kinds(budget: Budget, ladders: Sequence[Ladder]) -> int:
    """Return how many graphs are wanted, those of each kind within its own limit."""
    wanted = {kind: total([ladder for ladder in ladders if ladder.kind is kind]) for kind in Kind}
    allowed = {kind: budget.allowed_of(kind) for kind in Kind}
    return sum(count if (most := allowed[kind]) is None else min(count, most) for kind, count in wanted.items())


def _has(kind: Kind, ladders: Sequence[Ladder]) -> bool:
    return any(ladder.kind is kind and ladder.sizes for ladder in ladders)


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
