"""The charts of a tuning: what graphs buy, and the sizes of both sides over the load and the cost of a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import attrs

from capture_planner.engines.tuning.judgement import PassCost
from capture_planner.engines.tuning.tune import Tuning
from capture_planner.modes import Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import kind_of
from capture_planner.report.plots import MAX_POINTS, Chart, Color, Mark, Plot, PlotAxis, Point, Series, drawn

TODAY: Color = "none"
PROPOSED: Color = "full"
LOAD: Color = "ink"

Group = tuple[Role, int | None]
"""A role and the query length of its decodes; None: its mixed batches."""


def tune_charts(tuning: Tuning) -> tuple[Chart, ...]:
    """Return the charts of a tuning; those that would be empty are left out."""
    return drawn(tuning, (_pareto, _eager, _sizes, _costs))


def _pareto(tuning: Tuning) -> Chart | None:
    if tuning.today is None or tuning.proposed is None or not tuning.pareto:
        return None
    plots = []
    own = {"mean": [], "regret": [("Worst step by graphs", "objective", PlotAxis("times its own size", "ratio"), 1.0)]}
    chosen = tuning.objective
    for title, name, axis, scale in (
        *own.get(chosen, [(f"{chosen} step by graphs", "objective", PlotAxis(f"{chosen} step", "s"), 1e-3)]),
        ("Mean step by graphs", "mean_step_ms", PlotAxis("mean step", "s"), 1e-3),
        ("Memory by graphs", "memory_mib", PlotAxis("memory", "B", from_zero=True), float(1 << 20)),
        ("Start-up by graphs", "seconds", PlotAxis("capture", "s", from_zero=True), 1.0),
    ):
        table = [(point.graphs, getattr(point, name) * scale) for point in tuning.pareto]
        sides = ((tuning.today, "today", TODAY), (tuning.proposed, "proposed", PROPOSED))
        marks = [
            Series(label, Mark.POINTS, [(side.graphs, getattr(side, name) * scale)], labels=(label,), color=color)
            for side, label, color in sides
        ]
        line = Series("best tables", Mark.LINE, table, color=LOAD)
        plots.append(Plot(title=title, x=PlotAxis("graphs", "graphs", log=True), y=axis, series=(line, *marks)))
    return Chart(
        name="pareto",
        plots=plots,
        caption="The line has the best table of each number of graphs. Where it is flat, more graphs buy nothing. "
        "Today's graphs lie above it where they are spent on sizes that seldom run, or that cost the same.",
    )


def _eager(tuning: Tuning) -> Chart | None:
    if tuning.today is None or tuning.proposed is None:
        return None
    sides = ((tuning.today, "today", TODAY), (tuning.proposed, "proposed", PROPOSED))
    roles = [role for role in Role if any(role in side.eager_share for side, _, _ in sides)]
    if not any(side.eager_share.get(role) for side, _, _ in sides for role in roles):
        return None
    series = [
        Series(label, Mark.BARS, [(role.value, side.eager_share.get(role)) for role in roles], color=color)
        for side, label, color in sides
    ]
    plot = Plot(title="Eager steps", x=PlotAxis("role", "name"), y=PlotAxis("share of steps", "%"), series=series)
    return Chart(
        name="eager",
        section="sides",
        plots=(plot,),
        caption="Steps that a role runs without a graph: above its largest size, or where its mode has none.",
    )


@attrs.frozen
class _Load:
    """The passes of one role and kind, by tokens: how many, and one of them on both sides."""

    group: Group
    counts: Counter[int]
    sides: tuple[dict[int, PassCost], dict[int, PassCost]]

    @property
    def name(self) -> str:
        role, width = self.group
        return f"{role.value}, mixed batches" if width is None else f"{role.value}, decodes of {width}"

    @property
    def tokens(self) -> list[int]:
        """The sizes that ran, ascending: at most ``MAX_POINTS``, the largest among them."""
        return _few(sorted(self.counts))


def _few(values: Sequence[int]) -> list[int]:
    """Return at most ``MAX_POINTS`` of ascending values, evenly, the first and the last among them."""
    last = len(values) - 1
    return [values[index] for index in sorted({round(last * at / (MAX_POINTS - 1)) for at in range(MAX_POINTS)})]


def _loads(tuning: Tuning) -> Iterator[_Load]:
    """Yield what ran, target first, decodes before mixed batches."""
    if tuning.pricings is None:
        return
    deployment = tuning.pricings[0].deployment
    families = {role: deployment.families(role) for role in deployment.modes}
    loads: dict[Group, _Load] = {}
    for batch, count in tuning.judging.items():
        today, proposed = (pricing.step(batch).passes for pricing in tuning.pricings)
        for before, after in zip(today, proposed, strict=True):
            own = before.batch
            decode = kind_of(own, families[own.role]) is Kind.DECODE
            group = (own.role, own.query_len if decode else None)
            load = loads.setdefault(group, _Load(group, Counter(), ({}, {})))
            load.counts[own.num_tokens] += count
            for side, each in zip(load.sides, (before, after), strict=True):
                side[own.num_tokens] = each
    roles = list(Role)
    yield from sorted(loads.values(), key=lambda load: (roles.index(load.group[0]), load.group[1] is None))


def _sizes(tuning: Tuning) -> Chart | None:
    """Draw the share of steps up to each size, with both sides' sizes on the curve."""
    plots = []
    for load in _loads(tuning):
        total, below = load.counts.total(), dict[int, float]()
        ran = sorted(load.counts)
        for tokens, sum_of in zip(ran, accumulate(load.counts[each] for each in ran), strict=True):
            below[tokens] = sum_of / total

        def share(size: int, ran: Sequence[int] = ran, below: dict[int, float] = below) -> float:
            return max((below[tokens] for tokens in ran if tokens <= size), default=0.0)

        series = [Series("steps", Mark.STEP, [(tokens, below[tokens]) for tokens in load.tokens], color=LOAD)]
        assert tuning.pricings is not None, "there are loads"
        for pricing, label, color in zip(tuning.pricings, ("today", "proposed"), (TODAY, PROPOSED), strict=True):
            entries = (graph.entry for graph in pricing.deployment.graphs if graph.role is load.group[0])
            sizes = sorted({entry.num_tokens for entry in entries if entry.query_len == load.group[1]})
            if sizes:
                points: list[Point] = [(size, share(size)) for size in _few(sizes)]
                series.append(Series(f"{label}: sizes", Mark.POINTS, points, color=color))
        title, y = f"Steps up to a size: {load.name}", PlotAxis("share of steps", "%")
        plots.append(Plot(title=title, x=PlotAxis("batch", "tokens", log=True), y=y, series=series))
    if not plots:
        return None
    return Chart(
        name="sizes",
        section="sides",
        plots=plots,
        caption="How many steps have at most so many tokens, with the sizes that have a graph. Sizes belong where the "
        "curve rises. Some graphs of mixed batches serve decodes too, and are not drawn there.",
    )


def _costs(tuning: Tuning) -> Chart | None:
    """Draw what a pass takes by its tokens, on both sides and with every size."""
    plots = []
    for load in _loads(tuning):
        today, proposed = load.sides
        series = [
            Series("every size", Mark.LINE, [(n, today[n].every_size / 1e3) for n in load.tokens], color=LOAD),
            Series("today", Mark.STAIRS, [(n, today[n].milliseconds / 1e3) for n in load.tokens], color=TODAY),
            Series("proposed", Mark.STAIRS, [(n, proposed[n].milliseconds / 1e3) for n in load.tokens], color=PROPOSED),
        ]
        x, y = PlotAxis("batch", "tokens", log=True), PlotAxis("time", "s")
        plots.append(Plot(title=f"Time of a pass: {load.name}", x=x, y=y, series=series))
    if not plots:
        return None
    return Chart(
        name="costs",
        section="sides",
        plots=plots,
        caption="What a batch takes on the graph that it gets, by the profile. Where a side stands far above the "
        "others, it pads far, or runs eager. Batches that did not run are not drawn.",
    )
