"""SGLang's families of models and microbatches, from lines that people run."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.engines.check import check
from capture_planner.engines.emulation import Emulation
from capture_planner.errors import FlagError, NotEmulated
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch
from capture_planner_sglang.emulation.engine import emulate
from engines.generators import sglang as drawing

H100 = drawing.environment("h100")
EAGLE = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
OVERLAP = "--tp-size 8 --moe-a2a-backend deepep --enable-two-batch-overlap --max-running-requests 64"


def of(line: str, machine: str = "h100") -> Emulation:
    return emulate(shlex.split(line), drawing.environment(machine))


def settings(emulation: Emulation) -> dict[str, object]:
    return {setting.name: setting.value for setting in emulation.settings}


def test_qwen3_vl_has_no_prefill_graphs() -> None:
    """It was answered with 58 of them by its name; asked for, they are captured."""
    line = "--model Qwen/Qwen3-VL-235B-A22B-Instruct --tp 8"
    assert of(line).modes == {Role.TARGET: GraphMode.FULL_DECODE_ONLY}
    assert not of(line).assumptions
    asked = of(f"{line} --cuda-graph-backend-prefill breakable")
    assert asked.modes == {Role.TARGET: GraphMode.FULL_AND_PIECEWISE}


@pytest.mark.parametrize(("machine", "largest"), [("h100", 400), ("b200", 400), ("a100-40", 32)])
def test_qwen3_vl_on_hopper_has_decode_graphs_for_its_requests(machine: str, largest: int) -> None:
    """Elsewhere they end at the default for the memory."""
    found = of("--model Qwen/Qwen3-VL-8B-Instruct --max-running-requests 400", machine)
    assert found.sizes[-1] == largest


@pytest.mark.parametrize("flags", ["", EAGLE])
def test_hybrid_says_what_its_requests_rest_on(flags: str) -> None:
    """Memory decides how many states fit, unless a flag does; that is the first line of the answer."""
    line = f"--model Qwen/Qwen3-Coder-Next --tp 2 {flags}"
    (assumed,) = of(line).assumptions
    assert "states of linear attention are assumed to fit" in assumed
    assert not of(f"{line} --max-mamba-cache-size 1000").assumptions
    assert not of(f"{line} --disable-radix-cache --max-running-requests 8").assumptions


@given(slots=st.integers(1, 400), groups=st.sampled_from([1, 2, 4]), shared=st.booleans(), overlap=st.booleans())
def test_states_bound_the_requests(slots: int, groups: int, shared: bool, overlap: bool) -> None:
    """A request has a slot, three where prefixes are shared, and two more to track them, one without the overlap."""
    flags = ["--tp-size", "4", "--attn-dp-size", str(groups), "--max-mamba-cache-size", str(slots)]
    flags += ["--mamba-radix-cache-strategy", "extra_buffer"] * shared + ["--disable-radix-cache"] * (not shared)
    flags += ["--disable-overlap-schedule"] * (not overlap)
    fitting = slots // groups // ((5 if overlap else 4) if shared else 1)
    command = ["--model-path", "Qwen/Qwen3-Coder-Next", *flags]
    if fitting < 1:
        with pytest.raises(FlagError, match="max-mamba-cache-size"):
            emulate(command, H100)
    else:
        assert settings(emulate(command, H100))["request_pool"] == fitting


def test_sparse_attention_is_emulated() -> None:
    """DeepSeek V3.2 and GLM-5 run on dsa with pages of 64, and draft from their own checkpoint."""
    for name in ("deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5-FP8"):
        found = of(f"--model {name} --tp 8 {EAGLE}")
        assert (settings(found)["attention_backend"], settings(found)["page_size"]) == ("dsa", 64)
        assert found.modes[Role.DRAFT_PREFILL] is GraphMode.FULL_DECODE_ONLY


def test_deepep_aligns_prefills_and_has_no_graphs_in_normal_mode() -> None:
    """Its prefill graphs are multiples of 8 up to 2048 tokens."""
    line = "--model deepseek-ai/DeepSeek-V3 --tp 8 --moe-a2a-backend deepep --max-running-requests 128"
    found = of(line)
    prefills = [graph.entry.num_tokens for graph in found.graphs if graph.entry.query_len is None]
    assert prefills
    assert max(prefills) == 2048
    assert not any(tokens % 8 for tokens in prefills)
    assert not of(f"{line} --deepep-mode normal").graphs
    assert not found.assumptions
    (assumed,) = of(line.replace("requests 128", "requests 2048 --attn-dp-size 8 --moe-dense-tp-size 1")).assumptions
    assert "DeepEP itself stops above 128 tokens of a rank" in assumed
    variable = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=1024"
    assert not of(f"{variable} {line}").assumptions


def test_graphs_of_overlapping_microbatches() -> None:
    """Each decode graph is of two halves, and its requests are even; a drafter's graphs are of whole batches."""
    found = of(f"--model deepseek-ai/DeepSeek-V3 {OVERLAP} {EAGLE}")
    halves = {role: {g.microbatches for g in found.graphs if g.role is role} for role in found.modes}
    assert halves == {Role.TARGET: {2}, Role.DRAFT_PREFILL: {1}, Role.DRAFT_DECODE: {1}}
    assert all(graph.entry.num_reqs % 16 == 0 for graph in found.graphs if graph.entry.num_reqs)
    assert "overlap-prefill" in {decision.rule for decision in found.decisions}


def test_microbatches_without_agreement_of_ranks_run_eager() -> None:
    """Graphs are captured and never replayed: the scheduler asks no rank; check says so (EN008)."""
    line = shlex.split(f"--model zai-org/GLM-4.5 {OVERLAP} --disable-attn-tp-gather")
    found = emulate(line, H100)
    batch = Batch(role=Role.TARGET, num_reqs=8, num_tokens=8, query_len=1)
    assert found.graphs
    assert found.dispatch(batch).reason is Reason.SPLIT
    codes = {finding.rule.code for finding in check(found)}
    assert "EN008" in codes
    line.remove("--disable-attn-tp-gather")
    assert emulate(line, H100).dispatch(batch).entry is not None


def test_encoder_is_captured_while_it_serves() -> None:
    """No graph of it at start-up; where SGLang's class has none, or its attention none, the line is refused."""
    on = "SGLANG_VIT_ENABLE_CUDA_GRAPH=1"
    rules = {decision.rule for decision in of(f"{on} --model Qwen/Qwen3-VL-8B-Instruct").decisions}
    assert "encoder-while-serving" in rules
    assert "EN009" in {finding.rule.code for finding in check(of(f"{on} --model Qwen/Qwen3-VL-8B-Instruct"))}
    with pytest.raises(NotEmulated, match="graphs of the encoder of a KimiK25"):
        of(f"{on} --model moonshotai/Kimi-K2.5")
    with pytest.raises(FlagError, match="stops at the first image"):
        of(f"{on} --model Qwen/Qwen3-VL-8B-Instruct --mm-attention-backend sdpa")
    assert of(f"{on} --model Qwen/Qwen3-8B").graphs == of("--model Qwen/Qwen3-8B").graphs


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--speculative-draft-attention-backend fa3", "needs SM80 to SM90"),
        ("--speculative-draft-attention-backend flashmla", "may take flashmla"),
        ("--attention-backend torch_native", "drafts on no torch_native"),
    ],
)
def test_backends_of_drafters_are_judged(flags: str, says: str) -> None:
    """A drafter's own backend is read, and refused where SGLang does or where its graphs are not emulated."""
    with pytest.raises(FlagError, match=says):
        of(f"--model Qwen/Qwen3-8B --speculative-draft-model-path Qwen/Qwen3-0.6B {EAGLE} {flags}", "b200")
    own = of(f"--model Qwen/Qwen3-8B {EAGLE} --speculative-draft-attention-backend trtllm_mha")
    assert settings(own)["page_size"] == 64


def test_lengths_are_overridden_as_if_the_file_had_them() -> None:
    """``--json-model-override-args`` of lengths, with YaRN's own; other fields are not emulated."""
    flag, fields = "--json-model-override-args", {"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn"}}
    words = ["--model-path", "Qwen/Qwen3-8B", "--context-length", "513"]
    emulate(words, drawing.environment("h100"))
    with pytest.raises(FlagError, match="over the model's own 512"):
        emulate([*words, flag, json.dumps(fields)], drawing.environment("h100"))
    with pytest.raises(NotEmulated, match="not emulated"):
        emulate([*words, flag, '{"num_experts": 8}'], drawing.environment("h100"))
    with pytest.raises(FlagError, match="reads JSON"):
        emulate([*words, flag, "{"], drawing.environment("h100"))


@pytest.mark.parametrize(
    ("machine", "flags", "error"),
    [
        ("h100", ["flashinfer"], None),
        ("b200", ["triton"], None),
        ("b200", ["flashinfer", "--mamba-ssm-dtype", "bfloat16"], None),
        ("b200", ["flashinfer"], "bfloat16"),
        ("h100", ["flashkda"], "prefills only"),
    ],
)
def test_kernels_of_linear_attention_in_decodes_change_no_graph(machine, flags, error) -> None:
    """SGLang stops where they cannot run."""
    words, environment = (
        ["--model-path", "Qwen/Qwen3-Next-80B-A3B-Instruct", "--tp-size", "4"],
        drawing.environment(machine),
    )
    given = [*words, "--linear-attn-decode-backend", *flags]
    with nullcontext() if error is None else pytest.raises(FlagError, match=error):
        assert emulate(given, environment).graphs == emulate(words, environment).graphs


def test_megamoe_and_kept_states_are_followed_where_flags_alone_decide() -> None:
    """Its decode graphs are DeepEP's; whether it starts is the model's to decide."""
    words = ["--model-path", "deepseek-ai/DeepSeek-V4-Pro", "--tp-size", "8", "--cuda-graph-max-bs-decode", "64"]
    words += ["--enable-dp-attention", "--dp-size", "8", "--moe-dense-tp-size", "1", "--enable-dp-lm-head"]
    words += ["--mamba-radix-cache-strategy", "extra_buffer"]
    answers = [
        emulate([*words, "--moe-a2a-backend", name], drawing.environment("b200")) for name in ("megamoe", "deepep")
    ]
    decodes = [[graph for graph in each.graphs if not graph.prompts_only] for each in answers]
    assert answers[0].by_flags
    assert decodes[0] == decodes[1]
    with pytest.raises(NotEmulated, match="megamoe"):
        emulate(["--model-path", "Qwen/Qwen3-30B-A3B", "--moe-a2a-backend", "megamoe"], drawing.environment("b200"))
