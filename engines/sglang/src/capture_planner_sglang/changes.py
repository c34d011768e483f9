"""Changes of an SGLang command line that may remove a finding of ``check``. Of a flag given twice the last counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.remedies import FlagChange
from capture_planner.engines.walk import Run
from capture_planner.modes import Role
from capture_planner.records.batch import Kind

DECODES, PREFILLS, REQUESTS = "--cuda-graph-bs-decode", "--cuda-graph-bs-prefill", "--max-running-requests"
_BACKENDS = ("fa3", "flashinfer", "triton")


def changes(code: str, emulation: Emulation, role: Role, runs: Sequence[Run]) -> Iterator[FlagChange]:
    """Yield changes for a finding of a rule, the one to prefer first."""
    mixed = [run for run in runs if run.batch.kind is Kind.MIXED]
    decodes = [run for run in runs if run.batch.kind is Kind.DECODE]
    if code == "EN001":
        most = max(run.last for run in runs)
        if not emulation.asked_sizes:
            yield FlagChange.of("--cuda-graph-max-bs-decode", most)
        yield _listed(DECODES, {*emulation.sizes, most})
        yield _listed(DECODES, {*emulation.sizes, *_ends(runs)})
        covered = min(run.first for run in runs) - 1
        if covered:
            yield FlagChange.of(REQUESTS, covered, instead=True)
    elif code == "EN002":
        yield from _both(emulation, _ends(mixed), _ends(decodes))
    elif code in ("EN003", "EN004") and emulation.sizes:
        yield _listed(DECODES, emulation.sizes)
        yield _listed(DECODES, {size for size in emulation.sizes if size <= emulation.limits.max_num_reqs})
    elif code == "EN005":
        yield from (FlagChange.of("--attention-backend", each) for each in _BACKENDS)
    elif code == "EN006":
        yield from _both(
            emulation,
            {size for run in mixed for size in run.sizes_between(1)},
            {size for run in decodes for size in run.sizes_between(1)},
        )


def _both(emulation: Emulation, prefills: set[int], decodes: set[int]) -> Iterator[FlagChange]:
    """Add sizes to the lists of prefills and of decodes, as far as there are any to add."""
    flags: list[tuple[str, tuple[str, ...]]] = []
    if prefills:
        present = {graph.entry.num_tokens for graph in emulation.graphs if graph.entry.query_len is None}
        flags += _listed(PREFILLS, present | prefills).flags
    if decodes:
        flags += _listed(DECODES, decodes | set(emulation.sizes)).flags
    yield FlagChange(tuple(flags))


def _ends(runs: Sequence[Run]) -> set[int]:
    return {count for run in runs for count in (run.first, run.last)}


def _listed(flag: str, sizes: Iterable[int]) -> FlagChange:
    return FlagChange.of(flag, *sorted(set(sizes)))
