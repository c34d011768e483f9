"""What graphs cost, as a range: from what was measured to what is reported in public.

An emulation knows how many graphs an engine captures, and of its model no more than attention and length, so memory and
time are ranges. ``profile`` measures them on a machine, and ``tune`` and ``plan`` go by what it measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs

from capture_planner.engines.emulation import CapturedGraph, Emulation
from capture_planner.records.text import counted

LEAST = {False: (1.0, 0.03), True: (0.0, 0.004)}
"""MiB and seconds of a graph of the target, and (True) of a drafter, at least: vLLM 0.33 on an H200 with Qwen3-0.6B and
Qwen3-8B and an EAGLE-3 drafter (the shipped profiles, rounded down)."""

MOST = (25.0, 0.25)
"""MiB and seconds of a graph at most: public threads have 7 to 25 MiB (vllm#50780: 24) and 0.05 to 0.25 s."""

ONCE = (842.0, 0.8)
"""MiB and seconds that capturing takes at most before its first graph: the larger of the shipped profiles."""

SOURCE = "between those measured on an H200 and the most reported"


@attrs.frozen
class GraphBill:
    """Graphs, and the least and the most that they cost a rank at start-up."""

    graphs: int
    mib: tuple[float, float]
    seconds: tuple[float, float]

    def __str__(self) -> str:
        unit, of = ("GiB", 1024) if self.mib[1] >= 1024 else ("MiB", 1)
        low, high = (_number(each / of) for each in self.mib)
        return f"{low} to {high} {unit} and {_number(self.seconds[0])} to {_number(self.seconds[1])} s"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def bill(graphs: Iterable[CapturedGraph], once: tuple[float, float] = ONCE) -> GraphBill:
    """Return what these graphs cost; ``once``: MiB and seconds that capturing takes before the first."""
    drafts = [graph.role.is_drafter for graph in graphs]
    mib, seconds = (
        (round(sum(LEAST[each][i] for each in drafts), 1), round(len(drafts) * MOST[i] + once[i] * bool(drafts), 1))
        for i in (0, 1)
    )
    return GraphBill(len(drafts), mib, seconds)


def change_text(before: Emulation, after: Emulation) -> str:
    """Say what other flags cost or save: ``928 more graphs, 1179 in all: 0.9 to 22.7 GiB and 28 to 232 s``."""
    old, new = (Counter(graph.role.is_drafter for graph in each.graphs) for each in (before, after))
    was, total = (len(each.graphs) + sum(len(one.budgets) for one in each.encoders) for each in (before, after))
    by = total - was
    if not by:
        return f"as many graphs, {total}"
    more, fewer = (new, old) if by > 0 else (old, new)
    # Graphs of encoders were not measured, and may take next to nothing.
    least = [max(sum(LEAST[each][i] * (more[each] - fewer[each]) for each in LEAST), 0.0) for i in (0, 1)]
    mib, seconds = ((least[i], MOST[i] * abs(by)) for i in (0, 1))
    bill_ = GraphBill(abs(by), mib, seconds)
    return (
        f"{counted(abs(by), 'more graph' if by > 0 else 'fewer graph')}, {total} in all: {bill_}{' saved' * (by < 0)}"
    )
