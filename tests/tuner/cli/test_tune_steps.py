"""tune of what has no steps: the error says what to do."""

from pathlib import Path

from capture_planner import codec
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate
from capture_planner.records._base import replace
from support.commands import Run
from support.observing import observation_of


def test_observation_without_steps_is_told_so(run: Run) -> None:
    """What the file lacks, and what to do."""
    seen = observation_of(emulate("vllm", ("Qwen/Qwen3-8B", "--max-num-seqs", "8"), find_environment("h200")))
    idle = (replace(role, batches=(), other_batches=0) for role in seen.roles)
    Path("seen.yaml").write_text(codec.dumps(replace(seen, roles=tuple(idle), device="NVIDIA H200")), "utf-8")
    ran = run("tune", "seen.yaml")
    assert ran.code == 1
    assert "error: seen.yaml" in ran.err
    assert "no steps; an observation has them once the engine has served requests: serve the usual load" in ran.err
