"""Four hundred command lines, as TensorRT-LLM's own functions answered them (``record_tensorrt_llm.py``)."""

import itertools
import json
from pathlib import Path

import pytest

from capture_planner.engines.tensorrt_llm import ENGINE, agreed
from capture_planner.entry import Batch
from capture_planner.environment import Device, DeviceKind, Environment
from capture_planner.errors import FlagError
from capture_planner.modes import Role
from capture_planner.testing.engines import tensorrt_llm as drawn

RECORDED = json.loads((Path(__file__).parent / "golden" / "tensorrt_llm.json").read_text("utf-8"))
MACHINE = Environment(name="e", device=Device(kind=DeviceKind.CPU, name="c", memory=1))


def batch_of(question):
    """The batch that a question is about; where requests differ, one has one token more."""
    num_reqs, query_len, past_prompt = question
    tokens = num_reqs + 1 if query_len is None else num_reqs * query_len
    return Batch(
        role=Role.TARGET,
        num_reqs=num_reqs,
        num_tokens=tokens,
        query_len=query_len,
        past_prompt=past_prompt,
    )


def unpacked(runs):
    """The numbers of [first, count] runs."""
    return [first + i for first, count in runs for i in range(count)]


def requests(dispatch):
    """Requests of the graph that answers, 0 for none."""
    return 0 if dispatch.entry is None else dispatch.entry.num_reqs


@pytest.fixture
def emulated(tmp_path):
    """Emulate a case, its file written."""

    def emulate(case):
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(case.config), "utf-8")
        return ENGINE.emulate([*case.flags, "--config", str(file)], MACHINE)

    return emulate


def test_recorded_answers(emulated):
    """Sizes, graphs in their order, and each answer: alone, and over attention-DP ranks."""
    cases = itertools.islice(drawn.cases(RECORDED["seed"]), len(RECORDED["cases"]))
    for case, wanted in zip(cases, RECORDED["cases"], strict=True):
        if "refused" in wanted:
            with pytest.raises(FlagError, match="there is none"):
                emulated(case)
            continue
        emulation = emulated(case)
        assert list(emulation.sizes) == unpacked(wanted["sizes"]), case
        entries = [graph.entry for graph in emulation.graphs]
        shapes = {int(width): unpacked(sizes) for width, sizes in wanted["shapes"].items()}
        found = {}
        for entry in sorted(entries, key=lambda entry: entry.num_reqs):
            found.setdefault(entry.query_len, []).append(entry.num_reqs)
        assert found == shapes, case
        assert [[entry.num_reqs, entry.query_len] for entry in entries[:3]] == wanted["first"], case
        alone = [emulation.dispatch(batch_of(question)) for question in case.batches]
        assert [requests(answer) for answer in alone] == wanted["alone"], case
        for step, answers in zip(case.ranks, wanted["ranks"], strict=False):
            (manager,) = emulation.managers
            agreement = agreed(manager, [batch_of(question) for question in step])
            assert [requests(answer) for answer in agreement] == answers, (case, step)


def test_the_cases_reach_what_they_are_for():
    """Refusals, schedules, hits and misses, and ranks that agree and do not: each many times."""
    answers = [case for case in RECORDED["cases"] if "refused" not in case]
    assert len(answers) >= 300
    assert sum(len(case["shapes"]) > 1 for case in answers) >= 30
    alone = [answer for case in answers for answer in case["alone"]]
    assert min(sum(map(bool, alone)), alone.count(0)) >= 500
    ranks = [any(step) for case in answers for step in case["ranks"]]
    assert min(sum(ranks), ranks.count(False)) >= 30
