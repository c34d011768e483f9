"""The report of a run, its memory: by role and mode, by graph, and against the device's own figure."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.records.text import counted
from capture_planner.report.summary import RunSummary
from capture_planner.report.writing import Cell, Grid, Section, extent, percent, size
from capture_planner.runtime.ledger import Accounts, RunReport

MOST_APART = 0.05
"""The ledger is flagged where it is further than this share from what the device reports."""

_APART = (
    "the ledger is {} away from what the device reports: something took or gave back memory between captures, such "
    "as another process on the device"
)

MAX_GRAPHS = 10
"""Graphs that are listed with their memory, the largest first; the rest is counted."""


def memory_sections(report: RunReport, numbers: RunSummary) -> Iterator[Section]:
    """Yield the sections: where the memory went, and the graphs that took most of it."""
    accounts, later, rest = numbers.accounts, numbers.later, report.buffers - report.workspaces
    rows: list[tuple[Cell, ...]] = [
        (kind.role, kind.mode, size(kind.memory), size(kind.driver), size(kind.memory + kind.driver))
        for kind in numbers.captured
    ]
    rows += [] if accounts is None else _others(accounts)
    notes = () if later is None else (f"from the last capture to the end, the device lost {size(later)}",)
    yield Section(
        name="memory",
        warnings=(_APART.format(percent(accounts.apart)),) if accounts and accounts.apart > MOST_APART else (),
        lines=(
            f"weights {size(report.weights)}, KV cache {size(report.kv_cache)}, fields and outputs "
            f"{size(rest)}, workspaces {size(report.workspaces)}",
            _reconciled(report, accounts),
        ),
        grid=Grid.of(("what", "mode", "allocator", "driver", "sum"), rows, text=2),
        notes=notes,
    )
    yield from _by_graph(numbers)


def _others(accounts: Accounts) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield a row for all that is no graph, and the sum that the device must confirm."""
    if accounts.dropped:
        yield "graphs that were dropped", "", size(accounts.dropped), "", size(accounts.dropped)
    warm_up, modules = accounts.warm_up, accounts.modules
    yield "warm-ups, and modules they load", "", size(warm_up), size(modules), size(warm_up + modules)
    yield "not explained", "", "", "", size(accounts.unexplained)
    yield "gone from the device", "", "", "", size(accounts.device)


def _reconciled(report: RunReport, accounts: Accounts | None) -> str:
    if not report.captured:
        return "no graph was captured"
    if accounts is None:
        return "no device was read: graphs that are recorded lie in the host's memory"
    return (
        f"the device lost {size(accounts.device)} from before the first capture to after the last, and the "
        f"ledger has {size(accounts.explained)} of it: {percent(accounts.apart)} apart"
    )


def _by_graph(numbers: RunSummary) -> Iterator[Section]:
    taking = (used.graph for used in numbers.graphs if used.graph.memory or used.graph.driver)
    graphs = sorted(taking, key=lambda graph: -(graph.memory + graph.driver))
    if not graphs:
        return
    listed = graphs[:MAX_GRAPHS]
    rest = len(numbers.graphs) - len(listed)
    memory = sum(graph.memory + graph.driver for graph in graphs[MAX_GRAPHS:])
    rows = [(g.role, g.entry.mode, extent(g.entry), size(g.memory), size(g.driver), size(g.alone)) for g in listed]
    grid = Grid.of(("graph of", "mode", "size", "allocator", "driver", "alone"), rows, text=3)
    notes = (f"and {counted(rest, 'other graph')}, which took {size(memory)}",) if rest else ()
    yield Section(name="memory-by-graph", title="Memory by graph", grid=grid, notes=notes)
