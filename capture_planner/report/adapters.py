"""LoRA in the report of a run: which adapters there were, and which graphs served how many of them."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.records.text import counted
from capture_planner.report.writing import Grid, Section
from capture_planner.runtime.session import RunReport

MAX_NAMED = 5


def adapter_sections(report: RunReport) -> Iterator[Section]:
    """Yield a section where the plan has LoRA; it says so where the run had no adapters."""
    lora = report.plan.lora
    if lora is None:
        return
    if not report.adapters:
        entries = [entry for role in report.plan.roles for entry in role.entries]
        unused = sum(entry.active_loras > 0 for entry in entries)
        warning = (
            f"the plan has LoRA and the run had no adapters: {unused} of {counted(len(entries), 'graph')} are for "
            "batches with adapters, and hold none; give --adapters N"
        )
        yield Section(name="adapters", warnings=(warning,))
        return
    named = "; ".join(report.adapters[:MAX_NAMED])
    more = f"; and {len(report.adapters) - MAX_NAMED} more" if len(report.adapters) > MAX_NAMED else ""
    tally = report.counts
    rows = [
        (str(active), "eager" if graph < 0 else f"for {graph}", f"{count:,}")
        for (active, graph), count in sorted(tally.adapters.items())
    ]
    yield Section(
        name="adapters",
        lines=(
            f"{counted(len(report.adapters), 'adapter')}, at most {lora.max_active} at once: {named}{more}",
            f"{tally.with_adapter} of {counted(tally.requests, 'request')} had one",
        ),
        grid=Grid.of(("active in the batch", "graph", "forwards"), rows, text=0),
        notes=("next to requests with an adapter, those without one count as one more",),
    )
