"""The report of a tuning: what a change gains, what it costs and what more would buy; its charts and its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import attrs

from capture_planner.analysis.arrivals import ServingLatency
from capture_planner.codec import json_of
from capture_planner.codec.plain import plain, plain_some
from capture_planner.engines.emulation import Emulation
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.measured.steps import PassCost
from capture_planner.records._base import grouped
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import kind_of
from capture_planner.records.text import counted
from capture_planner.report.engine import sizes_text
from capture_planner.report.plots import MAX_POINTS, Chart, Color, Mark, Plot, PlotAxis, Point, Series, drawn
from capture_planner.report.writing import Grid, Report, Section, TonedText, noted, percent, warned
from capture_planner_tuner.tuning.judgement import (
    LEAST_STEPS,
    MEMORY_ERROR,
    SECONDS_ERROR,
    SideFigures,
    TuneVerdict,
    subject_of,
)
from capture_planner_tuner.tuning.session import TuneResult
from capture_planner_tuner.tuning.tune import EVERY, Beyond, ParetoPoint, Tuning, lost_graphs, slower_batches

Group = tuple[Role, int | None]
"""A role and the query length of its decodes; None: its mixed batches."""

MANY_EAGER = 0.1
"""Share of steps without a graph from which the first lines say what more graphs buy, or another mode."""


def figures_of(tuning: Tuning) -> Iterator[str]:
    """Yield the figures of a change: the time, its range under other traffic, and the steps without a graph."""
    today, proposed, noise = tuning.today, tuning.proposed, tuning.noise
    if tuning.verdict is not TuneVerdict.CHANGE or today is None or proposed is None:
        return
    gap = f"time between two outputs {_change(today.gap_ms, proposed.gap_ms)} in the mean"
    text = f"{gap} and {_change(today.gap_p99_ms, proposed.gap_p99_ms)} at p99"
    # Says why p99 hardly moves: it is a step that neither side has a graph for.
    if today.gap_p99_eager and proposed.gap_p99_eager:
        text += ", a step without a graph on both sides"
    if noise is not None and noise.low is not None and noise.high is not None:
        drawn = f"{noise.blocks} blocks of it" if noise.blocks else "it, step by step"
        # The range is of the objective, which need not be the time above.
        what = "" if tuning.objective == "token" else f" in the {subject_of(tuning.objective)}"
        text += f"; drawing the traffic anew from {drawn}, the gain{what} is {noise.low:.1%} to {noise.high:.1%}"
    yield f"{text}."
    eager = [
        f"{role.value} {percent(today.eager_share[role])} to {percent(proposed.eager_share.get(role, 0.0))}"
        for role in today.eager_share
        if max(today.eager_share[role], proposed.eager_share.get(role, 0.0)) > 0
    ]
    if eager:
        yield f"steps without a graph: {', '.join(eager)}."


def _change(before: float, after: float) -> str:
    return (
        f"{milliseconds(before)} to {milliseconds(after)}"
        # As `milliseconds` writes them: two figures that read alike are no change.
        if round(before, 3) != round(after, 3)
        else milliseconds(before)
    )


def price_of(result: TuneResult) -> Iterator[str]:
    """Yield what a change costs, or saves: graphs, memory, tokens of the KV cache, and start-up."""
    tuning = result.tuning
    today, proposed = tuning.today, tuning.proposed
    if tuning.verdict is not TuneVerdict.CHANGE or today is None or proposed is None:
        return
    mib = proposed.memory_mib - today.memory_mib
    memory = f"{proposed.memory_mib:,.0f} MiB ({_than(mib, '{:,.0f} MiB')}{_room(result, mib)})"
    graphs = f"{counted(proposed.graphs, 'graph')} ({_than(proposed.graphs - today.graphs, '{:,.0f}', 'fewer')})"
    start_up = f"{proposed.seconds:.1f} s of start-up ({_than(proposed.seconds - today.seconds, '{:.1f} s')})"
    yield f"price: {graphs}, {memory}, and {start_up}."


def _room(result: TuneResult, mib: float) -> str:
    """Write how many tokens of the KV cache take as much memory; nothing where that is not known."""
    # Below one MiB the figure is noise of the estimate.
    if not result.kv_token_mib or abs(mib) < 1:
        return ""
    return f", or {abs(mib) / result.kv_token_mib:,.0f} tokens of the KV cache"


def _than(change: float, form: str, less: str = "less") -> str:
    # Compared as written: a change below the last digit is none.
    return "as today" if form.format(abs(change)) == form.format(0) else _more(change, form, less)


def _more(change: float, form: str, less: str = "less") -> str:
    return f"{form.format(abs(change))} {less if change < 0 else 'more'}"


def beyond_of(result: TuneResult) -> Iterator[str]:
    """Yield what more buys, or that it buys nothing where many steps are left without a graph."""
    tuning = result.tuning
    beyond, proposed = tuning.beyond, tuning.proposed
    if beyond is not None:
        room = _room(result, beyond.memory_mib)
        than = "" if result.plan is None else " than with the proposal"
        yield (
            f"with {_more(beyond.memory_mib, '{:,.0f} MiB')}{room}, the {subject_of(tuning.objective)} is "
            f"{beyond.gain:.0%} shorter{than}, with {_more(beyond.graphs, '{:,.0f} graphs', 'fewer')} and "
            f"{_more(beyond.seconds, '{:.1f} s')} of start-up; give {' '.join(flags_of(beyond))}."
        )
    elif (
        proposed is not None
        and tuning.plan is not None
        and any(share > MANY_EAGER for share in proposed.eager_share.values())
    ):
        yield "more graphs or memory would not be worth their price, by these costs."


def mode_of(result: TuneResult) -> Iterator[str]:
    """Say where the target's mode leaves many steps without a graph, whatever the sizes."""
    load, mode = result.load.judged, result.subject.today.modes.get(Role.TARGET)
    prompts = sum(count for batch, count in load.counts.items() if not batch.past_prompt) / max(load.total, 1)
    if mode is GraphMode.FULL_DECODE_ONLY and prompts > MANY_EAGER:
        yield (
            f"{prompts:.1%} of the steps have prompts, and {mode.value} has no graphs for those; "
            "FULL_AND_PIECEWISE has."
        )


def flags_of(beyond: Beyond) -> Iterator[str]:
    bounds = beyond.bounds
    if bounds.graphs is not None:
        yield f"--max-graphs {bounds.graphs}"
    if bounds.memory_mib is not None:
        yield f"--memory {bounds.memory_mib:.0f}MiB"
    if bounds.seconds is not None:
        yield f"--seconds {bounds.seconds:g}"


def milliseconds(value: float) -> str:
    """Write a time of a step: ``2.113 ms``."""
    return f"{value:,.3f} ms"


# JSON and sections ------------------------------------------------------------------------------

ADVICE = {
    TuneVerdict.CHANGE: "change",
    TuneVerdict.KEEP: "keep what you have",
    TuneVerdict.OVER_BUDGET: "nothing within the budget",
    TuneVerdict.TOO_LITTLE_DATA: "too little data",
}

_JUDGED = (
    "graphs",
    "objective",
    "mean_step_ms",
    "token_ms",
    "gap_ms",
    "gap_p99_ms",
    "prompt_step_ms",
    "eager_share",
    "memory_mib",
    "seconds",
    "regret",
    "worst_regret",
)


@json_of(TuneResult)
def _json(result: TuneResult) -> dict[str, Any]:
    tuning = result.tuning
    noise, shift = tuning.noise, tuning.shift
    return {
        "verdict": plain(tuning.verdict),
        "reason": tuning.reason,
        "estimate": tuning.is_estimate,
        "needed": result.first,
        "objective": tuning.objective,
        "today": plain(tuning.today),
        "proposed": plain(tuning.proposed),
        "gain": None
        if noise is None
        else _digits({"error_ms": noise.total, "low": noise.low, "high": noise.high, "blocks": noise.blocks}),
        "beyond": None if tuning.beyond is None else plain(tuning.beyond),
        "doubled_load": None
        if shift is None
        else _digits({"today": shift.today, "proposed": shift.proposed, "gain": shift.gain}),
        "churn": None if result.churn is None else plain_some(result.churn, "graphs", "kept", "new"),
        "latency": None
        if result.latencies is None
        else {
            name: _digits(attrs.asdict(side))
            for name, side in zip(("today", "proposed"), result.latencies, strict=True)
        },
        "worse": list(_worse_lines(tuning)),
        "pareto": plain(tuning.pareto),
        "steps": {
            "chosen": result.load.chosen.total,
            "judged": result.load.judged.total,
            "held_out": result.load.held_out,
            "least": LEAST_STEPS,
        },
        "assumptions": list(result.assumptions),
        "notes": list(result.notes),
        "commands": list(result.commands),
    }


@json_of(SideFigures)
def _side(side: SideFigures) -> dict[str, Any]:
    figures = plain_some(side, *_JUDGED) | ({"unknown": side.unknown} if side.unknown else {})
    return {name: _digits(value) for name, value in figures.items()}


@json_of(ParetoPoint)
def _point(point: ParetoPoint) -> dict[str, Any]:
    names = ("graphs", "objective", "mean_step_ms", "memory_mib", "seconds")
    return {name: _digits(value) for name, value in plain_some(point.side, *names).items()} | {"within": point.within}


@json_of(Beyond)
def _beyond(beyond: Beyond) -> dict[str, Any]:
    names = ("gain", "graphs", "memory_mib", "seconds")
    figures = {name: _digits(value) for name, value in plain_some(beyond, *names).items()}
    return figures | {"flags": list(flags_of(beyond))}


def _digits(value: Any) -> Any:
    """Return a figure with six digits, which is more than any is known to."""
    if isinstance(value, dict):
        return {key: _digits(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def tune_report(result: TuneResult) -> Report:
    """Return the report of a tuning for ``terminal.tables`` and ``page.page``."""
    parts = (_verdict, _sides, _sizes, _worse, _pareto, _assumed, _next)
    return Report(
        kind="tuning",
        title=f"Capture sizes of {_deployment(result)}: {_advice(result.tuning)}",
        sections=tuple(section for part in parts if (section := part(result)) and section.parts),
        charts=partial(tune_charts, result.tuning),
        spec=None if result.tuning.plan is None else result.tuning.plan.spec_digest,
    )


def _deployment(result: TuneResult) -> str:
    return f"{result.spec.model.name} on {result.subject.environment.name}"


def _advice(tuning: Tuning) -> str:
    return ADVICE[tuning.verdict] + (" (an estimate)" if tuning.is_estimate else "")


def _other(tuning: Tuning) -> str:
    """Return what the side next to today is: a table that does not do better is not proposed."""
    is_kept = tuning.plan is not None and tuning.verdict is not TuneVerdict.CHANGE
    return "best found" if is_kept else "proposed"


def _verdict(result: TuneResult) -> Section:
    tuning, load = result.tuning, result.load
    judged = (
        f"judged on the last {load.judged.total:,} steps; sizes are chosen by the {load.chosen.total:,} before them"
    )
    if not load.held_out:
        judged = f"chosen by and judged on the same {load.judged.total:,} steps: nothing is held out"
    return Section(
        name="verdict",
        title=f"{_deployment(result)}, {result.subject.name}: {_advice(tuning)}",
        parts=(
            *warned(None if result.first is None else f"{result.first}."),
            f"{tuning.reason}.",
            *figures_of(tuning),
            *price_of(result),
            *beyond_of(result),
            *mode_of(result),
            f"{judged}.",
            *noted(*(f"note: {each}" for each in result.notes)),
        ),
    )


Row = tuple[str, Callable[[SideFigures], str]]

MEMORY, START_UP = "memory of the graphs", "start-up for them"


def _sides(result: TuneResult) -> Section | None:
    today, proposed = result.tuning.today, result.tuning.proposed
    if today is None or proposed is None:
        return None
    objective = result.tuning.objective
    roles = [role for role in Role if role in today.eager_share or role in proposed.eager_share]
    times: list[Row] = [
        ("time per token", lambda side: milliseconds(side.token_ms)),
        # The other objectives have rows of their own below.
        *([(subject_of(objective), lambda side: milliseconds(side.objective))] if objective.startswith("p") else []),
        ("mean step", lambda side: milliseconds(side.mean_step_ms)),
        ("between two outputs, mean", lambda side: milliseconds(side.gap_ms)),
        ("between two outputs, p99", lambda side: milliseconds(side.gap_p99_ms)),
        ("step with prompts", lambda side: "" if side.prompt_step_ms is None else milliseconds(side.prompt_step_ms)),
    ]
    regrets: list[Row] = [
        ("slower than with every size", lambda side: _regret(side.regret)),
        ("at worst", lambda side: _regret(side.worst_regret)),
    ]
    price: list[Row] = [
        ("graphs", lambda side: f"{side.graphs:,}"),
        (MEMORY, lambda side: f"{side.memory_mib:,.0f} MiB"),
        (START_UP, lambda side: f"{side.seconds:.1f} s"),
        *((f"eager steps, {role}", partial(_eager, role)) for role in roles),
    ]
    # A table that was never captured has predicted figures.
    predicted = {} if result.tuning.plan is None else {MEMORY: MEMORY_ERROR, START_UP: SECONDS_ERROR}
    errors = {name: f" ± {error:.0%}" for name, error in predicted.items()}
    waits = () if result.latencies is None else _waits(*result.latencies)
    shift = result.tuning.shift
    shifted = () if shift is None else [("with twice the load", _regret(shift.today), _regret(shift.proposed))]

    def both(rows: list[Row]) -> Iterator[tuple[str, str, str]]:
        return ((name, write(today), write(proposed) + errors.get(name, "")) for name, write in rows)

    cells = [*both(times), *waits, *both(regrets), *shifted, *both(price)]
    other = _other(result.tuning)
    grid = Grid.of(("", "today", other), cells, text=1)
    return Section(name="sides", title=f"Today and {other}", parts=(grid, *_noise(result.tuning)))


def _waits(today: ServingLatency, proposed: ServingLatency) -> Iterator[tuple[str, str, str]]:
    for text, name in (("p50", "first_token_p50"), ("p99", "first_token_p99")):
        yield (
            f"wait for a first token, {text}",
            milliseconds(getattr(today, name)),
            milliseconds(getattr(proposed, name)),
        )


def _regret(share: float) -> str:
    return percent(max(share, 0.0))


def _eager(role: Role, side: SideFigures) -> str:
    return percent(side.eager_share[role]) if role in side.eager_share else ""


def _noise(tuning: Tuning) -> Iterator[TonedText]:
    noise = tuning.noise
    if noise is not None and noise.low is not None:
        yield TonedText(
            f"the gain is known to {milliseconds(noise.total)}: {milliseconds(noise.measuring)} from the profile, "
            "over the classes of graphs on which the two differ, and "
            f"{milliseconds(noise.sampling)} from the traffic (95 %).",
            "note",
        )


def _sizes(result: TuneResult) -> Section | None:
    """List the sizes of both sides, by role and kind of batch."""
    if result.tuning.pricings is None:
        return None
    sides = [_sizes_of(pricing.deployment) for pricing in result.tuning.pricings]
    roles = list(Role)
    rows = [
        (
            role.value,
            "mixed batches, tokens" if width is None else f"decodes of {width}, requests",
            *(_listed([size // (width or 1) for size in side.get((role, width), ())]) for side in sides),
        )
        for role, width in sorted(
            {group for side in sides for group in side}, key=lambda g: (roles.index(g[0]), g[1] is None, g[1] or 0)
        )
    ]
    return Section(name="sizes", parts=(Grid.of(("role", "batches", "today", _other(result.tuning)), rows),))


def _sizes_of(side: Emulation) -> dict[Group, tuple[int, ...]]:
    """Return the tokens of the graphs of a side, ascending, by role and query length."""
    graphs = grouped(side.graphs, lambda graph: (graph.role, graph.entry.query_len))
    return {group: tuple(sorted({graph.entry.num_tokens for graph in alike})) for group, alike in graphs.items()}


def _listed(sizes: Sequence[int]) -> str:
    """Write ascending sizes with their number: ``1 2 4 8..256 by 8 (35)``."""
    return f"{sizes_text(sizes)} ({len(sizes)})" if sizes else "none"


def _worse(result: TuneResult) -> Section:
    """Say what is worse for some batch that may come, whether it came or not."""
    return Section(
        name="worse", title="Worse than today", parts=tuple(f"{each}." for each in _worse_lines(result.tuning))
    )


def _worse_lines(tuning: Tuning) -> Iterator[str]:
    if tuning.pricings is None:
        return
    today, proposed = (pricing.deployment for pricing in tuning.pricings)
    yield from lost_graphs(today, proposed, EVERY)
    yield from slower_batches(*tuning.pricings)


def _pareto(result: TuneResult) -> Section | None:
    tuning = result.tuning
    if not tuning.pareto:
        return None
    points: list[ParetoPoint] = []
    for point in sorted(_with_proposed(tuning), key=lambda each: each.side.graphs):
        # Around what is proposed, the search tries tables that differ little.
        if not points or _is_proposed(point, tuning) or 8 * point.side.graphs >= 9 * points[-1].side.graphs:
            points.append(point)
    objective = tuning.objective
    rows = [
        (
            f"{point.side.graphs:,}",
            *_objective(point.side, objective),
            milliseconds(point.side.mean_step_ms),
            f"{point.side.memory_mib:,.0f}",
            f"{point.side.seconds:.1f}",
            _other(tuning) if _is_proposed(point, tuning) else "" if point.within else "beyond the bounds",
        )
        for point in points
    ]
    own = {"mean": (), "token": ("between outputs",), "regret": ("at worst",)}.get(objective, (subject_of(objective),))
    columns = ("graphs", *own, "mean step", "MiB", "s", "")
    grid = Grid(columns=columns, right=frozenset(columns[:-1]), rows=tuple(rows))
    return Section(name="pareto", title="What graphs buy", parts=(grid,))


def _with_proposed(tuning: Tuning) -> tuple[ParetoPoint, ...]:
    """Return the tables with the proposed one, which those that judge may have ranked behind one of fewer graphs."""
    if tuning.plan is None or tuning.proposed is None or any(_is_proposed(each, tuning) for each in tuning.pareto):
        return tuning.pareto
    return *tuning.pareto, ParetoPoint(tuning.proposed, within=True)


def _is_proposed(point: ParetoPoint, tuning: Tuning) -> bool:
    proposed = tuning.proposed
    if proposed is None or tuning.plan is None:
        return False
    return (point.side.graphs, point.side.memory_mib) == (proposed.graphs, proposed.memory_mib)


def _objective(side: SideFigures, objective: str) -> tuple[str, ...]:
    """Return the cell of an objective that has a column of its own."""
    if objective == "mean":
        return ()
    # Regret is a ratio to a graph of the batch's own size: 1 is no loss.
    return (percent(max(side.objective - 1, 0.0)) if objective == "regret" else milliseconds(side.objective),)


def _assumed(result: TuneResult) -> Section:
    """List what the figures rest on, first what could change them most."""
    return Section(name="assumptions", parts=warned(*(f"assumed: {each}" for each in result.assumptions)))


def _next(result: TuneResult) -> Section:
    return Section(name="next", parts=result.commands)


# Charts -----------------------------------------------------------------------------------------

TODAY: Color = "none"
PROPOSED: Color = "full"
LOAD: Color = "ink"


def tune_charts(tuning: Tuning) -> tuple[Chart, ...]:
    """Return the charts of a tuning; those that would be empty are left out."""
    return drawn(tuning, (_eager_chart, _classes_chart, _pareto_chart))


def _pareto_chart(tuning: Tuning) -> Chart | None:
    if tuning.today is None or tuning.proposed is None or not tuning.pareto:
        return None
    plots = []
    own = {
        "mean": [],
        "token": [("Time between outputs by graphs", "objective", PlotAxis("between outputs", "s"), 1e-3)],
        "regret": [("Worst step by graphs", "objective", PlotAxis("times its own size", "ratio"), 1.0)],
    }
    chosen = tuning.objective
    # Axes are in s and B, figures in ms and MiB: `scale` converts.
    for title, name, axis, scale in (
        *own.get(chosen, [(f"{chosen} step by graphs", "objective", PlotAxis(f"{chosen} step", "s"), 1e-3)]),
        ("Mean step by graphs", "mean_step_ms", PlotAxis("mean step", "s"), 1e-3),
        ("Memory by graphs", "memory_mib", PlotAxis("memory", "B", from_zero=True), float(1 << 20)),
        ("Start-up by graphs", "seconds", PlotAxis("capture", "s", from_zero=True), 1.0),
    ):
        table = [(each.side.graphs, getattr(each.side, name) * scale) for each in tuning.pareto]
        sides = ((tuning.today, "today", TODAY), (tuning.proposed, _other(tuning), PROPOSED))
        marks = [
            Series(label, Mark.POINTS, [(side.graphs, getattr(side, name) * scale)], color=color)
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


def _eager_chart(tuning: Tuning) -> Chart | None:
    if tuning.today is None or tuning.proposed is None:
        return None
    sides = ((tuning.today, "today", TODAY), (tuning.proposed, _other(tuning), PROPOSED))
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
    """The passes of one kind, by tokens: how many, and one of them on both sides."""

    group: Group
    counts: Counter[int]
    sides: tuple[dict[int, PassCost], dict[int, PassCost]]
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    """The sizes of both sides, in tokens, ascending."""
    labels: tuple[str, str]

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
    # A set: with fewer values than points several of them round to the same index.
    return [values[index] for index in sorted({round(last * at / (MAX_POINTS - 1)) for at in range(MAX_POINTS)})]


def _loads(tuning: Tuning) -> Iterator[_Load]:
    """Yield what ran, target first, decodes before mixed batches.

    The draft prefill, which runs on the target's batches, is left out where it has the target's sizes.
    """
    if tuning.pricings is None:
        return
    deployment = tuning.pricings[0].deployment
    families = {role: deployment.families(role) for role in deployment.modes}
    sizes = [_sizes_of(pricing.deployment) for pricing in tuning.pricings]
    loads: dict[Group, _Load] = {}
    for batch, count in tuning.judging.items():
        today, proposed = (pricing.step(batch).passes for pricing in tuning.pricings)
        for before, after in zip(today, proposed, strict=True):
            own = before.batch
            decode = kind_of(own, families[own.role]) is Kind.DECODE
            group = (own.role, own.query_len if decode else None)
            if group not in loads:
                own_sizes = sizes[0].get(group, ()), sizes[1].get(group, ())
                loads[group] = _Load(group, Counter(), ({}, {}), own_sizes, ("today", _other(tuning)))
            load = loads[group]
            load.counts[own.num_tokens] += count
            for side, each in zip(load.sides, (before, after), strict=True):
                side[own.num_tokens] = each
    roles = list(Role)
    for load in sorted(loads.values(), key=lambda load: (roles.index(load.group[0]), load.group[1] is None)):
        target = loads.get((Role.TARGET, load.group[1]))
        # It runs on the target's batches: with the target's sizes too, its picture would be the target's again.
        followed = target is not None and target.counts == load.counts and target.sizes == load.sizes
        if load.group[0] is not Role.DRAFT_PREFILL or not followed:
            yield load


def _loaded(load: _Load) -> Plot:
    """Draw the share of steps up to each size, with both sides' sizes on the curve."""
    total, below = load.counts.total(), dict[int, float]()
    ran = sorted(load.counts)
    for tokens, sum_of in zip(ran, accumulate(load.counts[each] for each in ran), strict=True):
        below[tokens] = sum_of / total

    def share(size: int) -> float:
        return max((below[tokens] for tokens in ran if tokens <= size), default=0.0)

    series = [Series("steps", Mark.LINE, [(tokens, below[tokens]) for tokens in load.tokens], color=LOAD)]
    for sizes, label, color in zip(load.sizes, load.labels, (TODAY, PROPOSED), strict=True):
        if sizes:
            points: list[Point] = [(size, share(size)) for size in _few(sizes)]
            series.append(Series(f"{label}: {len(sizes)} sizes", Mark.POINTS, points, color=color))
        else:
            # A side without a size of this kind is named in the key, at the foot of the axis.
            series.append(Series(f"{label}: no size", Mark.POINTS, [(load.tokens[0], 0.0)], color=color))
    title, y = f"Steps up to a size: {load.name}", PlotAxis("share of steps", "%")
    return Plot(title=title, x=PlotAxis("batch", "tokens", log=True), y=y, series=series)


def _timed(load: _Load) -> Plot:
    """Draw what a pass takes by its tokens, on both sides and with every size."""
    today, proposed = load.sides
    tokens, labels = load.tokens, load.labels
    series = [
        Series("every size", Mark.LINE, [(n, today[n].every_size / 1e3) for n in tokens], color=LOAD),
        Series(labels[0], Mark.STAIRS, [(n, today[n].milliseconds / 1e3) for n in tokens], color=TODAY),
        Series(labels[1], Mark.STAIRS, [(n, proposed[n].milliseconds / 1e3) for n in tokens], color=PROPOSED),
    ]
    x, y = PlotAxis("batch", "tokens", log=True), PlotAxis("time", "s")
    return Plot(title=f"Time of a pass: {load.name}", x=x, y=y, series=series)


def _classes_chart(tuning: Tuning) -> Chart | None:
    """Draw each class of batches by its load and by what a pass takes, side by side."""
    plots = [plot for load in _loads(tuning) for plot in (_loaded(load), _timed(load))]
    if not plots:
        return None
    return Chart(
        name="classes",
        section="sizes",
        plots=plots,
        caption="Of each kind of batch: how many steps have at most so many tokens, with the sizes that have a graph, "
        "which belong where the curve rises; and what a batch takes on the graph that it gets, by the profile. A side "
        "far above the others pads far, or runs eager. Graphs of mixed batches serve decodes too, and are not drawn "
        "there. The draft prefill has the target's sizes where it is not drawn.",
    )
