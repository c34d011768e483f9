"""The campaign of random starts, without an engine: what counts as a crash, what is compared, and what a seed gives."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import _vllm_starts
import pytest
import vllm_starts
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.codec import load_plan
from capture_planner.modes import Role

CRASHING, REFUSED, FLAKY, SILENT, WRONG, ROUNDED = 3, 5, 6, 7, 208, 211
"""Seeds that fail under their plan alone; with and without it; the first time; and by a signal under their plan; whose
tokens differ under their plan alone; and without it, too."""


def fake_start(start, folder, *, planned):
    """Stand for a start: some seeds fail."""
    tried = folder / f"tried-{start.seed}"
    first = not tried.exists()
    tried.touch()
    if start.seed == REFUSED or (start.seed == CRASHING and planned) or (start.seed == FLAKY and first):
        raise RuntimeError("it does not fit")
    if start.seed == SILENT and planned:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"start_seconds": 1, "serve_seconds": 1, "graphs": {"target": 2}, "replays": {"target": 3},
            "tokens": [[token_of(start.seed, planned)] * request.output for request in start.requests]}  # fmt: skip


def token_of(seed, planned):
    """Return the token that a start gives all the time; the eager engine gives the seed."""
    return -1 if seed == ROUNDED or (seed == WRONG and planned) else seed


def fake_compare(starts, outputs, folder):
    """Stand for the eager engine: it agrees where each start has given its own tokens."""
    different = [
        {"seed": start.seed, "log_probability_below": 1.0}
        for start in starts
        if outputs[start.seed][0][0] != start.seed
    ]
    return {"requests": sum(len(start.requests) for start in starts), "tokens": 1, "ties": 0, "different": different}


@pytest.fixture
def campaign(monkeypatch, tmp_path):
    """Run the script with stand-ins for engines, in forks; gives its exit code and what it has written."""
    monkeypatch.setattr(vllm_starts, "run_start", fake_start)
    monkeypatch.setattr(vllm_starts, "compare_kind", fake_compare)
    monkeypatch.setattr(vllm_starts, "COMPARING", 2.0)
    monkeypatch.setattr(vllm_starts, "prepare", lambda folder: None)

    def run(*words):
        output = tmp_path / "out.json"
        command = ["vllm_starts.py", "--folder", str(tmp_path / "work"), "--output", str(output), *words]
        monkeypatch.setattr(sys, "argv", command)
        code = vllm_starts.main()
        return code, json.loads(output.read_text("utf-8")) if output.exists() else {}

    return run


def test_crash_is_what_vllm_alone_survives(campaign):
    """What it does not survive is drawn anew; what fails once is tried again, and said."""
    code, written = campaign("--starts", "10", "--jobs", "4", "--seconds", "200")
    results, targets = written["results"], written["targets"]
    assert sorted(each["seed"] for each in results["crashes"]) == [CRASHING, SILENT]
    assert results["crashes"][0]["under_the_plan"]["error"] == "RuntimeError: it does not fit"
    assert [each["seed"] for each in results["failed_alone_too"]] == [REFUSED]
    assert [each["seed"] for each in results["failed_once"]] == [FLAKY]
    assert results["starts"] == 10
    assert sorted(map(int, results["each"])) == sorted({*range(11)} - {CRASHING, SILENT, REFUSED})
    assert [name for name, holds in targets.items() if not holds] == ["crashes 0 (2)"]
    assert code == 1


def test_campaign_that_is_over_says_how_far_it_came(campaign):
    """It ends in its time, and misses its number of starts."""
    code, written = campaign("--starts", "100000", "--seed", "1000", "--jobs", "2", "--seconds", "4")
    assert code == 1
    missed = [name for name, holds in written["targets"].items() if not holds]
    assert missed == [f"starts at least 100000 ({written['results']['starts']})"]


def test_tokens_that_vllm_alone_gives_are_not_the_plans(campaign):
    """A start that differs runs without its plan, too."""
    code, written = campaign("--starts", "8", "--seed", "206", "--jobs", "4", "--seconds", "300")
    tokens = written["results"]["tokens"].values()
    assert [each["seed"] for answer in tokens for each in answer["different"]] == [WRONG]
    assert sum(answer.get("as_vllm_alone", 0) for answer in tokens) == 1
    assert [name for name, holds in written["targets"].items() if not holds] == ["differing tokens 0 (1)"]
    assert code == 1


def test_one_case_is_repeated(campaign):
    """With its crash; nothing is written."""
    assert campaign("--case", str(CRASHING)) == (1, {})
    assert campaign("--case", "20") == (0, {})


@given(st.integers(0, 1 << 20))
def test_seed_gives_a_start_that_vllm_takes(seed: int) -> None:
    """The same each time; its words agree with its plan, which can be written and read."""
    start = _vllm_starts.start_of(seed)
    assert start == _vllm_starts.start_of(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = _vllm_starts.words_of(start, folder)
        words, variables = _vllm_starts.under_plan(start.plan, own, folder / "plan.yaml")
        assert load_plan(variables["CAPTURE_PLANNER_PLAN"]) == start.plan
    assert words[: len(own)] == own
    assert any(entry.num_tokens <= start.plan.limits.max_num_tokens for entry in start.plan.role(Role.TARGET).entries)
    most = max(len(request.prompt) + request.output for request in start.requests)
    assert most <= _vllm_starts.LENGTH


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_first_difference_is_the_length_of_what_is_equal(one: list[int], other: list[int]) -> None:
    """Against slices."""
    place = _vllm_starts.first_difference(one, other)
    assert one[:place] == other[:place]
    assert place == min(len(one), len(other)) or one[place] != other[place]
