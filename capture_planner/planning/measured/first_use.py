"""Lazy capture: which graphs are worth a capture at start, and which wait for their first use.

The largest graph of each ladder is captured at start: it serves all that smaller ones would until they are there. Any
other is captured at start where it pays for itself: where the passes of the traffic that it serves would take longer,
by at least the time of its capture, on the next larger graph that is captured at start. Without a traffic none is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from capture_planner.modes import Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import LadderAnswers, passes_of, steps_of
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder
from capture_planner.records.batch import Entry
from capture_planner.records.measurements import Measurements
from capture_planner.records.spec import Spec
from capture_planner.records.text import counted

Uses = Counter[tuple[Role, Entry]]
"""Passes of a traffic by the graph that serves them."""


def leave_to_first_use(spec: Spec, roles: Sequence[RoleInProgress], measurements: Measurements | None) -> None:
    """Let the graphs of ``roles`` that are not worth a capture at start wait, with a decision of each role."""
    if measurements is None or measurements.traffic is None:
        why = "no traffic was given, so of each kind of batch only the largest graph is captured at start"
        for working in roles:
            working.wait_for_use((each for own in working.ladders for each in own.entries(without=_largest(own))), why)
        return
    steps, costs, uses = steps_of(measurements.traffic, spec), Costs(measurements.profile), Uses()
    answer = LadderAnswers([ladder for working in roles for ladder in working.ladders], spec)
    for batch, count in steps.counts.items():
        for each, repeats in passes_of(batch, spec):
            entry = answer(each)
            if entry is not None:
                # One replay of a fused chain is all passes of its role in the step.
                uses[each.role, entry] += count * (repeats if entry.draft_steps is None else 1)
    why = (
        f"captured at start is what saves as much time in the {counted(steps.total, 'step')} of the traffic as its "
        "capture takes, and of each kind of batch the largest graph"
    )
    for working in roles:
        pairs = ((own, _worth(own, uses, costs, spec.budget.seconds_per_graph)) for own in working.ladders)
        working.wait_for_use((each for own, kept in pairs for each in own.entries(without=kept)), why)


def _largest(ladder: Ladder) -> tuple[int, ...]:
    """Return the size that serves every batch of a ladder, and the largest decodes where they have no other."""
    return (*ladder.anchors, *ladder.sizes[-1:])


def _worth(ladder: Ladder, uses: Uses, costs: Costs, seconds: float) -> list[int]:
    """Return the sizes captured at start, the largest first; ``seconds``: of a capture where the profile has none."""
    curve, cost = costs.known(ladder.family), costs.cost_of(ladder.family)
    always, kept = _largest(ladder), list[int]()
    for size in reversed(ladder.sizes):
        entries = [ladder.entry(size, case) for case in ladder.served(size)]
        tokens, passes = size * ladder.unit, sum(uses[ladder.role, entry] for entry in entries)
        each = seconds if cost is None else cost.seconds + cost.seconds_per_token * tokens
        saved = 0.0
        # Without the size its passes run on the next larger one that is kept.
        if curve is not None and kept:
            # Passes are in milliseconds, captures in seconds.
            saved = passes * (curve(kept[-1] * ladder.unit) - curve(tokens)) / 1000
        # A graph that no pass needs saves nothing, even where its capture takes no time.
        if size in always or (passes and saved >= each * len(entries)):
            kept.append(size)
    return kept
