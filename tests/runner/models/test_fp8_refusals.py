"""FP8 folders that are refused: tensors that do not belong together, and quantizations of other kinds."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig

from capture_planner.errors import RunError
from capture_planner_runner.bench.rig import Absence
from capture_planner_runner.bench.throughput import copied
from capture_planner_runner.models.fp8 import FP8
from capture_planner_runner.models.huggingface import load_target
from support.launches import CONFIG, SPEC
from support.model_families import BASE, EXPERTS

CPU = torch.device("cpu")
LAYER = "model.layers.0."
FINEGRAINED = {"quant_method": "fp8", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}


def write(folder, config, tensors):
    """Write a model folder."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def refusal(folder):
    """Return the one line that a folder is refused with."""
    with pytest.raises(RunError) as caught:
        load_target(folder, SPEC.model, device=CPU, dtype=torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The configuration and the tensors of a folder that is right."""
    folder = tmp_path_factory.mktemp("sound")
    config = CONFIG | {"quantization_config": FINEGRAINED | {"modules_to_not_convert": ["lm_head", "gate_proj"]}}
    (folder / "config.json").write_text(json.dumps(config))
    model = load_target(folder, SPEC.model, device=CPU, dtype=torch.float32)
    listed = {name: getattr(module, attribute).detach() for name, module, attribute in model.weights()}
    names = {name: name.replace("weight_scale", "weight_scale_inv") for name in listed if "inv_freq" not in name}
    tensors = {name: listed[own].clone() for own, name in names.items()}
    load_target(write(folder, config, tensors), SPEC.model, device=CPU, dtype=torch.float32)
    return config, tensors


UP = LAYER + "mlp.up_proj"
ONE = torch.ones(1, 2)
TENSORS = {
    f"{UP}.weight is FP8, and {UP}.weight_scale_inv is missing": {f"{UP}.weight_scale_inv": None},
    f"{UP}.weight_scale_inv is not used: there is no FP8 {UP}.weight": {f"{UP}.weight": torch.ones(16, 16)},
    f"{UP}.weight_scale_inv has shape [2, 2] and dtype float32, expected a floating-point dtype and [1, 2]": {
        f"{UP}.weight_scale_inv": torch.ones(2, 2)
    },
    f"{UP}.weight_scale_inv has shape [1, 2] and dtype int32": {f"{UP}.weight_scale_inv": ONE.int()},
    f"{UP}.activation_scale is not used: activations have no fixed scale": {f"{UP}.activation_scale": ONE},
    f"{UP} is FP8 in its config.json, and not in its safetensors": {
        f"{UP}.weight": torch.ones(16, 16),
        f"{UP}.weight_scale_inv": None,
    },
    f"{LAYER}mlp.gate_proj is FP8 in its safetensors, and not in its config.json": {
        f"{LAYER}mlp.gate_proj.weight": torch.ones(16, 16).to(FP8),
        f"{LAYER}mlp.gate_proj.weight_scale_inv": ONE,
    },
    "lm_head is FP8 in its safetensors, and not in its config.json": {
        "lm_head.weight": torch.ones(20, 16).to(FP8),
        "lm_head.weight_scale_inv": torch.ones(2, 2),
    },
    "model.norm.weight is FP8 of shape [16], expected the weight of a linear layer": {
        "model.norm.weight": torch.ones(16).to(FP8)
    },
    "; and 2 more; compare quantization_config with these weights": {
        f"{LAYER}{name}.weight_scale_inv": None
        for name in ("mlp.up_proj", "mlp.down_proj", *(f"self_attn.{each}_proj" for each in "qkvo"))
    },
}


@pytest.mark.parametrize("reason", TENSORS)
def test_fp8_tensors_and_their_scales_belong_together(reason, sound, tmp_path):
    """What is missing, unused or of another shape is named, with the file that it is in."""
    config, tensors = sound
    changed = {name: tensor for name, tensor in (tensors | TENSORS[reason]).items() if tensor is not None}
    assert reason in refusal(write(tmp_path, config, changed))


def test_fp8_tensors_need_a_configuration_and_static_scales_all_layers(sound, tmp_path):
    """Without one the numbers would be read without their scales."""
    config, tensors = sound
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    assert "is FP8, and config.json has no quantization_config" in refusal(write(tmp_path, plain, tensors))
    static = config | {"quantization_config": config["quantization_config"] | {"activation_scheme": "static"}}
    assert f"{UP}.activation_scale is missing" in refusal(
        write(tmp_path, static, {f"{UP}.weight": tensors[f"{UP}.weight"]})
    )


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
PACKED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}}
CONFIGS = {
    "is quantized by gptq;": {"quant_method": "gptq", "bits": 4},
    "is quantized by bitsandbytes;": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "is quantized by mxfp4;": {"quant_method": "mxfp4"},
    "is quantized by None;": {"bits": 4},
    "is quantized by compressed-tensors (pack-quantized);": PACKED | {"format": "pack-quantized"},
    "activation_scheme is 'local', expected dynamic or static": FINEGRAINED | {"activation_scheme": "local"},
    "fmt is 'e5m2', expected e4m3": FINEGRAINED | {"fmt": "e5m2"},
    "expert_dtype is 'fp4', expected fp8": FINEGRAINED | {"expert_dtype": "fp4"},
    "modules_to_convert is ['embed_tokens'], expected none": FINEGRAINED | {"modules_to_convert": ["embed_tokens"]},
    "modules_to_not_convert is 5, expected a list of names": FINEGRAINED | {"modules_to_not_convert": 5},
    "weight_block_size is [0, 8], expected two numbers from 1": FINEGRAINED | {"weight_block_size": [0, 8]},
    "weight_block_size is 'x', expected two numbers from 1": FINEGRAINED | {"weight_block_size": "x"},
    "expected one group with targets [Linear]": PACKED | {"config_groups": {"a": GROUP, "b": GROUP}},
    "expected symmetric float of 8 bits": PACKED | {"config_groups": {"a": GROUP | {"weights": {"num_bits": 8}}}},
    "strategy is 'group', expected tensor, channel or block": PACKED
    | {"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"strategy": "group"}}}},
    "block_structure is None, expected two numbers from 1": PACKED
    | {"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"strategy": "block"}}}},
    "kv_cache_scheme is {'num_bits': 8}, expected none": PACKED | {"kv_cache_scheme": {"num_bits": 8}},
    "sparsity_config is {'format': 'sparse'}, expected none, or format dense": PACKED
    | {"sparsity_config": {"format": "sparse"}},
    "ignore is ['lm_head', 1], expected a list of names": PACKED | {"ignore": ["lm_head", 1]},
}


@pytest.mark.parametrize("reason", CONFIGS)
def test_other_quantizations_are_refused_with_what_is_supported(reason, tmp_path):
    """Before any weights are read."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": CONFIGS[reason]}))
    says = refusal(tmp_path)
    assert reason in says
    assert "supported: weights in a floating-point dtype of torch, and FP8 weights (quant_method fp8" in says


def test_a_configuration_that_quantizes_nothing_is_refused(tmp_path):
    """As it is a slip: of names, or of a model without linear layers."""
    quantization = FINEGRAINED | {"modules_to_not_convert": ["proj"]}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    assert "of 7 linear layers none is FP8" in refusal(tmp_path)


def test_experts_with_biases_are_refused(tmp_path):
    """As those of gpt-oss are, which engines store in other formats too."""
    GptOssConfig(**BASE, **EXPERTS, quantization_config=FINEGRAINED).save_pretrained(tmp_path)
    assert "experts with FP8 weights have a gate and no biases here; supported: " in refusal(tmp_path)


EXPERT = "layers.0.mlp.experts.1."


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"up_proj": torch.ones(3, 2)}, f"{EXPERT}up_proj is not FP8, or missing"),
        ({"w1": torch.ones(3, 2).to(FP8)}, f"{EXPERT}w1 is FP8; experts with FP8 weights have gate_proj, up_proj"),
        ({"up_proj": torch.ones(4, 2).to(FP8)}, "experts: gate_up_proj.weight has several shapes: [[3, 2], [4, 2]]"),
    ],
)
def test_all_layers_of_all_experts_are_fp8_and_alike(changed, reason, tmp_path):
    """Named by expert and layer; those of another dtype are joined by the library."""
    shapes = {"gate_proj": (3, 2), "up_proj": (3, 2), "down_proj": (2, 3)}
    tensors = {}
    for number in range(2):
        layers = {name: torch.ones(shape).to(FP8) for name, shape in shapes.items()} | (changed if number else {})
        for name, tensor in layers.items():
            tensors[f"layers.0.mlp.experts.{number}.{name}.weight"] = tensor
            if tensor.dtype is FP8:
                tensors[f"layers.0.mlp.experts.{number}.{name}.weight_scale_inv"] = torch.ones(1, 1)
    numbers = CONFIG | {"model_type": "qwen3_moe", "num_experts": 2, "moe_intermediate_size": 3}
    config = numbers | {"quantization_config": FINEGRAINED}
    assert reason in refusal(write(tmp_path, config, tensors))


def test_what_needs_other_weights_refuses_fp8(tmp_path):
    """LoRA adapters, and the comparison with transformers' own batching."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": FINEGRAINED}))
    model = load_target(tmp_path, SPEC.model, device=CPU, dtype=torch.float32)
    with pytest.raises(RunError, match="has FP8 weights, which adapters are not added to"):
        model.linears()
    with pytest.raises(Absence, match="has FP8 weights"):
        copied(model)
