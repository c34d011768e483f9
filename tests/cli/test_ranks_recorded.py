"""``ranks --recorded``: what the ranks of a run, or of an engine, brought to their steps is explained."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.cli.ranks import recorded_vectors
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import InvalidDocument
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner.records.observation import Observation, ObservedGraph, ObservedRole, ObservedVector
from capture_planner.records.spec import Limits
from capture_planner.report.plain import plain
from capture_planner.testing import plans
from support.commands import TINY_PLAN, Run
from support.strategies import vectors


def write(file: Path, text: str) -> str:
    file.write_text(text, "utf-8")
    return str(file)


@given(plans(max_reqs=16), st.data())
def test_vectors_of_a_report_are_read_as_they_were_submitted(tmp_path_factory, plan, data):
    """What a run writes of its replicas is what ``ranks`` explains, most frequent first."""
    pytest.importorskip("torch")
    from capture_planner_runner.report.run import RankRecord, VectorCount

    drawn = data.draw(st.lists(vectors(plan, max_ranks=4), min_size=1, max_size=4))
    # A run has no graph that only one rank lacks: that is dropped on all.
    kept = [each for each in drawn if each.joint() is not None and not any(rank.missing for rank in each.ranks)]
    counts = Counter(kept)
    record = RankRecord(
        rows=(),
        agreements=0,
        skews=(),
        vectors=tuple(
            VectorCount(
                role=each.role,
                batches=tuple(rank.batch for rank in each.ranks),
                captured=tuple(rank.captured for rank in each.ranks),
                steps=steps,
            )
            for each, steps in counts.items()
        ),
    )
    file = write(tmp_path_factory.mktemp("report") / "run.json", json.dumps({"ranks": plain(record)}))
    for role in {each.role for each in kept}:
        found = [vector for _, vector in recorded_vectors(file, Dispatcher(plan), role)]
        assert Counter(found) == Counter({each: 1 for each in counts if each.role is role})
        assert [counts[each] for each in found] == sorted((counts[each] for each in found), reverse=True)


@pytest.fixture
def observed(folder: Path) -> str:
    """Return the file of an observation with one vector of two ranks."""
    entry = Entry(mode=GraphMode.FULL, num_tokens=4, num_reqs=4, query_len=1)
    vector = ObservedVector(
        num_reqs=(1, 3),
        num_tokens=(1, 3),
        query_len=(1, 1),
        past_prompt=(True, True),
        modes=(GraphMode.FULL, GraphMode.FULL),
        steps=5,
        graph=0,
    )
    role = ObservedRole(role=Role.TARGET, mode=GraphMode.FULL, graphs=(ObservedGraph(entry=entry),), vectors=(vector,))
    observation = Observation(
        engine="vllm",
        engine_version="0.33.0",
        started="2026-11-23T00:00:00Z",
        model="tiny",
        limits=Limits(max_num_reqs=4, max_num_tokens=16),
        roles=(role,),
    )
    return write(folder / "observed.yaml", codec.dumps(observation))


def test_vectors_of_an_observation_are_explained(run: Run, observed: str):
    """With the steps, what the engine ran, and what this plan would run."""
    (case,) = run("ranks", TINY_PLAN, "--recorded", observed, "--format", "json").data["cases"]
    assert case["title"] == "in 5 steps, in which rank 0 of the engine replayed FULL 4 tokens, 4 requests of 1"
    assert [rank["runs"]["num_reqs"] for rank in case["ranks"]] == [1, 3]
    assert "rank 1 has 3 requests" in case["ranks"][0]["message"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"ranks": null}', "no vectors of target"),
        ('{"ranks": {"vectors": [{"steps": 1, "ranks": [1, 2]}]}}', "ranks.vectors[0].ranks[0]: expected"),
        ("version: 1", "engine: is missing"),
    ],
)
def test_files_without_vectors_are_refused(text: str, says: str, folder: Path):
    """With the place in the file."""
    dispatcher = Dispatcher(codec.load_plan(TINY_PLAN))
    with pytest.raises(InvalidDocument) as caught:
        recorded_vectors(write(folder / "file", text), dispatcher, Role.TARGET)
    assert says in str(caught.value)


def test_recorded_vectors_have_their_own_ranks(run: Run, observed: str):
    """No other option says how many ranks there are."""
    assert "--recorded has its own vectors" in run("ranks", TINY_PLAN, "--recorded", observed, "--ranks", "3").err
