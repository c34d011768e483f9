"""Batches that an engine cannot be sent: said beside the answer, which stays the engine's own."""

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.analysis.arrivals import simulate
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate
from capture_planner.engines.deployments import walk, why_inadmissible
from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import is_admissible
from capture_planner_tuner.side_by_side import compare

H100 = find_environment("h100")
EAGLE = (
    '{"method": "eagle3", "model": "x/y", "num_speculative_tokens": 3, '
    '"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 12, 1]]}'
)
LORA = ["--max-num-seqs", "12", "--max-num-batched-tokens", "64", "--enable-lora", "--max-loras", "2"]
SGLANG = ["--max-running-requests", "12", "--chunked-prefill-size", "64", "--max-prefill-tokens", "64"]
DRAFTS = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk"
DFLASH = (
    '{"method": "dflash", "model": "x/y", "num_speculative_tokens": 3, '
    '"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 10, 1], [11, 12, 0]]}'
)
LINES = (
    ("vllm", [*LORA[:4], "--speculative-config", EAGLE]),
    ("vllm", [*LORA[:4], "--speculative-config", DFLASH]),
    ("vllm", [*LORA, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']),
    ("vllm", LORA),
    ("sglang", SGLANG),
    ("sglang", [*SGLANG, *DRAFTS.split(), "1", "--speculative-num-draft-tokens", "4"]),
    ("sglang", [*SGLANG, *DRAFTS.split(), "4", "--speculative-num-draft-tokens", "8"]),
    ("sglang", [*SGLANG, "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"]),
    ("tensorrt-llm", ["--max_batch_size", "12", "--max_num_tokens", "64"]),
)


@attrs.frozen
class Request:
    """A request of a trace."""

    arrival: float
    prompt: int
    output: int


EMULATIONS = [emulate(name, words, H100) for name, words in LINES]


@pytest.mark.parametrize("emulation", EMULATIONS, ids=lambda each: each.engine)
def test_walked_batches_can_be_sent(emulation):
    """No batch of the walk over all admissible batches is said to be impossible."""
    walked = walk(emulation)
    assert walked
    assert {why_inadmissible(asked.batch, emulation) for asked in walked} == {None}


@pytest.mark.parametrize("emulation", EMULATIONS, ids=lambda each: each.engine)
def test_walked_decodes_have_captured_query_lengths(emulation):
    """What is walked of a role has a width that its decode graphs are captured for, and is answered."""
    for manager in emulation.managers:
        asked = [one for one in walk(emulation) if one.batch.role is manager.role]
        widths = {graph.entry.query_len for graph in manager.graphs} - {None}
        assert not widths or widths & {one.batch.query_len for one in asked}
        if manager.role is Role.DRAFT_DECODE:
            assert all(one.answer.entry is not None for one in asked if one.best is not None)
            assert bool(asked) == bool(manager.graphs)


REQUESTS = [Request(arrival=n / 50, prompt=5 * n + 1, output=8) for n in range(30)]


@pytest.mark.parametrize("emulation", EMULATIONS, ids=lambda each: each.engine)
def test_trace_has_admissible_decodes_only(emulation):
    """Each role's decodes over a trace are among those of the whole space."""
    counts = simulate(REQUESTS, emulation.limits, emulation.speculative, lambda batch: 20.0).counts
    families = [
        {pair.family for pair in compare(emulation, emulation, steps).families if pair.a is not None}
        for steps in (None, (counts, counts))
    ]
    assert {family for family in families[1] if family.kind is Kind.DECODE} <= families[0]
    drafted = [{f.role for f in each if f.role is Role.DRAFT_DECODE} for each in families]
    assert drafted[0] == drafted[1]


@given(
    st.sampled_from(EMULATIONS),
    st.sampled_from((Role.TARGET, Role.DRAFT_PREFILL, Role.DRAFT_DECODE)),
    st.integers(0, 14),
    st.integers(0, 66),
    st.none() | st.integers(0, 6),
    st.booleans(),
    st.integers(0, 4),
    st.booleans(),
)
def test_batches_beyond_the_limits_cannot_be_sent(emulation, role, reqs, tokens, width, past, loras, fits):
    """As for a plan, and a width that does not fit besides; one said to be impossible is not admissible."""
    if fits and width is not None:
        tokens = reqs * width
    batch = Batch(role=role, num_reqs=reqs, num_tokens=tokens, query_len=width, past_prompt=past, active_loras=loras)
    never = why_inadmissible(batch, emulation)
    admissible = is_admissible(batch, emulation, emulation.families(role))
    contradicts = width is not None and reqs * width != tokens
    if role is Role.DRAFT_DECODE:
        assert never is None or not admissible or contradicts
    else:
        assert (never is None) == (admissible and not contradicts)


def test_sglang_draft_decodes_have_a_token_for_each_branch():
    """SGLang's have a token for each branch, which no plan has; they can be sent."""
    words = [*SGLANG, *DRAFTS.split(), "4", "--speculative-num-draft-tokens", "8"]
    emulation = emulate("sglang", words, H100)
    batch = Batch(role=Role.DRAFT_DECODE, num_reqs=2, num_tokens=8, query_len=4)
    assert emulation.dispatch(batch).entry is not None
    assert why_inadmissible(batch, emulation) is None
    assert "prompt" in why_inadmissible(attrs.evolve(batch, past_prompt=False), emulation)


def test_schedule_of_one_draft_token_has_no_draft_decode():
    """With one draft token for a batch size there is no draft decode."""
    for reqs, sent in ((4, True), (5, False)):
        batch = Batch(role=Role.DRAFT_DECODE, num_reqs=reqs, num_tokens=reqs, query_len=1)
        assert (why_inadmissible(batch, EMULATIONS[0]) is None) == sent


def test_sglang_prompt_without_chunks_may_exceed_the_batch():
    """SGLang takes one such prompt by itself, and no two of them."""
    words = ["--max-running-requests", "12", "--chunked-prefill-size", "-1", "--max-prefill-tokens", "64"]
    emulation = emulate("sglang", words, H100)
    for reqs, sent in ((1, True), (2, False)):
        batch = Batch(role=Role.TARGET, num_reqs=reqs, num_tokens=100, past_prompt=False)
        assert (why_inadmissible(batch, emulation) is None) == sent


def test_answer_of_an_impossible_batch_has_the_not_admissible_key(call, tmp_path):
    """The answer of an impossible batch has one key more; that of any other is as it was."""
    possible = [{"role": "target", "num_reqs": 4, "num_tokens": 8, "query_len": 2}]
    impossible = [
        {"role": "target", "num_reqs": 9, "num_tokens": 3},
        {"role": "target", "num_reqs": 4, "num_tokens": 9, "query_len": 2},
        {"role": "target", "num_reqs": 4, "num_tokens": 65},
        {"role": "target", "num_reqs": 13, "num_tokens": 13},
    ]
    file = tmp_path / "batches.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in (*possible, *impossible)), "utf-8")
    ran = call("engine", "vllm", *LORA[:4], "--environment", "h100", "--batches", str(file))
    keys = ["mode", "num_tokens", "num_reqs", "query_len", "max_query_len", "active_loras", "reason"]
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert [list(answer) for answer in answers] == [keys] + 4 * [[*keys, "not_admissible"]]
    said = [answer["not_admissible"] for answer in answers[1:]]
    assert said == [
        "9 requests have at least 9 tokens, not 3",
        "4 requests of 2 tokens have 8, not 9",
        "65 tokens, and a batch has at most 64",
        "13 requests, and at most 12 run together",
    ]
