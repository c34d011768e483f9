"""Checkpoints in the speculators format: served by themselves, they are their target with the drafter."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.codec.shipped import find_environment
from capture_planner.errors import FlagError, NotEmulated
from capture_planner_vllm.emulation.engine import emulate

H100 = find_environment("h100")
TARGET = "meta-llama/Llama-3.1-8B-Instruct"
LAYER = {
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "torch_dtype": "bfloat16"},
}
METHODS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark"}


def checkpoint(place, kind="eagle3", tokens=5, layers="llama", target=TARGET):
    """Write a drafter's config.json into a folder, and return the folder."""
    methods = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {"proposal_methods": methods, "verifier": {"name_or_path": target}},
        "transformer_layer_config": {"model_type": layers, **LAYER},
        **{"block_size": 8, "mask_token_id": 1, "aux_hidden_state_layer_ids": [1]},
    }
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


@given(
    st.sampled_from(sorted(METHODS)),
    st.integers(1, 6),
    st.sampled_from(("llama", "qwen3")),
    st.none() | st.integers(1, 4),
)
def test_served_by_itself_it_is_its_target_with_the_drafter(tmp_path_factory, kind, tokens, layers, asked):
    """As if the target were served and the checkpoint named as the draft; flags may give other numbers of drafts."""
    place = checkpoint(tmp_path_factory.mktemp("m"), kind, tokens, layers)
    spec = {"method": METHODS[kind], "model": place, "num_speculative_tokens": asked or tokens}
    spec |= {"parallel_drafting": True} if kind == "peagle" else {}
    flags = [] if asked is None else ["--speculative-config", json.dumps({"num_speculative_tokens": asked})]
    alone = emulate([place, "--max-num-seqs", "16", *flags], H100)
    named = emulate([TARGET, "--max-num-seqs", "16", "--speculative-config", json.dumps(spec)], H100)
    assert alone.graphs == named.graphs
    assert alone.speculative == named.speculative
    assert alone.speculative is not None
    assert {s.name: s.value for s in alone.settings} == {s.name: s.value for s in named.settings}
    assert alone.assumptions == named.assumptions == ()


@pytest.mark.parametrize(
    "name", ["some/Llama-3.1-8B-Instruct-speculator.eagle3", "some/eagle3-llama3.1-8b-speculators"]
)
def test_unknown_drafters_are_not_served_as_plain_models(name):
    """By its name it is a drafter, whose target is unknown here; as a draft it is taken, and that is said."""
    with pytest.raises(NotEmulated, match=r"its config\.json names.*folder with its config\.json"):
        emulate([name], H100)
    spec = json.dumps({"method": "eagle3", "model": name, "num_speculative_tokens": 3})
    (assumption,) = emulate([TARGET, "--speculative-config", spec], H100).assumptions
    assert name in assumption


@pytest.mark.parametrize("target", ["/models/llama", ".", 5])
def test_a_target_must_be_a_public_name(tmp_path, target):
    """VLLM refuses a folder as the target, and says to name both."""
    with pytest.raises(FlagError, match="name the target as the model"):
        emulate([checkpoint(tmp_path, target=target)], H100)


def test_other_kinds_are_refused(tmp_path):
    """A kind of drafter that vLLM does not know, and a file without a method."""
    with pytest.raises(FlagError):
        emulate([checkpoint(tmp_path, kind="medusa9")], H100)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_config": {}}))
    with pytest.raises(FlagError, match="finds no drafter"):
        emulate([str(tmp_path)], H100)
