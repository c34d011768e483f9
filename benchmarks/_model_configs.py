"""Models with random weights: shapes of Qwen3, dense and of experts, each with an EAGLE-3 head."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture_planner.records.model import DataType, Model

RANK = 8
"""Of the LoRA adapters."""

DRAFT_VOCABULARY = 32000
"""What published EAGLE-3 heads of Qwen3 have."""

_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL: dict[str, Any] = _ATTENTION | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
_LARGE: dict[str, Any] = _ATTENTION | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}


def config_of(shape: Mapping[str, Any], layers: int, *, tied: bool) -> dict[str, Any]:
    """Return the config.json of a Qwen3 model."""
    return {
        **shape,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


def drafter_of(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 head: one layer of Llama's."""
    return {
        **shape,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }


_MIXTURE = _ATTENTION | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "0.6b": (config_of(_SMALL, 28, tied=True), drafter_of(_SMALL)),
    "8b": (config_of(_LARGE, 36, tied=False), drafter_of(_LARGE)),
    "30b-a3b": (config_of(_MIXTURE, 48, tied=False) | _EXPERTS, drafter_of(_MIXTURE)),
}
"""The config.json of each model and of its EAGLE-3 head."""


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write the config.json of a model in bfloat16, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=1), "utf-8")
    return folder


def write_adapters(folder: Path, config: Mapping[str, Any], number: int) -> list[Path]:
    """Write LoRA adapters for queries and values, with random weights, in the format of PEFT; return their folders."""
    import torch
    from safetensors.torch import save_file

    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    facts |= {"target_modules": list(heads), "base_model_name_or_path": None}
    folders = [folder / f"adapter{index}" for index in range(1, number + 1)]
    for seed, target in enumerate(folders, 1):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer, (name, count) in itertools.product(range(config["num_hidden_layers"]), heads.items()):
            for part, shape in (("A", (RANK, config["hidden_size"])), ("B", (count * config["head_dim"], RANK))):
                weight = torch.randn(*shape, generator=generator).bfloat16() * 0.1
                tensors[f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"] = weight
        target.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(target / "adapter_model.safetensors"))
        (target / "adapter_config.json").write_text(json.dumps(facts), "utf-8")
    return folders


def small_model(*, max_model_len: int, dtype: DataType = DataType.BFLOAT16) -> Model:
    """Return the shape of Qwen3-0.6B as a spec has it, for sequences of at most ``max_model_len`` tokens."""
    return Model(
        name="Qwen3-0.6B shape",
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        hidden_size=1024,
        vocab_size=151936,
        max_model_len=max_model_len,
        dtype=dtype,
    )


def write_small_config(folder: Path) -> None:
    """Write transformers' configuration of that shape, with the defaults of its library."""
    from transformers import Qwen3Config

    Qwen3Config(**_SMALL, num_hidden_layers=28, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
