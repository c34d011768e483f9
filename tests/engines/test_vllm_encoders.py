"""Graphs of encoders in vLLM: budgets, what they serve, and what is said where there are none."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.codec.shipped import find_environment
from capture_planner.engines.check import check
from capture_planner.errors import FlagError, NotEmulated
from capture_planner_vllm.emulation.encoder_budgets import LEAST, encoders
from capture_planner_vllm.emulation.engine import emulate
from capture_planner_vllm.emulation.tables import names

H100 = find_environment("h100")
VISION, TEXT = "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-8B"
SOME = ("--max-num-seqs", "2", "--max-num-batched-tokens")


def emulated(*words, model=VISION, tokens=4096, **parts):
    """Return the emulation with graphs of the encoder."""
    asked = ["-cc", json.dumps({"cudagraph_mm_encoder": True, **parts})]
    return emulate([model, *SOME, str(tokens), *asked, *words], H100)


@given(st.integers(LEAST, 20_000), st.integers(1, 300), st.data())
def test_images_run_on_the_least_budget_that_holds_them(tokens, items, data):
    """By default budgets double up to the longest batch, and each takes as many images as the least has tokens."""
    (encoder,) = emulated(tokens=tokens).encoders
    assert encoder.budgets[0] == LEAST
    assert encoder.budgets[-1] == encoder.reach == tokens
    assert all(larger <= 2 * smaller for smaller, larger in zip(encoder.budgets, encoder.budgets[1:], strict=False))
    size = data.draw(st.integers(1, tokens + 10))
    fitting = [budget for budget in encoder.budgets if budget >= size and items <= encoder.max_items]
    assert encoder.budget(size, items) == (fitting[0] if fitting else None)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=4), st.integers(0, 64))
def test_following_en009_removes_it(budgets, items):
    """Its budgets, given word for word, leave no image without a graph."""
    assume(items <= min(budgets))
    parts = {"encoder_cudagraph_token_budgets": budgets}
    parts |= {"encoder_cudagraph_max_vision_items_per_batch": items} if items else {}
    found = [each for each in check(emulated(**parts)) if each.rule.code == "EN009"]
    assert bool(found) == (max(budgets) < 4096)
    for each in found:
        parts["encoder_cudagraph_token_budgets"] = json.loads(each.fix.partition("=")[2])
    assert [each for each in check(emulated(**parts)) if each.rule.code == "EN009"] == []


def test_a_model_without_graphs_of_its_encoder_is_reported():
    """VLLM takes the flag for any model, and says nothing."""
    found = emulated(model=TEXT)
    assert found.encoders == ()
    assert [each.rule.code for each in check(found)] == ["EN009"]


def test_settings_of_multimodal_models_say_whether_the_encoder_is_captured():
    for flags, expected in (((), False), (("-cc.cudagraph_mm_encoder=true",), True)):
        found = {each.name: each.value for each in emulate([VISION, *SOME, "4096", *flags], H100).settings}
        assert found["cudagraph_mm_encoder"] is expected
    assert "cudagraph_mm_encoder" not in {each.name for each in emulate([TEXT], H100).settings}


@pytest.mark.parametrize(
    ("runner", "flag", "count"),
    [("0", "-cc.cudagraph_mode=NONE", 0), ("1", "-cc.cudagraph_mode=NONE", 1), ("1", "--enforce-eager", 0)],
)
def test_only_v2_captures_the_encoder_alone(runner, flag, count):
    words = [f"VLLM_USE_V2_MODEL_RUNNER={runner}", VISION, flag, "-cc.cudagraph_mm_encoder=true"]
    assert len(emulate(words, H100).encoders) == count


@pytest.mark.parametrize(
    ("words", "parts", "says"),
    [
        (["--language-model-only"], {}, "never runs"),
        ([], {"encoder_cudagraph_token_budgets": [0]}, "positive"),
        ([], {"encoder_cudagraph_max_vision_items_per_batch": -1}, "at least 0"),
        (
            [],
            {"encoder_cudagraph_token_budgets": [64], "encoder_cudagraph_max_vision_items_per_batch": 65},
            "65 images do not fit",
        ),
    ],
)
def test_what_vllm_stops_at_is_refused(words, parts, says):
    with pytest.raises(FlagError, match=says):
        emulated(*words, **parts)


@pytest.mark.parametrize("words", [["--video-pruning-rate", "0.5"], ["--limit-mm-per-prompt", '{"video": 0}']])
def test_what_changes_the_encoder_is_not_emulated(words):
    with pytest.raises(NotEmulated, match="encoder"):
        emulated(*words)


def test_every_architecture_with_graphs_of_its_encoder_is_in_one_list():
    doubled, others = encoders()["doubled"], encoders()["others"]
    assert set(doubled).isdisjoint(others)
    assert {"Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"} <= set(doubled)
    assert set(doubled) & set(names()["multimodal"])


def test_pipeline_stages_are_said_and_change_no_graph():
    """Every stage captures the same sizes; dispatch knows nothing of stages."""
    one, two = (emulated("-pp", count) for count in ("1", "2"))
    assert one.graphs == two.graphs
    assert "stages" not in {each.rule for each in one.decisions}
    (said,) = (each for each in two.decisions if each.rule == "stages")
    assert "the encoder runs on the first" in said.message
    assert {each.name: each.value for each in two.settings}["pipeline_parallel_size"] == 2
