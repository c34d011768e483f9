"""The report of a run, its memory: by role and mode, by graph, and against the device's own figure."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.records.text import counted
from capture_planner.report.summary import CapturedKind, RunSummary
from capture_planner.report.writing import Cell, Grid, Section, extent, percent, size
from capture_planner.runtime.ledger import Accounts
from capture_planner.runtime.session import RunReport

MOST_APART = 0.05
"""The ledger is flagged where it is further than this share from what the device reports."""

_APART = (
    "what captures took is {} apart from what the device reports: another process took or gave back memory meanwhile; "
    "run on a device that nothing else uses"
)

MAX_GRAPHS = 10
"""Graphs that are listed with their memory, the largest first; the rest is counted."""


def memory_sections(report: RunReport, numbers: RunSummary) -> Iterator[Section]:
    """Yield the sections: where the memory went, and the graphs that took most of it."""
    accounts, later, rest = numbers.accounts, numbers.later, report.buffers - report.workspaces
    rows = [_kind(kind) for kind in numbers.captured if not kind.on_first_use]
    rows += [] if accounts is None else _others(accounts)
    rows += [_kind(kind) for kind in numbers.captured if kind.on_first_use]
    notes = () if later is None else (_later(later),)
    yield Section(
        name="memory",
        warnings=(_APART.format(percent(accounts.apart)),) if accounts and accounts.apart > MOST_APART else (),
        lines=(
            f"weights {size(report.weights)}, KV cache {size(report.kv_cache)}, fields and outputs "
            f"{size(rest)}, workspaces {size(report.workspaces)}",
            *_cache(report),
            _reconciled(report, accounts),
        ),
        grid=Grid.of(("what", "mode", "allocator", "driver", "sum"), rows, text=2),
        notes=notes,
    )
    yield from _by_graph(numbers)


def _kind(kind: CapturedKind) -> tuple[Cell, ...]:
    what = f"{kind.role.value}, on first use" if kind.on_first_use else kind.role
    return what, kind.mode, *map(_change, (kind.memory, kind.driver, kind.memory + kind.driver))


def _later(lost: int) -> str:
    change = f"the device lost {size(lost)}" if lost >= 0 else f"{size(-lost)} of the device came back"
    return f"from the last capture to the end, {change}"


def _others(accounts: Accounts) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield a row for all that is no graph, and the sum that the device must confirm."""
    if accounts.dropped:
        yield "graphs that were dropped", "", size(accounts.dropped), "", size(accounts.dropped)
    warm_up, modules = accounts.warm_up, accounts.modules
    yield "warm-ups, and modules they load", "", _change(warm_up), _change(modules), _change(warm_up + modules)
    if accounts.unexplained:
        yield "others on the device, meanwhile", "", "", "", _change(accounts.unexplained)
    yield "gone from the device", "", "", "", _change(accounts.device)


def _change(bytes_: int) -> str:
    """Write by how much memory went down, or what came back."""
    return size(bytes_) if bytes_ >= 0 else f"{size(-bytes_)} came back"


def _reconciled(report: RunReport, accounts: Accounts | None) -> str:
    if not report.captured:
        return "no graph was captured"
    if accounts is None:
        return "no device was read: graphs that are recorded lie in the host's memory"
    return (
        f"captures took {_change(accounts.device)} of the device; with {_change(accounts.explained)} the ledger is "
        f"{percent(accounts.apart)} apart from it"
    )


def _cache(report: RunReport) -> Iterator[str]:
    """Yield why the KV cache is as large as it is, and whether graphs took what was expected."""
    chosen = report.cache_memory
    if chosen is None:
        return
    took = Accounts.of(report.captured)
    compared = ""
    if chosen.predicted and took is not None:
        compared = f"; graphs took {size(took.graphs + took.driver)}, and {size(chosen.predicted)} were expected"
    yield f"KV cache: {chosen.reason}{compared}"


def _by_graph(numbers: RunSummary) -> Iterator[Section]:
    taking = (used.graph for used in numbers.graphs if used.graph.memory or used.graph.driver)
    graphs = sorted(taking, key=lambda graph: -(graph.memory + graph.driver))
    if not graphs:
        return
    listed = graphs[:MAX_GRAPHS]
    rest = len(numbers.graphs) - len(listed)
    memory = sum(graph.memory + graph.driver for graph in graphs[MAX_GRAPHS:])
    rows: list[tuple[Cell, ...]] = [
        (g.role, g.entry.mode, extent(g.entry), *map(_change, (g.memory, g.driver, g.alone))) for g in listed
    ]
    grid = Grid.of(("graph of", "mode", "size", "allocator", "driver", "alone"), rows, text=3)
    notes = (f"and {counted(rest, 'other graph')}, which took {_change(memory)}",) if rest else ()
    yield Section(name="memory-by-graph", title="Memory by graph", grid=grid, notes=notes)
