"""The config.json of models with random weights: shapes of Qwen3, dense and of experts, each with an EAGLE-3 head."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        "draft_vocab_size": 32000,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }


def mixture(layers: int) -> dict[str, Any]:
    """Return the config.json of Qwen3-30B-A3B: 128 experts, of which each token takes 8; with 48 layers, all of it."""
    return {
        **_ATTENTION,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": layers,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


_EXPERTS = mixture(8) | {"num_experts": 16}

CONFIGS = {
    "small": config_of(_SMALL, 28, tied=True),
    "small-drafter": drafter_of(_SMALL),
    "large": config_of(_LARGE, 36, tied=False),
    "large-drafter": drafter_of(_LARGE),
    "mixture": _EXPERTS,
    "mixture-drafter": drafter_of({name: _EXPERTS[name] for name in _LARGE}),
}


def write_configs(folder: Path) -> None:
    """Write a model folder for each shape, by its name; its weights are bfloat16."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=1), "utf-8")
