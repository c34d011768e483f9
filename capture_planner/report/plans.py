"""Reports of plans: what was decided, what it costs, which graph serves a batch, and what backends support."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from capture_planner.analysis.coverage import Cell as Covered
from capture_planner.analysis.coverage import Coverage
from capture_planner.analysis.explain import Explanation
from capture_planner.codec import shipped
from capture_planner.codec.rows import ENTRIES
from capture_planner.engines.deployments import ObservedCoverage
from capture_planner.engines.verdict import SOURCE, bill
from capture_planner.errors import BackendError
from capture_planner.measuring.fits import predict
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.planning.resolve import attentions
from capture_planner.planning.sizing.budget import PRICE_RULE
from capture_planner.plugins.discovery import left_out
from capture_planner.plugins.registry import Registry
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry, Kind, batch_text
from capture_planner.records.batch_space import split_when
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.plan import Forecast, Plan, RolePlan
from capture_planner.records.spec import Budget, Spec
from capture_planner.records.text import counted, format_bytes, query_len_text, rounded_bytes
from capture_planner.report.writing import Grid, Part, Report, Section, TonedText, mode_cell, ran, warned


def plan_report(plan: Plan, *, whole: bool) -> Report:
    """Return the report of a plan: a line for each role, and of the ``whole`` plan its groups, graphs and decisions."""
    roles = tuple(Section(name=role.role, title=role.role, parts=_role_parts(role)) for role in plan.roles)
    return Report(
        kind="plan",
        title=f"Plan of {plan.model.name} on {plan.environment.name}",
        sections=(_summary(plan), *(roles if whole else ())),
        spec=plan.spec_digest,
    )


def _summary(plan: Plan) -> Section:
    """Return one line a role: what was wanted, what it became, how many graphs; and what they cost."""
    rows = (
        (
            role.role,
            mode_cell(role.mode),
            "" if role.mode is role.requested else role.requested.value,
            ", ".join(dict.fromkeys(group.backend for group in role.groups)),
            str(len(role.entries)),
            "; ".join(_waived(role)) or ("nothing" if role.entries else "never runs"),
        )
        for role in plan.roles
    )
    grid = Grid.of(("role", "mode", "wanted", "backend", "graphs", "waived"), rows, right=("graphs",))
    bound = plan.allowed_graphs()
    total = counted(plan.num_graphs, "graph") + (f" of at most {bound[0]}" if bound else "")
    total += f", {plan.num_lazy} of them on first use" if plan.num_lazy else ""
    title = TonedText(f"{plan.model.name} on {plan.environment.name}: {total}", "strong")
    return Section(name="summary", title="", parts=(title, grid, *price_lines(plan)))


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def _waived(role: RolePlan) -> Iterator[str]:
    for waiver in role.waivers:
        unit = "tokens, mixed" if waiver.kind is Kind.MIXED else f"requests of {waiver.query_len}"
        # Varying decodes have no query length of their own.
        unit = unit if waiver.max_query_len is None else f"requests of up to {waiver.max_query_len}"
        yield f"{_span(waiver.first, waiver.last)} {unit} ({waiver.reason})"


def _role_parts(role: RolePlan) -> Iterator[Part]:
    groups = (
        (
            group.name,
            str(group.layers),
            f"{group.backend} {group.version}",
            group.support.level.name,
            f"{group.workspace.device / (1 << 20):,.1f} MiB" if group.workspace.device else "none",
        )
        for group in role.groups
    )
    yield Grid.of(("group", "layers", "backend", "support", "workspace"), groups, right=("layers",))
    graphs = (
        (
            str(len(row.entries())),
            _kind_text(row.mode, row.decodes, row.draft_steps),
            ", ".join(map(str, row.active_loras)) if row.active_loras != (0,) else "",
            *([when] if role.lazy else []),
            " ".join(map(str, row.num_reqs if row.decodes and row.num_reqs is not None else row.num_tokens or ())),
        )
        for when, entries in (("at start", role.at_start), ("on first use", role.lazy))
        for row in ENTRIES.pack(entries)
    )
    captured = ["captured"] if role.lazy else []
    yield Grid.of(("graphs", "for", "LoRA", *captured, "sizes, in capture order"), graphs, right=("graphs",))
    yield from warned(*(f"waived ({waiver.reason}): {waiver.message}" for waiver in role.waivers))
    decisions = ((each.rule, each.before, each.after, each.message) for each in role.decisions)
    yield Grid.of(("decision", "before", "after", "because"), decisions)


def _kind_text(mode: GraphMode, decodes: str, draft_steps: int | None) -> str:
    if not decodes:
        return f"{mode.value}, any batch, by tokens"
    chain = f", chain of {draft_steps}" if draft_steps else ""
    return f"{mode.value}, decodes of {decodes}{chain}, by requests"


# What graphs cost --------------------------------------------------------------------------------


def price_lines(plan: Plan) -> Iterator[str]:
    """Yield what the graphs take, and what the budget did to them."""
    # Recorded graphs of a CPU take none of what the budget's figures are about.
    if plan.num_graphs and plan.environment.device.kind is DeviceKind.CUDA:
        yield _estimate(plan)
    if (line := budget_line(plan)) is not None:
        yield line


def _estimate(plan: Plan) -> str:
    workspaces = sum(group.workspace.device for role in plan.roles for group in role.groups)
    apart = f"; workspaces of the backends, {rounded_bytes(workspaces)}, are not counted" if workspaces else ""
    return f"estimate: {counted(plan.num_graphs, 'graph')} take {_taken(plan)}{_on_first_use(plan)}{apart}"


def _taken(plan: Plan) -> str:
    """Return what graphs take by the plan's own profile, the budget's figures, the nearest profile, or as a range."""
    graphs, budget = plan.num_graphs, plan.budget
    if plan.forecast is not None:
        return f"{_amounts(plan.forecast.mib, plan.forecast.seconds)}, by the profile"
    # Figures that a person put into the budget are better than a profile of another deployment.
    each, default = (budget.memory_per_graph, budget.seconds_per_graph), Budget()
    if each != (default.memory_per_graph, default.seconds_per_graph):
        source = f"at {format_bytes(each[0])} and {each[1]:g} s a graph"
        return f"{_amounts(graphs * each[0] / (1 << 20), graphs * each[1])}, {source}"
    roles = [role.role for role in plan.roles for _ in role.entries]
    near = shipped.capture_costs(plan.environment, plan.model, set(roles))
    if near is None:
        return f"{bill(roles)} to capture, {SOURCE}; no profile of such a deployment ships"
    expected = predict(near.profile, plan)
    return f"{_amounts(expected.memory_mib, expected.seconds)}, by the profile {near.name}, {near.distance}"


def _amounts(mib: float, seconds: float) -> str:
    return f"{rounded_bytes(round(mib * (1 << 20)))} and {seconds:.0f} s to capture"


def _on_first_use(plan: Plan) -> str:
    timing = plan.capture
    if not plan.num_lazy or timing.memory is None or timing.seconds_per_minute is None:
        return ""
    budget = f"{format_bytes(timing.memory)} and {timing.seconds_per_minute:g} s a minute"
    return f"; {plan.num_lazy} of them on first use, within {budget}"


def budget_line(plan: Plan) -> str | None:
    """Say which limit of the budget was reached at what cost, or what measured sizes take of each; None: no budget."""
    decisions = (decision for role in plan.roles for decision in role.decisions)
    found = next((decision.message for decision in decisions if decision.rule == PRICE_RULE), None)
    if found is not None:
        return f"budget: {found}"
    if plan.forecast is not None:
        return _measured_line(plan.budget, plan.forecast)
    # ``Budget.bounds`` are those on all graphs together.
    kinds = {"decode": plan.budget.graphs.decode, "mixed": plan.budget.graphs.mixed}
    bounds = [text for _, text in plan.budget.bounds()] + [f"graphs.{k} {most:g}" for k, most in kinds.items() if most]
    return f"budget: no limit is reached ({', '.join(bounds)})" if bounds else None


def _measured_line(budget: Budget, forecast: Forecast) -> str | None:
    taken = {
        f"{forecast.graphs} of {budget.max_graphs} graphs": budget.max_graphs,
        f"{rounded_bytes(round(forecast.mib * (1 << 20)))} of {format_bytes(budget.memory or 0)}": budget.memory,
        f"{forecast.seconds:.0f} of {budget.seconds or 0:g} s": budget.seconds,
    }
    used = [text for text, limit in taken.items() if limit is not None]
    gain = f"; one more graph next to others takes {forecast.next_graph_ms:.2g} ms off the mean step"
    return f"budget: {', '.join(used)}, by the profile{gain * (forecast.graphs > 0)}" if used else None


# Which graph serves a batch ----------------------------------------------------------------------


def explanation_report(explained: Explanation, *seen: str) -> Report:
    """Return the report of one batch: its answer, why, what each nearer entry lacked, and what was ``seen`` of it."""
    batch, answer = explained.batch, explained.answer
    shape = batch_text(batch) + (f", {batch.active_loras} active LoRA" if batch.active_loras else "")
    rows = ((str(miss.entry), miss.message) for miss in explained.near_misses)
    grid = Grid.of(("nearer entry", "rejected because it"), rows)
    parts = (f"{answer.entry or 'no graph'}: {explained.message}", *(("", grid) if grid.rows else ()), *seen)
    title = f"{batch.role}: {shape} -> {ran(answer.mode)}"
    return Report(kind="batch", title=title, sections=(Section(name="batch", title=title, parts=parts),))


def coverage_report(walked: Coverage | ObservedCoverage) -> Report:
    """Return the report of all admissible batches by role: what serves them, and how much of that is padding."""
    lazy: dict[Role, frozenset[Entry]] = {}
    if isinstance(walked, Coverage) and walked.plan.num_lazy:
        lazy = {role.role: frozenset(role.lazy) for role in walked.plan.roles}
    rows = []
    for run in coverage_runs(walked):
        first, last = run[0], run[-1]
        unit = f"requests of {query_len_text(first.query_len, varies=first.varies)}"
        unit = "tokens, mixed" if first.kind is Kind.MIXED else unit
        unit += f", {counted(first.draft_steps, 'draft step')}" if first.draft_steps else ""
        reason = "" if first.answer.reason is None else f" ({first.answer.reason})"
        replayed, loras = [cell for cell in run if cell.entry is not None], max(cell.max_loras for cell in run)
        entries = {cell.entry for cell in replayed}
        rows.append(
            (
                first.role,
                f"{_span(first.first, last.last)} {unit}",
                f"{min(c.min_loras for c in run)} to {loras}" if loras else "",
                TonedText(ran(first.answer.mode) + reason, first.answer.mode),
                str(len(entries)) if replayed else "",
                *([str(len(entries & lazy[first.role])) if replayed else ""] if lazy else []),
                f"{share_padded(replayed):.1%}" if replayed else "",
                f"{max(cell.worst for cell in replayed) - 1:.0%}" if replayed else "",
            )
        )
    numbers = ("sizes", *(["on first use"] if lazy else []), "padding", "worst")
    grid = Grid.of(("role", "batches", "LoRA", "served by", *numbers), rows, text=4)
    section = Section(name="coverage", title="", parts=(grid,))
    return Report(kind="coverage", title="Every admissible batch", sections=(section,))


def coverage_runs(walked: Coverage | ObservedCoverage) -> list[list[Covered]]:
    """Group neighbouring cells that are served in the same way; a schedule may leave room between others."""

    def kind(cell: Covered) -> tuple[object, ...]:
        batches = cell.role, cell.kind, cell.query_len, cell.varies, cell.draft_steps
        return *batches, cell.answer.mode, cell.answer.reason

    def apart(before: Covered, after: Covered) -> bool:
        return kind(before) != kind(after) or not before.first <= after.first <= before.last + 1

    return list(split_when(apart, walked.cells))


def share_padded(cells: Iterable[Covered]) -> float:
    """Return the share of computed tokens that is padding, every batch size counted once."""
    real = computed = 0.0
    for cell in cells:
        if cell.entry is not None:
            count = cell.last - cell.first + 1
            computed += count * cell.entry.num_tokens
            real += count * cell.entry.num_tokens * (1 - cell.padded)
    return 1 - real / computed if computed else 0.0


# What backends support ---------------------------------------------------------------------------


PLAIN_MODEL = Attention(
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=131072, max_query_len=1
)
"""The layers of a plain 8B model, for questions that name no deployment."""

_SHORT = {
    GraphSupport.ALWAYS: "always",
    GraphSupport.UNIFORM_BATCH: "uniform",
    GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE: "single",
    GraphSupport.NEVER: "never",
}


@attrs.frozen(kw_only=True)
class GroupLevel:
    """How far a backend goes inside a full graph, for one attention group on one environment."""

    environment: str
    role: Role
    group: str
    level: GraphSupport
    reason: str


@attrs.frozen(kw_only=True)
class BackendSupport:
    """One installed backend, on each environment."""

    name: str
    distribution: str
    version: str
    support: tuple[GroupLevel, ...]


def backend_support(
    registry: Registry, environments: Sequence[Environment], spec: Spec | None
) -> tuple[BackendSupport, ...]:
    """Ask each backend about each environment: for the groups of a spec, or for a plain model.

    A backend that breaks its contract is left out with a ``PluginWarning``.
    """
    groups = [(Role.TARGET, "all", PLAIN_MODEL)] if spec is None else list(attentions(spec))
    found: list[BackendSupport] = []
    for name, registered in registry.items():
        with left_out(BackendError):
            levels = tuple(
                GroupLevel(
                    environment=environment.name, role=role, group=group, level=support.level, reason=support.reason
                )
                for environment in environments
                for role, group, attention in groups
                for support in (registered.support(role, attention, environment),)
            )
            found.append(
                BackendSupport(
                    name=name, distribution=registered.distribution, version=registered.version, support=levels
                )
            )
    return tuple(found)


def backends_report(backends: Sequence[BackendSupport], *, reasons: bool) -> Report:
    """Return backends against environments, or one environment with the reasons."""
    parts: tuple[Part, ...]
    if reasons:
        groups = ((backend, each) for backend in backends for each in backend.support)
        rows = ((one.name, one.version, each.role, each.group, each.level.name, each.reason) for one, each in groups)
        parts = (Grid.of(("backend", "version", "role", "group", "support", "because"), rows),)
    else:
        environments = dict.fromkeys(s.environment for backend in backends for s in backend.support)
        # A backend is shown by its weakest group; the reasons have all of them.
        levels = (
            (name, *(_SHORT[min(s.level for s in each.support if s.environment == name)] for each in backends))
            for name in environments
        )
        columns = ("environment", *(backend.name for backend in backends))
        grid = Grid.of(columns, [("version", *(backend.version for backend in backends)), *levels])
        legend = ", ".join(f"{short} = {level.name}" for level, short in _SHORT.items())
        parts = (grid, "", TonedText(f"{legend}; add --environment NAME for the reasons", "note"))
    section = Section(name="backends", title="", parts=parts)
    return Report(kind="list of backends", title="Attention backends and full graphs", sections=(section,))
