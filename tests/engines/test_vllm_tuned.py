"""The benchmark of the whole loop, with processes that answer as its worker does: plans, predictions, targets."""

import json

import pytest
import vllm_in_process
import vllm_tuned

from capture_planner import codec
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Entry
from capture_planner.records.model import Method, Speculative
from capture_planner.records.observation import BatchCount, Observation, ObservedGraph, ObservedRole
from capture_planner.records.spec import Limits

WORKER = """
import json, os, sys
sys.stdin.readline()
plan = "CAPTURE_PLANNER_PLAN" in os.environ
roles = ("target", "draft_prefill", "draft_decode")
facts = {"graphs": dict.fromkeys(roles, 10 if plan else 66)}
print(json.dumps({"facts": facts}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "observation" in request:
        answer = {"observation": open(OBSERVATION, encoding="utf-8").read()}
    else:
        answer = {"requests": len(request["trace"]), "tokens_per_second": 100 if plan else 100 / SHARE, "steps": {}}
    print(json.dumps(answer), flush=True)
"""


def observed_role(role, sizes, query_len, milliseconds):
    """A role with a graph of each size in requests, which ran ten times, and one eager batch with a prompt."""
    graphs = [
        ObservedGraph(
            entry=Entry(mode=GraphMode.FULL, num_tokens=size * query_len, num_reqs=size, query_len=query_len),
            seconds=0.02,
            mib=3.0,
            milliseconds=milliseconds * (1 + size / 128),
            replays=10,
        )
        for size in reversed(sizes)
    ]
    batches = [
        BatchCount(
            num_reqs=graph.entry.num_reqs,
            num_tokens=graph.entry.num_tokens,
            query_len=query_len,
            steps=10,
            graph=index,
            milliseconds=graph.milliseconds,
            samples=3,
        )
        for index, graph in enumerate(graphs)
    ]
    if role is not Role.DRAFT_DECODE:
        eager = {"num_reqs": 3, "num_tokens": 300, "past_prompt": False, "reason": Reason.MODE}
        batches.append(BatchCount(**eager, steps=10, milliseconds=milliseconds * 8, samples=3))
    return ObservedRole(role=role, mode=GraphMode.FULL_DECODE_ONLY, graphs=tuple(graphs), batches=tuple(batches))


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
OBSERVATION = Observation(
    engine="vllm",
    engine_version="0.33.0",
    device="NVIDIA H200",
    started="2026-11-22T12:00:00Z",
    model="m",
    limits=Limits(max_num_reqs=256, max_num_tokens=8192),
    speculative=Speculative(method=Method.EAGLE3, num_tokens=3),
    capture_seconds=1.0,
    graph_mib=100.0,
    roles=(
        observed_role(Role.TARGET, SIZES, 4, 2.0),
        observed_role(Role.DRAFT_PREFILL, SIZES, 4, 0.2),
        observed_role(Role.DRAFT_DECODE, SIZES, 1, 0.1),
    ),
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the benchmark with such workers, and returns its exit code and file."""

    def called(*words, share=1.0):
        observation, result = tmp_path / "given.yaml", tmp_path / "result.json"
        observation.write_text(codec.dumps(OBSERVATION), encoding="utf-8")
        (tmp_path / "worker.py").write_text(f"OBSERVATION, SHARE = {str(observation)!r}, {share}\n" + WORKER, "utf-8")
        monkeypatch.setattr(vllm_in_process, "WORKER", tmp_path / "worker.py")
        code = vllm_tuned.main([*words, "--output", str(result), "--folder", str(tmp_path / "folder")])
        return code, json.loads(result.read_text("utf-8"))

    return called


def test_the_loop_predicts_the_steps_that_it_observed(run):
    """The load's batches have sizes of their own in both tables, so both take what was observed."""
    code, file = run("--rounds", "2", "--seconds", "1")
    assert file["results"]["predicted_ms"] == pytest.approx(file["results"]["measured_ms"], rel=0.05)
    assert sum(map(len, file["results"]["sizes"].values())) <= 32
    assert all(file["targets"].values()), file["targets"]
    assert code == 0


def test_a_slower_plan_is_a_missed_target(run):
    code, file = run("--rounds", "1", "--seconds", "1", share=0.97)
    assert [met for text, met in file["targets"].items() if "throughput" in text] == [False]
    assert code == 1


def test_a_trace_is_served_at_a_pace(tmp_path):
    """The first seconds of it, at most as long as the model's context."""
    file = tmp_path / "trace.csv"
    file.write_text("t,in_len,out_len\n5,10,20\n20,9000,9000\n65,30,40\n", encoding="utf-8")
    assert vllm_tuned.trace_of(file, 2.0, 10.0) == [(0.0, 10, 20), (1.5, 2000, 1500)]
