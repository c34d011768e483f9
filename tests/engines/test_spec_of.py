"""spec_of: the deployment of an engine's flags as a spec, with what had to be assumed."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import load_backends, plan
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, find_engine
from capture_planner.engines.spec_of import DerivedSpec, spec_of
from capture_planner.errors import EngineError
from capture_planner.modes import Chain, GraphMode, Role
from support.tuning import MODEL

H200 = find_environment("h200")
EAGLE = ("--speculative-config", '{"method":"eagle3","model":"my/drafter","num_speculative_tokens":3}')
SGLANG = ["--model-path", "Qwen/Qwen3-8B"]
SGLANG_EAGLE = "--speculative-algorithm EAGLE --speculative-num-draft-tokens 4 --speculative-num-steps 3"
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "plain": ("vllm", ["Qwen/Qwen3-8B", "--max-num-seqs", "64"]),
    "eagle": ("vllm", ["Qwen/Qwen3-8B", *EAGLE]),
    "piecewise": ("vllm", ["Qwen/Qwen3-8B", "-cc.cudagraph_mode=PIECEWISE"]),
    "adapters": ("vllm", ["Qwen/Qwen3-8B", "--enable-lora", "--max-loras", "4"]),
    "eager": ("vllm", ["Qwen/Qwen3-8B", "--enforce-eager"]),
    "sglang": ("sglang", SGLANG),
    "sglang eagle": ("sglang", [*SGLANG, *SGLANG_EAGLE.split(), "--speculative-eagle-topk", "1"]),
    "tensorrt-llm": ("tensorrt-llm", ["Qwen/Qwen3-8B", "--max_batch_size", "64"]),
}


def derived(engine: str, flags: list[str]) -> DerivedSpec:
    return spec_of(emulate(engine, flags, H200), find_engine(engine), MODEL)


@pytest.mark.parametrize("name", COMMANDS)
def test_plans_of_the_spec_run_what_the_engine_runs(name: str) -> None:
    """Limits, speculation, adapters, ranks, and the mode of each role are the engine's."""
    engine, flags = COMMANDS[name]
    emulation = emulate(engine, flags, H200)
    own = plan(derived(engine, flags).spec, H200, load_backends())
    assert own.limits == emulation.limits
    assert own.model == MODEL
    assert {role.role: role.mode for role in own.roles if role.role in emulation.modes} == emulation.modes
    assert (own.speculative is None) is (emulation.speculative is None)
    if own.speculative is not None and emulation.speculative is not None:
        assert own.speculative.num_tokens == emulation.speculative.num_tokens
    assert own.lora == emulation.lora
    assert own.parallel == emulation.parallel


def test_roles_that_the_engine_does_not_run_have_no_graphs() -> None:
    """n-gram drafts come from no model."""
    config = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}'
    spec = derived("vllm", ["Qwen/Qwen3-8B", "--speculative-config", config]).spec
    assert spec.roles.of(Role.DRAFT_PREFILL).mode is GraphMode.NONE
    assert spec.roles.of(Role.DRAFT_DECODE).mode is GraphMode.NONE
    assert spec.speculative is not None
    assert spec.speculative.chain is Chain.SINGLE


def test_unknown_models_are_assumed_and_named() -> None:
    """The dimensions are those of the profile's model; the name is the user's."""
    found = derived("vllm", ["my/model"])
    assert found.spec.model.name == "my/model"
    assert found.spec.model.num_layers == MODEL.num_layers
    assert any("my/model" in each and MODEL.name in each for each in found.assumptions)


def test_known_models_have_their_own_dimensions() -> None:
    """All but the number of layers, which the list of known models lacks."""
    found = derived("vllm", ["meta-llama/Llama-3.3-70B-Instruct", "--tensor-parallel-size", "4"])
    assert found.spec.model.num_heads == 64
    assert found.spec.parallel.tensor == 4
    assert any("layers" in each for each in found.assumptions)


def test_attention_backends_without_a_plugin_are_assumed() -> None:
    """The spec needs one: which it is, and why, is said."""
    found = derived("tensorrt-llm", ["Qwen/Qwen3-8B"])
    assert found.spec.backend == "flash_attention"
    assert any("attention backend" in each for each in found.assumptions)


def test_drafters_of_several_tokens_a_pass_are_refused() -> None:
    """A tree of drafts has graphs that no plan describes."""
    flags = [*SGLANG, *SGLANG_EAGLE.split(), "--speculative-eagle-topk", "2"]
    flags[flags.index("--speculative-num-draft-tokens") + 1] = "6"
    with pytest.raises(EngineError, match="several tokens"):
        derived("sglang", flags)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=200).filter(str.strip))
def test_models_of_any_name_have_a_spec(name: str) -> None:
    """Paths, variables and names in any alphabet: a model is served from where it lies."""
    emulation = emulate("vllm", ["Qwen/Qwen3-8B"], H200)
    assert spec_of(emulation, find_engine("vllm"), MODEL, name).spec.limits == emulation.limits


def test_a_model_in_a_folder_goes_by_the_name_of_the_folder(tmp_path: Path) -> None:
    """Its dimensions are those of its configuration, wherever it lies; of an absent folder the name is kept."""
    folder = tmp_path / "my model (v2)"
    folder.mkdir()
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes |= {"hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(sizes | {"architectures": ["LlamaForCausalLM"]}), "utf-8")
    model = derived("vllm", [str(folder), "--max-model-len", "512"]).spec.model
    assert (model.name, model.num_layers, model.max_model_len) == ("my model -v2-", 3, 512)
    assert derived("vllm", ["/models/Qwen3-8B"]).spec.model.name == "Qwen3-8B"
    assert derived("vllm", ["$MODEL_PATH"]).spec.model.name == "MODEL_PATH"


def test_observation_without_the_target_has_no_spec() -> None:
    """A file that was cut or edited."""
    plain = emulate(*COMMANDS["plain"], H200)
    with pytest.raises(EngineError, match="nothing of the target was observed"):
        spec_of(attrs.evolve(plain, managers=()), find_engine("vllm"), MODEL)
