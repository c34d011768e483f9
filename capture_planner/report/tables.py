"""Plans, coverage and explanations as rich tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from capture_planner.analysis.coverage import Cell, Coverage
from capture_planner.analysis.explain import Explanation
from capture_planner.codec.entry_rows import pack
from capture_planner.engines.observed import ObservedCoverage
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry, Kind, batch_text
from capture_planner.records.batch_space import split_when
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.text import counted, query_len_text
from capture_planner.report.price import price_lines
from capture_planner.report.terminal import mode_text, ran_text, table_of


def plan_summary(plan: Plan) -> RenderableType:
    """One line a role: what was wanted, what it became, how many graphs."""
    rows = (
        (
            role.role,
            mode_text(role.mode),
            "" if role.mode is role.requested else role.requested.value,
            ", ".join(dict.fromkeys(group.backend for group in role.groups)),
            str(len(role.entries)),
            "; ".join(_waived(role)) or ("nothing" if role.entries else "never runs"),
        )
        for role in plan.roles
    )
    table = table_of("role", "mode", "wanted", "backend", "graphs", "waived", right=("graphs",), rows=rows)
    bound = plan.allowed_graphs()
    total = counted(plan.num_graphs, "graph") + (f" of at most {bound[0]}" if bound else "")
    total += f", {plan.num_lazy} of them on first use" if plan.num_lazy else ""
    title = Text(f"{plan.model.name} on {plan.environment.name}: {total}", style="bold")
    return Group(title, table, *map(Text, price_lines(plan)))


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def _waived(role: RolePlan) -> Iterator[str]:
    for waiver in role.waivers:
        unit = "tokens, mixed" if waiver.kind is Kind.MIXED else f"requests of {waiver.query_len}"
        unit = unit if waiver.max_query_len is None else f"requests of up to {waiver.max_query_len}"
        yield f"{_span(waiver.first, waiver.last)} {unit} ({waiver.reason})"


def plan_tables(plan: Plan) -> RenderableType:
    """The whole plan: each role with its groups, graphs, waivers and decisions."""
    parts: list[RenderableType] = [plan_summary(plan)]
    for role in plan.roles:
        parts += [Text(""), Text(role.role, style="bold underline"), *_role_parts(role)]
    return Group(*parts)


def _role_parts(role: RolePlan) -> Iterator[RenderableType]:
    groups = table_of("group", "layers", "backend", "support", "workspace", right=("layers",))
    for group in role.groups:
        groups.add_row(
            group.name,
            str(group.layers),
            f"{group.backend} {group.version}",
            group.support.level.name,
            f"{group.workspace.device / (1 << 20):,.1f} MiB" if group.workspace.device else "none",
        )
    yield Padding(groups, (0, 0, 0, 2))
    if role.entries:
        captured = ["captured"] if role.lazy else []
        graphs = table_of("graphs", "for", "LoRA", *captured, "sizes, in capture order", right=("graphs",))
        for when, entries in (("at start", role.at_start), ("on first use", role.lazy)):
            for row in pack(entries):
                sizes = row.num_reqs if row.decodes and row.num_reqs is not None else row.num_tokens or ()
                graphs.add_row(
                    str(len(row.entries())),
                    _kind_text(row.mode, row.decodes, row.draft_steps),
                    ", ".join(map(str, row.active_loras)) if row.active_loras != (0,) else "",
                    *([when] if role.lazy else []),
                    " ".join(map(str, sizes)),
                )
        yield Padding(graphs, (0, 0, 0, 2))
    for waiver in role.waivers:
        yield Padding(Text(f"waived ({waiver.reason}): {waiver.message}", style="yellow"), (0, 0, 0, 2))
    if role.decisions:
        rows = ((each.rule, each.before, each.after, each.message) for each in role.decisions)
        yield Padding(table_of("decision", "before", "after", "because", rows=rows), (0, 0, 0, 2))


def _kind_text(mode: GraphMode, decodes: str, draft_steps: int | None) -> str:
    if not decodes:
        return f"{mode.value}, any batch, by tokens"
    chain = f", chain of {draft_steps}" if draft_steps else ""
    return f"{mode.value}, decodes of {decodes}{chain}, by requests"


def explanation_table(explained: Explanation) -> RenderableType:
    """One batch: its answer, why, and what each nearer entry lacked."""
    batch, answer = explained.batch, explained.answer
    shape = batch_text(batch) + (f", {batch.active_loras} active LoRA" if batch.active_loras else "")
    lines: list[RenderableType] = [
        Text.assemble(f"{batch.role}: {shape}", " -> ", ran_text(answer.mode)),
        Padding(Text(f"{answer.entry or 'no graph'}: {explained.message}"), (0, 0, 0, 2)),
    ]
    if explained.near_misses:
        rows = ((str(miss.entry), miss.message) for miss in explained.near_misses)
        table = table_of("nearer entry", "rejected because it", rows=rows)
        lines += [Text(""), Padding(table, (0, 0, 0, 2))]
    return Group(*lines)


def coverage_table(walked: Coverage | ObservedCoverage) -> RenderableType:
    """The whole admissible space by role: what serves it, how much of it is padding."""
    lazy = _lazy_graphs(walked)
    right = ("sizes", *(["on first use"] if lazy else []), "padding", "worst")
    table = table_of("role", "batches", "LoRA", "served by", *right, right=right)
    for run in coverage_runs(walked):
        first, last = run[0], run[-1]
        unit = f"requests of {query_len_text(first.query_len, varies=first.varies)}"
        unit = "tokens, mixed" if first.kind is Kind.MIXED else unit
        unit += f", {counted(first.draft_steps, 'draft step')}" if first.draft_steps else ""
        mode = ran_text(first.answer.mode)
        if first.answer.reason is not None:
            mode.append(f" ({first.answer.reason})")
        replayed, loras = [cell for cell in run if cell.entry is not None], max(cell.max_loras for cell in run)
        entries = {cell.entry for cell in replayed}
        table.add_row(
            first.role,
            f"{_span(first.first, last.last)} {unit}",
            f"{min(c.min_loras for c in run)} to {loras}" if loras else "",
            mode,
            str(len(entries)) if replayed else "",
            *([str(len(entries & lazy[first.role])) if replayed else ""] if lazy else []),
            f"{share_padded(replayed):.1%}" if replayed else "",
            f"{max(cell.worst for cell in replayed) - 1:.0%}" if replayed else "",
        )
    return table


def _lazy_graphs(walked: Coverage | ObservedCoverage) -> dict[Role, frozenset[Entry]]:
    """Return the graphs that are captured on first use, by role; empty where none is."""
    if isinstance(walked, ObservedCoverage) or not walked.plan.num_lazy:
        return {}
    return {role.role: frozenset(role.lazy) for role in walked.plan.roles}


def coverage_runs(walked: Coverage | ObservedCoverage) -> list[list[Cell]]:
    """Group neighbouring cells that are served in the same way; a schedule may leave room between others."""

    def kind(cell: Cell) -> tuple[object, ...]:
        batches = cell.role, cell.kind, cell.query_len, cell.varies, cell.draft_steps
        return *batches, cell.answer.mode, cell.answer.reason

    def apart(before: Cell, after: Cell) -> bool:
        return kind(before) != kind(after) or not before.first <= after.first <= before.last + 1

    return list(split_when(apart, walked.cells))


def share_padded(cells: Iterable[Cell]) -> float:
    """Return the share of computed tokens that is padding, every batch size counted once."""
    real = computed = 0.0
    for cell in cells:
        if cell.entry is not None:
            count = cell.last - cell.first + 1
            computed += count * cell.entry.num_tokens
            real += count * cell.entry.num_tokens * (1 - cell.padded)
    return 1 - real / computed if computed else 0.0
