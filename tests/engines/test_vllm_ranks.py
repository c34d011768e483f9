"""How the data-parallel ranks of vLLM's model runner V1 agree, and what overlap of batches does."""

import re

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from capture_planner.codec.shipped import find_environment
from capture_planner.engines.check import check
from capture_planner.errors import FlagError, NotEmulated
from capture_planner.modes import GraphMode, Role
from capture_planner_vllm.emulation.engine import emulate, resolve
from capture_planner_vllm.emulation.legacy import PaddedManager
from capture_planner_vllm.emulation.managers import managers
from capture_planner_vllm.emulation.settings import DrafterKind, RunnerVersion
from engines.generators import vllm_managers as cases
from engines.generators import vllm_ranks
from support.examples import at_most

H100 = find_environment("h100")
OVERLAP = ("--enable-dbo", "--all2all-backend", "deepep_low_latency")


@given(st.integers(0, 10**6))
def test_legacy_ranks_agree(seed):
    """All ranks run the least of their modes; with a graph, all have the rows of the largest."""
    case = cases.case(5, seed)
    found = managers(case.configuration.settings)
    assume(isinstance(found[0], PaddedManager))
    for manager in found:
        for step in case.steps:
            batches = [
                cases.as_batch(manager.role, rows, loras) if rows else vllm_ranks.legacy_idle(manager)
                for rows, loras in step
            ]
            alone = [manager.dispatch(batch) for batch in batches]
            answers = vllm_ranks.legacy(manager, batches)
            rows = [batch.num_tokens + answer.padded_tokens for batch, answer in zip(batches, answers, strict=True)]
            own = [batch.num_tokens + answer.padded_tokens for batch, answer in zip(batches, alone, strict=True)]
            assert {answer.mode for answer in answers} == {min((one.mode for one in alone), key=_rank)}
            assert rows == (own if answers[0].entry is None else [max(own)] * len(own))
            assert vllm_ranks.legacy(manager, batches[:1]) == (alone[0],)


def _rank(mode):
    return (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL).index(mode)


def test_overlap_on_one_rank_changes_nothing():
    """On one data-parallel rank overlap changes the runner and no graph of it, and a decision says so."""
    plain = emulate(["VLLM_USE_V2_MODEL_RUNNER=0", "m"], H100)
    found = emulate(["m", *OVERLAP], H100)
    assert found.graphs == plain.graphs
    assert "overlap" in {decision.rule for decision in found.decisions}


@pytest.mark.parametrize(
    "flags", [["-cc.cudagraph_mode=FULL", "--attention-backend", "FLASH_ATTN"], ["--enable-lora"]], ids=["full", "lora"]
)
def test_overlap_of_v1_with_graphs_made_while_it_serves_is_not_emulated(flags):
    """V1 keeps one graph of microbatches a size, and captures those of FULL mixed batches when it meets them."""
    words = ["VLLM_USE_V2_MODEL_RUNNER=0", "m", "-dp", "2", *OVERLAP, *flags]
    assert resolve(words, H100)[0].sizes
    with pytest.raises(NotEmulated, match="V1"):
        emulate(words, H100)
    assert emulate([*words, "--enforce-eager"], H100).graphs == ()


@at_most(30)
@given(
    st.sampled_from(["0", "1"]),
    st.integers(2, 80),
    st.integers(2, 300),
    st.sampled_from(["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"]),
    st.integers(1, 100),
)
def test_following_en008_removes_it(runner, decodes, prompts, mode, seqs):
    """Its thresholds, given word for word, leave no batch without a graph that is captured."""
    words = [f"VLLM_USE_V2_MODEL_RUNNER={runner}", "m", "-dp", "2", *OVERLAP, f"-cc.cudagraph_mode={mode}"]
    words += ["--max-num-seqs", str(seqs), "--max-num-batched-tokens", "2048"]
    words += ["--dbo-decode-token-threshold", str(decodes), "--dbo-prefill-token-threshold", str(prompts)]
    found = [each for each in check(emulate(words, H100)) if each.rule.code == "EN008"]
    for each in found:
        for flag, tokens in re.findall(r"(--dbo-[a-z-]+) (\d+)", each.fix):
            words += [flag, tokens]
    assert [each for each in check(emulate(words, H100)) if each.rule.code == "EN008"] == []
    event(f"{len(found)} findings")


def test_thresholds_below_the_microbatches_are_refused():
    """A batch has at least one token for each of its parts."""
    for flag in ("--dbo-decode-token-threshold", "--dbo-prefill-token-threshold"):
        with pytest.raises(FlagError, match="2 microbatches"):
            resolve(["m", *OVERLAP, flag, "1"], H100)
        assert resolve(["m", flag, "1"], H100)[0].overlap is None


def test_negative_ubatch_size_is_refused():
    """A batch has no negative number of parts; 0 and 1 split nothing."""
    with pytest.raises(FlagError):
        resolve(["m", "--ubatch-size", "-1"], H100)
    assert resolve(["m", "--ubatch-size", "1"], H100)[0] == resolve(["m"], H100)[0]


def test_idle_rank_counts_as_a_decode():
    """A rank without work stands for one decode of full width in each pass."""
    drawn = cases.Configuration(
        runner=RunnerVersion.V1,
        mode=GraphMode.PIECEWISE,
        sizes=(4, 8),
        max_size=8,
        max_num_seqs=2,
        num_speculative_tokens=3,
        drafter=DrafterKind.CHAIN,
    )
    found = managers(drawn.settings)
    idle = {manager.role: vllm_ranks.legacy_idle(manager).num_tokens for manager in found}
    assert idle == {Role.TARGET: 4, Role.DRAFT_PREFILL: 4, Role.DRAFT_DECODE: 4}
