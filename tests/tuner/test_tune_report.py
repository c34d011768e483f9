"""The page of a tuning: every plot, and the figures of both sides."""

from __future__ import annotations

import attrs
import pytest

from capture_planner import load_backends, plan
from capture_planner.analysis.arrivals import ServingLatency
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, find_engine
from capture_planner.engines.spec_of import spec_of
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import Steps, steps_of
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Policy, Sizes
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner_tuner.report.tune import beyond_of, figures_of, mode_of, tune_report
from capture_planner_tuner.tuning.judgement import TuneVerdict
from capture_planner_tuner.tuning.session import TuneCosts, TuneLoad, TuneResult, TuneSubject
from capture_planner_tuner.tuning.tune import Beyond, TuneCase, TuningBounds, tune
from support.tuning import MODEL, profile

pytest.importorskip("matplotlib", reason="pages need matplotlib, which is not installed")

from capture_planner.report.page import page as page_of
from support.pages import check_plots, grids_of

EAGLE = ["--speculative-config", '{"method":"eagle3","model":"my/drafter","num_speculative_tokens":2}']


@pytest.fixture(scope="module")
def report() -> TuneResult:
    """A deployment with a drafter, half of whose decodes have no graph today."""
    machine, backends = find_environment("h200"), load_backends()
    flags = ["--max-num-seqs", "12", "--max-num-batched-tokens", "64", "--cudagraph-capture-sizes", "3", "9", "18"]
    today = emulate("vllm", [MODEL.name, *flags, *EAGLE], machine)
    costs = profile(tuple(Role), speculative=Speculative(method=Method.EAGLE3, num_tokens=2))
    decodes = [(n, 3 * n, 3, True) for n in (2, 5, 9, 12)]
    mixed = [(4, tokens, None, False) for tokens in (20, 33, 60)]
    load = Traffic(
        sources=("by hand",),
        batches=tuple(
            TrafficCount(role=Role.TARGET, num_reqs=n, num_tokens=tokens, query_len=q, past_prompt=past, count=500)
            for n, tokens, q, past in (*decodes, *mixed)
        ),
    )
    derived = spec_of(today, find_engine("vllm"), MODEL)
    spec = replace(derived.spec, sizes=Sizes(policy=Policy.MEASURED))
    steps = steps_of(load, today).counts

    def propose(count: int, _: object) -> object:
        own = replace(spec, budget=replace(spec.budget, max_graphs=count))
        return plan(own, machine, backends, Measurements(profile=costs, traffic=load))

    counted = steps_of(load, today)
    return TuneResult(
        subject=TuneSubject(name="vllm", today=today, environment=machine, derived=derived),
        tuning=tune(TuneCase(today=today, costs=Costs(costs), chosen=steps, judging=steps), propose),  # type: ignore[arg-type]
        spec=spec,
        planned=None,
        measurements=Measurements(profile=costs, traffic=load),
        costs=TuneCosts(name="costs", profile=costs, assumption=None, is_estimate=False),
        load=TuneLoad(traffic=load, chosen=counted, judged=counted, held_out=False, notes=(), assumptions=()),
        first=None,
        assumptions=("costs are <assumed>",),
        notes=(),
    )


@pytest.fixture(scope="module")
def text(report: TuneResult) -> str:
    """The page."""
    return page_of(tune_report(report))


def test_the_page_has_every_plot_with_its_numbers(report: TuneResult, text: str) -> None:
    """Titles, axes with units, and a table behind each plot; of each role and kind of batch its sizes and costs."""
    charts = tune_report(report).charts()
    check_plots(charts, text)
    titles = {plot.title for chart in charts for plot in chart.plots}
    assert not any(Role.DRAFT_PREFILL.value in title for title in titles)  # it has the target's sizes
    for role, kind in (
        (Role.TARGET, "mixed batches"),
        (Role.TARGET, "decodes of 3"),
        (Role.DRAFT_DECODE, "decodes of 1"),
    ):
        assert f"Steps up to a size: {role.value}, {kind}" in titles
        assert f"Time of a pass: {role.value}, {kind}" in titles
    assert {"Mean step by graphs", "Memory by graphs", "Start-up by graphs", "Eager steps"} <= titles
    assert "http" not in text.replace("http://www.w3.org", "")


def test_the_verdict_stands_first_and_assumptions_last(report: TuneResult, text: str) -> None:
    """With the gain, the price and the steps without a graph in the first section; text from files is no markup."""
    shown = tune_report(report)
    first, last = shown.sections[0], shown.sections[-1]
    assert first.title.startswith(f"{MODEL.name} on h200, vllm: ")
    assert any(line.startswith("price: ") for line in first.texts(None))
    assert any(line.startswith("steps without a graph: ") for line in first.texts(None))
    assert last.texts("warning") == ("assumed: costs are <assumed>",)
    assert "&lt;assumed&gt;" in text
    assert "<assumed>" not in text


@pytest.mark.parametrize(("objective", "what"), [("token", "the gain is "), ("mean", "the gain in the mean step is ")])
def test_the_range_of_a_gain_names_what_it_is_of(report: TuneResult, objective: str, what: str) -> None:
    """The time between two outputs stands before it, whatever the objective."""
    line = next(figures_of(attrs.evolve(report.tuning, verdict=TuneVerdict.CHANGE, objective=objective)))
    assert line.startswith("time between two outputs ")
    assert f", {what}" in line


def test_a_table_that_is_rejected_is_not_called_proposed(report: TuneResult, text: str) -> None:
    """Neither in the tables nor in the charts; and more is on top of what runs, not of it."""
    kept = attrs.evolve(report.tuning, verdict=TuneVerdict.KEEP)
    beyond = Beyond(gain=0.05, graphs=13, memory_mib=1.0, seconds=1.0, bounds=TuningBounds(graphs=7))
    result = attrs.evolve(report, tuning=attrs.evolve(kept, beyond=beyond))
    shown = tune_report(result)
    page = page_of(shown)
    headers = {grid.columns[-1] for section in shown.sections for grid in grids_of(section)}
    assert "best found" in headers
    assert "proposed" not in headers
    assert "proposed" in text
    assert "proposed" not in page
    (line,) = beyond_of(result)
    assert "proposal" not in line


def test_predicted_memory_and_start_up_have_their_error(report: TuneResult) -> None:
    """Errors are shown for the proposal, which is predicted, and not for today's graphs, which were measured."""
    for tuning, error in ((report.tuning, True), (attrs.evolve(report.tuning, plan=None), False)):
        shown = tune_report(attrs.evolve(report, tuning=tuning))
        (sides,) = (each for each in shown.sections if each.name == "sides")
        cells = {row[0]: row[1:] for row in grids_of(sides)[0].rows}
        for name, share in (("memory of the graphs", "20%"), ("start-up for them", "25%")):
            today, proposed = map(str, cells[name])
            assert "±" not in today
            assert proposed.endswith(f" ± {share}") is error


@pytest.mark.parametrize(
    ("memory", "graphs", "seconds", "says"),
    [
        (120.0, 12, 0.64, ("with 120 MiB more", "12 graphs more and 0.6 s more of start-up")),
        (-4400.0, -3, -1.5, ("with 4,400 MiB less", "3 graphs fewer and 1.5 s less of start-up")),
        (0.0, 0, 0.0, ("with 0 MiB more", "0 graphs more and 0.0 s more of start-up")),
    ],
)
def test_what_more_buys_may_take_less_of_something(
    report: TuneResult, memory: float, graphs: int, seconds: float, says: tuple[str, str]
) -> None:
    """A price has no sign; one that does not change is the proposal's, not today's."""
    beyond = Beyond(gain=0.05, graphs=graphs, memory_mib=memory, seconds=seconds, bounds=TuningBounds(graphs=7))
    (line,) = beyond_of(attrs.evolve(report, tuning=attrs.evolve(report.tuning, beyond=beyond)))
    assert line.startswith(f"{says[0]}, the mean step is 5% shorter")
    assert f"with {says[1]}; give --max-graphs 7." in line


@pytest.mark.parametrize("mode", GraphMode)
def test_a_mode_without_graphs_for_prompts_is_said(report: TuneResult, mode: GraphMode) -> None:
    """No sizes help there: of more than a tenth of the steps, and of a mode that has other graphs."""
    today = report.subject.today
    (target,) = (each for each in today.managers if each.role is Role.TARGET)
    today = attrs.evolve(today, managers=(attrs.evolve(target, mode=mode),))
    subject = attrs.evolve(report.subject, today=today)
    for prompts in range(101):
        counts = {Batch.decode(Role.TARGET, 4, 1): 100 - prompts, Batch.mixed(Role.TARGET, 4, 90): prompts}
        load = attrs.evolve(report.load, judged=Steps(counts))
        said = list(mode_of(attrs.evolve(report, subject=subject, load=load)))
        assert bool(said) is (mode is GraphMode.FULL_DECODE_ONLY and prompts > 10)


@pytest.mark.parametrize("objective", ["mean", "p99"])
def test_waits_for_a_first_token_stand_behind_the_times_of_steps(report: TuneResult, objective: str) -> None:
    """Whatever the objective, which has a row of its own if it is a percentile."""
    waits = ServingLatency(first_token_p50=1.0, first_token_p99=2.0, inter_token_p50=3.0, inter_token_p99=4.0)
    tuning = attrs.evolve(report.tuning, objective=objective)
    shown = tune_report(attrs.evolve(report, tuning=tuning, latencies=(waits, waits)))
    (sides,) = (each for each in shown.sections if each.name == "sides")
    names = [row[0] for row in grids_of(sides)[0].rows]
    at = names.index("step with prompts")
    assert [f"wait for a first token, {each}" for each in ("p50", "p99")] == names[at + 1 : at + 3]


def test_curves_end_with_all_steps(report: TuneResult) -> None:
    """The share of steps up to the largest size is all of them, and never falls."""
    for chart in tune_report(report).charts():
        for plot in chart.plots if chart.name == "classes" else ():
            if not plot.title.startswith("Steps up to a size"):
                continue
            shares = [y for _, y in plot.series[0].points]
            assert shares == sorted(shares)
            assert shares[-1] == pytest.approx(1)
