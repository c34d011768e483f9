"""Loading a target: from a folder, from a configuration, from a plan's numbers; or why it is refused."""

import json

import attrs
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

from capture_planner.errors import RunError
from capture_planner.records.model import DataType, Latent, Model
from capture_planner_runner.models.huggingface import HuggingFaceModel, differences, load_target
from support.model_families import BASE, FAMILIES, LAYERS, VOCAB

CPU = torch.device("cpu")


def all_weights(model):
    """Return every weight of a model, by name."""
    return {name: getattr(module, attribute) for name, module, attribute in model.weights()}


def test_random_weights_follow_the_seed_alone(tiny):
    """The same seed makes the same model, and the global generator does not notice."""
    before = torch.random.get_rng_state()
    one, same, other = (
        all_weights(load_target(None, tiny, device=CPU, dtype=torch.float32, seed=seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_a_folder_without_weights_is_its_configuration_with_random_ones(tmp_path, tiny):
    """As the configuration file alone is; the name says so."""
    FAMILIES["qwen3"]().save_pretrained(tmp_path)
    models = [load_target(path, tiny, device=CPU) for path in (tmp_path, tmp_path / "config.json")]
    first, second = map(all_weights, models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for model in models:
        assert model.name == f"Qwen3ForCausalLM of {tmp_path.name}, random weights (seed 0)"


def test_sharded_weights_are_read(tmp_path, tiny, attention):
    """Several files with an index are one model."""
    with torch.random.fork_rng():
        own = AutoModelForCausalLM.from_config(FAMILIES["llama"](), dtype=torch.float32)
    own.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_target(tmp_path, tiny, device=CPU)
    assert model.dtype == torch.float32
    assert all(torch.equal(tensor, all_weights(model)[name]) for name, tensor in own.state_dict().items())


def test_a_dtype_is_the_one_asked_for_or_the_configurations_or_the_plans(tmp_path, tiny):
    """In this order."""
    FAMILIES["llama"]().save_pretrained(tmp_path)
    assert load_target(tmp_path, tiny, device=CPU).dtype == torch.bfloat16
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert load_target(tmp_path, tiny, device=CPU).dtype == torch.float16
    assert load_target(tmp_path, tiny, device=CPU, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(RunError, match="fp8 cannot be computed in"):
        load_target(None, attrs.evolve(tiny, dtype=DataType.FP8), device=CPU)


SMALL = {"hidden_size": 24, "vocab_size": VOCAB}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
REFUSED = {
    "dynamic rope reads": lambda: transformers.LlamaConfig(**BASE, rope_parameters=DYNAMIC),
    "longrope chooses": lambda: transformers.LlamaConfig(**BASE, rope_parameters=LONG),
    "layers of type linear_attention": lambda: transformers.Qwen3NextConfig(**BASE),
    "layers of type linear_attention, whose state transformers keeps": lambda: transformers.JambaConfig(
        **{name: value for name, value in BASE.items() if name != "head_dim"}
    ),
    "layers of type hybrid": lambda: transformers.FalconH1Config(**BASE),
    "layers of type chunked_attention": lambda: transformers.Llama4TextConfig(**BASE),
    "KV cache of another layer": lambda: transformers.Gemma3nTextConfig(**BASE),
    "keys of width 12 and values of width 6": lambda: transformers.DeepseekV3Config(
        **{name: value for name, value in BASE.items() if name != "head_dim"}, **LATENT
    ),
    "does not have the attention interface": lambda: transformers.BloomConfig(n_layer=2, n_head=2, **SMALL),
    "is not a causal language model": lambda: transformers.T5Config(num_layers=1),
    "no list of its layers": lambda: transformers.BertConfig(num_hidden_layers=1, **SMALL),
    "is not causal": lambda: transformers.Gemma3TextConfig(**BASE, use_bidirectional_attention=True),
    "logits do not come from its output embeddings": lambda: transformers.HyperCLOVAXConfig(**BASE, logits_scaling=4.0),
    "is quantized by awq;": lambda: transformers.LlamaConfig(**BASE, quantization_config={"quant_method": "awq"}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_that_no_plan_here_executes_are_refused(reason, tmp_path, tiny):
    """Each with its reason, and with what is supported."""
    REFUSED[reason]().save_pretrained(tmp_path)
    with pytest.raises(RunError, match=reason) as caught:
        load_target(tmp_path, tiny, device=CPU, dtype=torch.float32)
    assert "supported: " in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"latent": Latent(kv_lora_rank=4, rope_head_dim=2)}, {"sinks": True}, {"causal": False}, {"head_dim": 7}]
)
def test_numbers_that_no_llama_has_need_a_folder(change, tiny):
    """A random model is a Llama; what it cannot be is refused."""
    with pytest.raises(RunError, match="give a folder"):
        load_target(None, attrs.evolve(tiny, **change), device=CPU)


def test_a_model_of_a_plan_has_its_numbers():
    """What the plan leaves open is made up."""
    shape = Model(name="m", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, max_model_len=9)
    model = load_target(None, shape, device=CPU)
    assert differences(model, shape) == ()
    assert (model.hidden_size, model.vocab_size, model.max_model_len) == (12, 256, 9)
    assert model.dtype == torch.bfloat16


def test_folders_that_hold_no_model_are_refused(tmp_path, tiny):
    """Nothing there, no JSON, an unknown architecture, pickled weights, weights of another model."""

    def message():
        with pytest.raises(RunError) as caught:
            load_target(tmp_path, tiny, device=CPU)
        return str(caught.value)

    assert "no config.json" in message()
    config = tmp_path / "config.json"
    config.write_text("{")
    assert "cannot be read as JSON" in message()
    config.write_text('{"model_type": "no-such-model"}')
    assert "no-such-model" in message()
    FAMILIES["llama"]().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "convert them to safetensors" in message()
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert "cannot be read as safetensors" in message()
    with torch.random.fork_rng():
        short = transformers.LlamaConfig(**BASE | {"num_hidden_layers": LAYERS - 1})
        AutoModelForCausalLM.from_config(short).save_pretrained(tmp_path)
    config.unlink()
    FAMILIES["llama"]().save_pretrained(tmp_path)
    assert "lack model.layers.2." in message()


def test_weights_of_another_shape_are_named_and_libraries_say_nothing(tmp_path, tiny, capfd):
    """Their report and their warnings would come before the error, and say less."""
    with torch.random.fork_rng():
        AutoModelForCausalLM.from_config(FAMILIES["llama"]()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 1}))
    capfd.readouterr()
    with pytest.raises(RunError, match=r"lm_head.weight has shape \[\d+, \d+\], and by config.json \[1, \d+\]"):
        load_target(tmp_path, tiny, device=CPU)
    assert capfd.readouterr() == ("", "")


def mask(layer, args, kwargs):
    """Give a layer a mask, as a model that makes its own does."""
    return args, kwargs | {"attention_mask": torch.zeros(2, 2)}


class LayerWithoutAttention(torch.nn.Module):
    """A layer without attention."""

    def forward(self, states, **kwargs):
        """Return what came in."""
        return states


def widen(layers):
    """Put a layer of other heads in the place of one."""
    config = transformers.Gemma2Config(**BASE | {"num_key_value_heads": 4}, attn_implementation="capture_planner")
    layers[1] = Gemma2DecoderLayer(config, 1)


BREAKS = {
    "has a mask of its own": lambda layers: layers[1].register_forward_pre_hook(mask, with_kwargs=True),
    "asks for a window of 7": lambda layers: setattr(layers[1].self_attn, "sliding_window", 7),
    "or has no index": lambda layers: setattr(layers[1].self_attn, "layer_idx", None),
    "layer 0 attends twice": lambda layers: setattr(layers[2].self_attn, "layer_idx", 0),
    "layers .1. do not attend": lambda layers: layers.__setitem__(1, LayerWithoutAttention()),
    "different heads": widen,
    "its forward fails: ": lambda layers: setattr(layers[1].self_attn, "head_dim", 5),
}


@pytest.mark.parametrize("reason", BREAKS)
def test_what_a_configuration_does_not_show_the_probe_does(reason):
    """Layers that do not attend as the contract has it are named when the model is loaded."""
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(
            FAMILIES["gemma2"](), dtype=torch.float32, attn_implementation="capture_planner"
        )
        assert HuggingFaceModel(model, "sound", 64).num_layers == LAYERS
        BREAKS[reason](model.model.layers)
        with pytest.raises(RunError, match=f"broken: .*{reason}"):
            HuggingFaceModel(model, "broken", 64)
