"""The load of ``tune``: traces in a closed loop, and traffic with and without an order."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from capture_planner import codec
from capture_planner.analysis.arrivals import simulate
from capture_planner.measuring.traffic import SourceOptions
from capture_planner.planning.costs import Costs
from capture_planner_tuner.cli.tune import subject_of
from capture_planner_tuner.tuning.session import load_of, today_pace
from support.commands import Run
from support.tuning import MODEL, profile, vllm_log

FLAGS = ("vllm", MODEL.name, "--max-num-seqs", "12", "--max-num-batched-tokens", "64")
LOAD = ("--traffic", "vllm.log", "--profile", "profile.yaml")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a log of vLLM and a profile."""
    monkeypatch.chdir(tmp_path)
    Path("vllm.log").write_text(vllm_log(3600, (3, 5, 9, 11), longest=48), "utf-8")
    Path("profile.yaml").write_text(codec.dumps(profile()), "utf-8")


def tuned(call: Run, *words: str) -> Any:
    """Return the JSON that tune prints."""
    return call("tune", *words, "--format", "json").document(0)


def test_traces_run_by_the_profile_with_todays_graphs(call: Run) -> None:
    """It is an assumption, with what is accepted; a constant is one too. Blocks are of the part that judges."""
    rng = random.Random(3)
    rows = sorted((rng.uniform(0, 60), rng.randint(1, 90), rng.randint(20, 90)) for _ in range(900))
    Path("trace.csv").write_text("t,in_len,out_len\n" + "".join(f"{at:.3f},{p},{o}\n" for at, p, o in rows))
    trace = ("--traffic", "trace.csv", *LOAD[2:])
    told = [tuned(call, *FLAGS, *trace, *more)["assumptions"] for more in ((), ("--step-ms", "5"))]
    assert any("each step takes what profile.yaml says of today's graphs" in each for each in told[0])
    assert any("every step takes 5 ms" in each for each in told[1])
    costs = profile()
    subject = subject_of(FLAGS, "h200", costs)
    pace = today_pace(subject.today, Costs(costs), "profile.yaml")
    load = load_of(subject, ["trace.csv"], SourceOptions(deployment=subject.today, pace=pace))
    assert load.held_out
    assert sum(map(Counter, load.blocks), Counter()) == Counter(load.judged.counts)
    (judged,) = load.traces
    again = simulate(judged.arrivals, subject.today.limits, None, pace.step_time, window=judged.window)
    assert again.counts == Counter(load.judged.counts)
