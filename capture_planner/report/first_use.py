"""The report of a run: the graphs that were captured on first use, and what is left of their budget."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.records.text import counted
from capture_planner.report.summary import RunSummary
from capture_planner.report.writing import Grid, Section, extent, seconds, size
from capture_planner.runtime.session import RunReport


def first_use_sections(report: RunReport, numbers: RunSummary) -> Iterator[Section]:
    """Yield the section of a lazy plan: each graph that was tried, when, what it took, and why it was left out.

    Those that were not tried, since nothing of the memory was left, are counted.
    """
    lazy = report.lazy
    if lazy is None:
        return
    late = [graph for graph in report.captured if graph.step is not None]
    tried = [graph for graph in late if graph.tried]
    refused = [(graph, graph.waiver) for graph in tried if graph.waiver is not None]
    untried = f"{counted(lazy.untried, 'graph')} not tried: nothing of capture.memory is left; raise it in the spec"
    uses = {(use.graph.role, use.graph.entry): use.forwards for use in numbers.graphs}
    rows = (
        (
            graph.role,
            graph.entry.mode,
            extent(graph.entry),
            f"{graph.step:,}",
            seconds(graph.seconds),
            size(graph.taken),
            "refused" if graph.waiver else f"{uses[graph.role, graph.entry]:,}",
        )
        for graph in tried
    )
    more = f"{seconds(lazy.left)} are left" if lazy.left > 0 else f"{seconds(-lazy.left)} more than that were taken"
    yield Section(
        name="first-use",
        title="Captured on first use",
        warnings=(
            *(f"{graph.role.value}: {waiver.message}" for graph, waiver in refused),
            *([untried] if lazy.untried else []),
        ),
        lines=(
            f"{len(tried) - len(refused)} of {counted(report.plan.num_lazy, 'graph')} in {seconds(lazy.seconds)}; "
            f"{lazy.asked:,} were asked for and have had no turn, {lazy.unused:,} were not asked for",
            f"budget: {size(lazy.taken)} of {size(lazy.memory)} are taken; of {lazy.seconds_per_minute:g} s a minute "
            f"{more}",
        ),
        grid=Grid.of(("role", "mode", "graph", "after step", "time", "memory", "forwards"), rows, text=3)
        if tried
        else None,
    )
