"""The tables of arriving requests: what rounds give, and what a page shows while nothing was measured."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import _arriving_rounds as rounds
import _arriving_turns as turns_of
import arriving_tables
import pytest
from hypothesis import given
from hypothesis import strategies as st

FIGURES = {
    "busy_seconds": 2.0,
    "itl_ms_p50": 1.0,
    "itl_ms_p99": 2.0,
    "ttft_ms_p50": 3.0,
    "ttft_ms_p99": 4.0,
    "tpot_ms_p50": 1.0,
}
COLUMNS = rounds.COLUMNS
GRAPHS = {rounds.ITSELF: 200, rounds.EXPERT: 100, rounds.TUNED: 40, rounds.AGAIN: 200}
RATES = st.integers(1, 10**6).map(float)


def row(column: str, load: str, turn: int, rate: float) -> dict[str, Any]:
    steps = {"target": {"FULL": 75, "NONE": 25}}
    return {
        "column": column,
        "load": load,
        "round": turn,
        "tokens_per_second": rate,
        "graphs_of_steps": steps,
    } | FIGURES


def measured(rows: list[dict[str, Any]], verdict: str = "change") -> dict[str, Any]:
    """The results of a group, as they are written."""
    tuned = [column for column in COLUMNS if verdict == "change" or column != rounds.TUNED]
    return rounds.summarised(
        {
            "shape": "0.6b",
            "k": 3,
            "layers": 28,
            "loads": ["wave 10-250", "32 in flight"],
            "rounds": rows,
            "errors": [],
            "observed": [row("", load, 0, 1.0) for load in ("wave 10-250", "32 in flight")],
            "tune": {"verdict": verdict, "today": {"mean_step_ms": 22.0}, "proposed": {"mean_step_ms": 19.0}},
            "engines": {
                column: {
                    "device": "a GPU",
                    "vllm": "0.33.0",
                    "torch": "2.11.0",
                    "graphs": {"target": GRAPHS[column]},
                    "capture_seconds": 1.25,
                    "graph_mib": 512.0,
                }
                for column in tuned
            },
        }
    )


def written(folder: Path, result: dict[str, Any], name: str = "0.6b-3") -> None:
    host = {"hardware": {"cores": 16, "cpu": "a CPU"}, "python": "CPython 3.12", "command": "python benchmark"}
    file = {
        "provenance": {"date": "2026-11-23T12:00:00+00:00", **host},
        "results": {name: result},
        "targets": {f"{name}: wave 10-250, faster (1.2)": True, f"{name}: faster": False, "8b-3: faster": False},
    }
    (folder / f"vllm_arriving-{name}.json").write_text(json.dumps(file), "utf-8")


def rows_of(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        row(column, load, turn, rate)
        for column, found in rates.items()
        for load in ("wave 10-250", "32 in flight")
        for turn, rate in enumerate(found)
    ]


@given(st.lists(st.tuples(RATES, RATES, RATES, RATES), min_size=1, max_size=5))
def test_ratios_are_of_the_same_round(found: list[tuple[float, float, float, float]]) -> None:
    """A round that slows all engines alike changes no ratio."""
    rates = dict(zip(COLUMNS, map(list, zip(*found, strict=True)), strict=True))
    slowed = {column: [rate / (3 + turn) for turn, rate in enumerate(each)] for column, each in rates.items()}
    (first, second) = (measured(rows_of(each))["ratios"] for each in (rates, slowed))
    for pair, loads in first.items():
        for load, figures in loads.items():
            assert second[pair][load]["tokens_per_second"] == pytest.approx(figures["tokens_per_second"], abs=2e-4)


@given(st.lists(st.tuples(RATES, RATES, RATES, RATES), min_size=1, max_size=5))
def test_two_engines_by_themselves_count_with_their_mean(found: list[tuple[float, float, float, float]]) -> None:
    """As what others are compared with; the second is compared with the first."""
    rates = dict(zip(COLUMNS, map(list, zip(*found, strict=True)), strict=True))
    ratios = measured(rows_of(rates))["ratios"]
    own, again = rates[rounds.ITSELF], rates[rounds.AGAIN]
    both = [math.sqrt(one * two) for one, two in zip(own, again, strict=True)]
    wanted = {rounds.EXPERT: both, rounds.TUNED: both, rounds.AGAIN: own}
    for column, other in wanted.items():
        each = [mine / base for mine, base in zip(rates[column], other, strict=True)]
        figures = ratios[f"{column} / {rounds.ITSELF}"]["32 in flight"]["tokens_per_second"]
        assert figures == pytest.approx([statistics.median(each), min(each), max(each)], abs=1e-4)


def test_promise_is_the_mean_step_of_the_loads() -> None:
    result = measured(rows_of({column: [10.0, 20.0] for column in COLUMNS}))
    assert result["promise"]["before"] == {"stated_ms": 22.0, "measured_ms": 20.0, "off": 0.1}
    # The engine by itself takes as long as when it was observed, so the host has not drifted.
    assert result["promise"]["after"] == {"stated_ms": 19.0, "measured_ms": 20.0, "drift": 1.0, "off": -0.05}
    assert result["without_graph"][rounds.TUNED] == {"target": 0.25}


@given(st.sampled_from((0.5, 0.625, 1.25, 1.6)))
def test_a_slower_host_breaks_no_promise(drift: float) -> None:
    """What is stated for the plan is compared at the speed that the engine by itself has in the same rounds."""
    rows = rows_of({column: [10.0 / drift, 20.0 / drift] for column in COLUMNS})
    result = measured([{**each, "busy_seconds": each["busy_seconds"] * drift} for each in rows])
    assert result["promise"]["after"]["drift"] == pytest.approx(drift, rel=1e-3)
    assert result["promise"]["after"]["off"] == pytest.approx(-0.05, abs=1e-3)


def test_engine_that_is_kept_counts_as_tuned(tmp_path: Path) -> None:
    """With a ratio of one, its own graphs, and no promise of a plan."""
    result = measured(rows_of({rounds.ITSELF: [10.0, 30.0], rounds.EXPERT: [20.0, 20.0]}), "keep")
    assert result["medians"][rounds.TUNED] == result["medians"][rounds.ITSELF]
    assert set(result["promise"]) == {"before"}
    written(tmp_path, result)
    assert "| CUDA graphs | 200 | 100 | 200 |" in arriving_tables.headline(tmp_path)


def test_tables_show_the_medians_and_their_spread(tmp_path: Path) -> None:
    rates = {rounds.ITSELF: [1e3, 2e3, 4e3], rounds.EXPERT: [5e3] * 3, rounds.TUNED: [6e3] * 3}
    written(tmp_path, measured(rows_of(rates)))
    text = arriving_tables.headline(tmp_path)
    assert "| tokens/s, wave 10-250 | 2,000 | 5,000 | 6,000 |" in text
    assert "| CUDA graphs | 200 | 100 | 40 |" in text
    ratios = "| 2.50 (1.25 to 5.00) | 3.00 (1.50 to 6.00) |"
    assert f"| 32 in flight | 2,000 {ratios}" in arriving_tables.throughput(tmp_path)
    assert "| 200/100/40 | 1.2/1.2/1.2 | 512/512/512 | 25.0%/25.0%/25.0% |" in arriving_tables.start(tmp_path)
    assert "| faster | 1 of 2 |" in arriving_tables.targets(folder=tmp_path)
    assert "[vllm_arriving-0.6b-3](" in arriving_tables.machine(folder=tmp_path)


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    parts = (
        arriving_tables.headline,
        arriving_tables.start,
        arriving_tables.throughput,
        arriving_tables.promises,
        arriving_tables.turns,
        arriving_tables.deployments,
        arriving_tables.sglang,
    )
    assert {part(tmp_path) for part in parts} == {arriving_tables.MISSING}
    assert arriving_tables.targets(folder=tmp_path) == arriving_tables.machine(folder=tmp_path) == "Not measured yet."


@pytest.mark.parametrize(("verdict", "met"), [("change", [False]), ("keep", [])])
def test_plans_that_did_not_take_turns_are_missed_unless_tune_keeps(verdict: str, met: list[bool]) -> None:
    group = rounds.Group(name="lora", loads=(), columns=(rounds.ITSELF, rounds.TUNED))
    turns = {"steps": 8, "graphs": {}, "rows": []}
    result = {"loads": [], "errors": ["merged: it has ended"], "tune": {"verdict": verdict}, "turns": turns}
    assert [each for _, each in rounds.targets_of(group, rounds.summarised(result))] == met


def test_turns_show_what_is_no_noise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A load is missed by more than two errors of its ratio; all loads together are a target, too."""
    group = rounds.Group(name="8b-3", loads=(), columns=COLUMNS)
    expert, tuned = rounds.EXPERT, rounds.TUNED

    def served(load: str, tuned_ms: float, spread: float) -> dict[str, Any]:
        turns = {
            column: ({"decode 8": (8, 8 * each * (1 + spread))}, {"decode 8": (8, 8 * each * (1 - spread))})
            for column, each in ((rounds.ITSELF, 1.0), (expert, 1.0), (tuned, tuned_ms))
        }
        turns[expert] = turns[expert][::-1]
        return {"load": load, "turns": turns}

    rows = [served(load, each, spread) for load, each, spread in (("a", 1.01, 0.05), ("b", 1.01, 0.001)) for _ in "12"]
    turns = {"steps": 8, "graphs": {rounds.ITSELF: {"target": 9}, expert: {"target": 9}, tuned: {"target": 4}}}
    result = rounds.summarised(
        {"loads": ["a", "b"], "errors": [], "tune": {"verdict": "change"}, "turns": {**turns, "rows": rows}}
    )
    met = {
        name.split(": ")[1].split(",")[0]: each
        for name, each in rounds.targets_of(group, result)
        if expert in name and "graphs" not in name
    }
    assert met == {"a": True, "b": False, "all loads": True}
    rounds.show("8b-3", result)
    assert "+-" in capsys.readouterr().out
    named = {**result, "shape": "8b", "k": 3, "layers": 36}
    file = {"provenance": {"date": "2026-01-01"}, "results": {"8b-3": named}, "targets": {}}
    (tmp_path / "vllm_turns-2026-01-01.json").write_text(json.dumps(file))
    line = arriving_tables.turns(tmp_path).splitlines()[-1]
    found = result["turns"]["all_loads"]
    error = turns_of.error_of(found, tuned, expert)
    assert line == f"| Qwen3-8B, K=3 | {found['step_ms'][rounds.ITSELF]:.2f} | 1.000 | 1.010 ± {error:.3f} |"
