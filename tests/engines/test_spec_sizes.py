"""spec: a command line as a spec whose plan captures the engine's graphs, and leads back to the same line."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import load_backends, load_spec, plan
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, find_engine
from capture_planner.engines.spec_of import DerivedSpec, graphs_of, spec_of, with_sizes
from capture_planner.records.plan import Plan
from support.commands import Run
from support.examples import at_most
from support.tuning import MODEL

H200 = find_environment("h200")
BACKENDS = load_backends()
EAGLE = json.dumps({"method": "eagle3", "model": "my/drafter", "num_speculative_tokens": 3})
TREE = (
    "--speculative-algorithm EAGLE --speculative-num-draft-tokens 4 --speculative-num-steps 3 "
    "--speculative-eagle-topk 1"
)
VLLM = st.tuples(
    st.sampled_from([[], ["--speculative-config", EAGLE], ["--enable-lora", "--max-loras", "2"]]),
    st.sampled_from(
        [[], ["-cc.cudagraph_mode=PIECEWISE"], ["-cc.cudagraph_mode=FULL_DECODE_ONLY"], ["--enforce-eager"]]
    ),
    st.sampled_from([[], ["--cudagraph-capture-sizes", "4", "20", "100"], ["--max-cudagraph-capture-size", "64"]]),
    st.integers(1, 200).map(lambda count: ["--max-num-seqs", str(count)]),
)
SGLANG = st.tuples(
    st.sampled_from([[], TREE.split()]),
    st.sampled_from([[], ["--cuda-graph-bs-decode", "3", "9"], ["--cuda-graph-max-bs-decode", "24"]]),
    st.sampled_from([[], ["--cuda-graph-backend-prefill", "disabled"], ["--cuda-graph-max-bs-prefill", "64"]]),
    st.integers(1, 64).map(lambda count: ["--max-running-requests", str(count)]),
)
TENSORRT_LLM = st.tuples(st.integers(1, 300).map(lambda count: ["--max_batch_size", str(count)]))
LINES = st.one_of(
    VLLM.map(lambda parts: ("vllm", ["Qwen/Qwen3-8B", *chain(*parts)])),
    SGLANG.map(lambda parts: ("sglang", ["--model-path", "Qwen/Qwen3-8B", *chain(*parts)])),
    TENSORRT_LLM.map(lambda parts: ("tensorrt-llm", ["Qwen/Qwen3-8B", *chain(*parts)])),
)


def planned(engine: str, flags: list[str]) -> tuple[DerivedSpec, Plan]:
    """Return the spec of a line, and its plan."""
    emulation = emulate(engine, flags, H200)
    base = spec_of(emulation, find_engine(engine), MODEL)
    derived = with_sizes(base, emulation, lambda spec: plan(spec, H200, BACKENDS))
    return derived, plan(derived.spec, H200, BACKENDS)


@at_most(25)
@given(LINES)
def test_a_line_leads_to_its_spec_and_back(line) -> None:
    """The plan has the engine's graphs, and so has the engine with the flags that the plan is exported to."""
    engine, flags = line
    theirs = graphs_of(emulate(engine, flags, H200))
    derived, own = planned(engine, flags)
    differs = [each for each in derived.assumptions if each.startswith("its plan")]
    ours = {(role.role, entry) for role in own.roles for entry in role.entries}
    assert (ours == theirs) is (not differs)
    if not differs and engine != "tensorrt-llm":
        words = [word.replace("DRAFT_MODEL", "my/drafter") for word in find_engine(engine).export(own).flags]
        assert graphs_of(emulate(engine, words, H200)) == theirs


def test_what_a_plan_has_otherwise_is_said() -> None:
    """Graphs of a schedule that no batch reaches: a plan leaves them out."""
    drafts = {"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 16, 2], [17, 256, 1]]}
    config = json.dumps({"method": "eagle3", "model": "my/drafter"} | drafts)
    derived, _ = planned("vllm", ["Qwen/Qwen3-8B", "--max-num-seqs", "256", "--speculative-config", config])
    assert "its plan leaves out 136 graphs of vllm's 350" in " ".join(derived.assumptions)


@pytest.mark.parametrize("way", ["file", "printed", "json"])
def test_the_command_writes_what_the_others_read(call: Run, tmp_path: Path, way: str) -> None:
    """A pasted line becomes a file; plan, export and tune take it, and it says where it comes from."""
    line = "docker run vllm/vllm-openai:v0.33.0 Qwen/Qwen3-8B --max-num-seqs 16"
    file = tmp_path / "spec.yaml"
    arguments = ["spec", "vllm", line, "-e", "h200", *(["-o", str(file)] if way == "file" else [])]
    ran = call(*arguments, *(["--format", "json"] if way == "json" else []))
    assert ran.code == 0
    if way == "printed":
        file.write_text(ran.out, "utf-8")
        assert ran.out.startswith("# from the command line of vllm 0.33.0 on h200\n")
    if way == "json":
        assert set(ran.data) == {"assumptions", "spec"}
        file.write_text(json.dumps(ran.data["spec"]), "utf-8")
    assert load_spec(file).limits.max_num_reqs == 16
    assert call("plan", str(file), "-e", "h200").code == 0
    assert "--max-num-seqs 16" in call("export", str(file), "--to", "vllm", "-e", "h200").out
