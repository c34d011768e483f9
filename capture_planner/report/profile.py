"""Profiles as rich tables: what passes and graphs cost on a machine, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from capture_planner.modes import GraphMode
from capture_planner.records.profile import CostCurve, GraphCost, Profile, family_name
from capture_planner.records.text import counted
from capture_planner.report.terminal import mode_text, table_of

FLAT = 1.02
"""Sizes whose times differ by no more are one step of a staircase in the tables; ``--format json`` has all."""


def profile_tables(profile: Profile) -> RenderableType:
    """The whole profile: the machine, the staircase of each curve, and the costs of graphs."""
    sizes = sum(len(curve.tokens) for curve in profile.curves)
    title = f"{profile.source}: {counted(sizes, 'size')} of {profile.model.name} on {profile.device.name}"
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        Padding(table_of("", "", rows=_facts(profile)), (0, 0, 0, 2)),
    ]
    for curve in profile.curves:
        mode = Text("eager", style="yellow") if curve.mode is GraphMode.NONE else mode_text(curve.mode)
        kind = family_name(*curve.key).partition(" (")[2].rstrip(")")
        heading = Text.assemble((f"{curve.role.value} ", "bold underline"), mode, f", {kind}")
        table = table_of("tokens", "ms", right=("tokens", "ms"), rows=staircase(curve))
        parts += [Text(""), heading, Padding(table, (0, 0, 0, 2))]
    if profile.graphs:
        columns = ("of", "MiB each", "driver", "largest", "per token", "s each", "MiB off by", "s off by")
        table = table_of("graphs", *columns[1:], right=columns[1:], rows=map(_cost, profile.graphs))
        parts += [Text(""), Text("what graphs cost", style="bold underline"), Padding(table, (0, 0, 0, 2))]
    return Group(*parts, *(Text(f"note: {note}", style="yellow") for note in profile.notes))


def _facts(profile: Profile) -> Iterator[tuple[str, str]]:
    versions = [("driver", profile.driver), ("torch", profile.torch), *profile.packages.items()]
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions if version) or "unknown"
    yield "measured", profile.date
    if profile.command:
        yield "command", profile.command
    if profile.context is not None:
        yield "context", f"{counted(profile.context, 'token')} of each request"
    if profile.step(1, 0.0):
        each = f" and {profile.step_milliseconds_per_request:.4f} ms for each request"
        more = each if profile.step_milliseconds_per_request else ""
        passes = "the target's pass, drafts in it" if profile.drafts_overlap else "its passes"
        yield "step", f"{profile.step_milliseconds:.3f} ms{more} apart from {passes}"
    if profile.graphs:
        yield "capture", f"{profile.base_mib:,.1f} MiB and {profile.base_seconds:,.2f} s apart from the graphs"
    if profile.spread is not None:
        yield "spread", f"at most {profile.spread:.1%} over repeats"


def staircase(curve: CostCurve, flat: float = FLAT) -> Iterator[tuple[str, str]]:
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
    same = f"{fastest:.3f}" == f"{slowest:.3f}"
    return tokens, f"{fastest:.3f}" if same else f"{fastest:.3f} to {slowest:.3f}"


def _cost(cost: GraphCost) -> tuple[str, ...]:
    seconds = cost.seconds + cost.seconds_per_token  # what the smallest graph takes
    figures = (cost.mib, cost.driver_mib, cost.largest_mib, cost.mib_per_token)
    last = (f"{seconds:.3f}", f"{cost.mib_error:.2f}", f"{cost.seconds_error:.3f}")
    return (family_name(*cost.key), *(f"{figure:,.3f}" for figure in figures), *last)
