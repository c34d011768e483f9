"""Reports of profiles: what passes and graphs cost on a machine, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from capture_planner.modes import Role
from capture_planner.records.profile import CostCurve, ExpertCost, GraphCost, Overhead, Profile, family_name
from capture_planner.records.text import counted
from capture_planner.report.writing import Grid, Report, Section, ran, warned

FLAT = 1.02
"""Sizes whose times differ by no more are one step of a staircase in the tables; ``--format json`` has all."""


def profile_report(profile: Profile) -> Report:
    """Return the report: the machine, the staircase of each curve, and the costs of graphs."""
    sizes = sum(len(curve.tokens) for curve in profile.curves)
    title = f"{profile.source}: {counted(sizes, 'size')} of {profile.model.name} on {profile.device.name}"
    sections = [Section(name="profile", title=title, parts=(Grid.facts(_facts(profile)),))]
    for number, curve in enumerate(profile.curves):
        # The role and the mode are in the heading already.
        kind = family_name(*curve.key).partition(" (")[2].rstrip(")")
        heading = f"{curve.role.value} {ran(curve.mode)}, {kind}"
        grid = Grid.of(("tokens", "ms"), staircase(curve), text=0)
        sections.append(Section(name=f"curve-{number}", title=heading, parts=(grid,)))
    for cost in profile.experts:
        heading = f"{cost.role.value}, experts by tokens of the batch"
        grid = Grid.of(("tokens", "ms"), staircase(cost), text=0)
        sections.append(Section(name=f"experts-{cost.role.value}", title=heading, parts=(grid,)))
    if profile.overheads:
        named = ("target's pass", "floor, ms", "overhead, ms", "error, ms", "steps")
        grid = Grid.of(named, map(_overhead, profile.overheads), text=1)
        sections.append(Section(name="overheads", title="host overhead of a step", parts=(grid,)))
    if profile.graphs:
        columns = ("graphs", "MiB each", "driver", "largest", "per token", "s each", "MiB off by", "s off by")
        grid = Grid.of(columns, map(_cost, profile.graphs), text=1)
        sections.append(Section(name="graphs", title="what graphs cost", parts=(grid,)))
    notes = warned(*(f"note: {note}" for note in profile.notes))
    sections.append(Section(name="notes", title="", parts=notes))
    return Report(kind="profile", title=title, sections=tuple(sections))


def _facts(profile: Profile) -> Iterator[tuple[str, str]]:
    versions = [("driver", profile.driver), ("torch", profile.torch), *profile.packages.items()]
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions if version) or "unknown"
    yield "measured", profile.date
    if profile.command:
        yield "command", profile.command
    if profile.context is not None:
        yield "context", f"{counted(profile.context, 'token')} of each request"
    # Without an overhead a step takes its passes alone.
    if profile.step(1, 0.0):
        each = f" and {profile.step_milliseconds_per_request:.4f} ms for each request"
        more = each if profile.step_milliseconds_per_request else ""
        yield "step", f"{profile.step_milliseconds:.3f} ms{more} apart from its passes"
    if profile.graphs:
        yield "capture", f"{profile.base_mib:,.1f} MiB and {profile.base_seconds:,.2f} s apart from the graphs"
    if profile.spread is not None:
        yield "spread", f"at most {profile.spread:.1%} over repeats"


def staircase(curve: CostCurve | ExpertCost, flat: float = FLAT) -> Iterator[tuple[str, str]]:
    """Yield ranges of tokens, each with the time that its sizes take, after a running maximum."""
    points = list(zip(curve.tokens, accumulate(curve.milliseconds, max), strict=True))
    levels: list[float] = []
    for _, time in points:
        levels.append(levels[-1] if levels and time <= levels[-1] * flat else time)
    for _, group in groupby(zip(points, levels, strict=True), key=lambda item: item[1]):
        yield _step([point for point, _ in group])


def _step(points: Sequence[tuple[int, float]]) -> tuple[str, str]:
    (first, fastest), (last, slowest) = points[0], points[-1]
    tokens = f"{first:,}" if first == last else f"{first:,} to {last:,}"
    # Times that are written alike are no range.
    same = f"{fastest:.3f}" == f"{slowest:.3f}"
    return tokens, f"{fastest:.3f}" if same else f"{fastest:.3f} to {slowest:.3f}"


def _overhead(each: Overhead) -> tuple[str, ...]:
    kind = family_name(Role.TARGET, *each.key, None).partition(" ")[2]
    return kind, *(f"{figure:.3f}" for figure in (each.floor, each.milliseconds, each.error)), f"{each.steps:,}"


def _cost(cost: GraphCost) -> tuple[str, ...]:
    seconds = cost.seconds + cost.seconds_per_token  # what the smallest graph takes
    figures = (cost.mib, cost.driver_mib, cost.largest_mib, cost.mib_per_token)
    last = (f"{seconds:.3f}", f"{cost.mib_error:.2f}", f"{cost.seconds_error:.3f}")
    return (family_name(*cost.key), *(f"{figure:,.3f}" for figure in figures), *last)
