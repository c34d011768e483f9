"""The command that starts an engine under a plan: what contradicts the plan is left out, or it is refused."""

from __future__ import annotations

from capture_planner import load_backends, plan
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import find_engine
from capture_planner.records._base import replace
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Spec
from capture_planner_tuner.launch_line import launch_line
from support.tuning import MODEL

SPEC = Spec(model=MODEL, limits=Limits(max_num_reqs=12, max_num_tokens=40), backend="flash_attention")
DRAFTS = Speculative(method=Method.EAGLE3, num_tokens=2)


def planned(spec: Spec) -> Plan:
    """Return the plan of a spec on an H200."""
    return plan(spec, find_environment("h200"), load_backends())


def test_launch_lines_leave_out_what_contradicts_the_plan() -> None:
    """VLLM's own list of sizes is dropped with all its values, and the line says so; the rest stays."""
    spec = SPEC
    words = ["Qwen/Qwen3-8B", "--cudagraph-capture-sizes", "1", "2", "4", "--max-num-seqs", "12"]
    words += ["--max-num-batched-tokens", "40"]
    line = launch_line(find_engine("vllm"), planned(spec), words, "plan.yaml")
    assert line.command is not None
    assert "capture-sizes" not in line.command
    assert line.command.endswith("-- vllm serve Qwen/Qwen3-8B --max-num-seqs 12 --max-num-batched-tokens 40")
    assert any("--cudagraph-capture-sizes" in note for note in line.notes)


def test_launch_lines_keep_the_model_behind_a_switch() -> None:
    """The model was dropped with ``--enforce-eager``, as if it were its value."""
    words = ["--enforce-eager", "my/folder", "--max-num-seqs", "12", "--max-num-batched-tokens", "40"]
    line = launch_line(find_engine("vllm"), planned(SPEC), words, "plan.yaml")
    assert line.command is not None
    assert line.command.endswith("-- vllm serve my/folder --max-num-seqs 12 --max-num-batched-tokens 40")


def test_launch_lines_are_absent_where_launch_would_refuse() -> None:
    """A plan of other draft lengths cannot be launched with these flags, and each reason is given."""
    config = '{"method":"eagle3","model":"my/drafter","num_speculative_tokens":5}'
    words = ["Qwen/Qwen3-8B", "--speculative-config", config]
    line = launch_line(find_engine("vllm"), planned(replace(SPEC, speculative=DRAFTS)), words, "plan.yaml")
    assert line.command is None
    assert any("num_speculative_tokens" in note for note in line.notes)
