"""Models of latent attention for SGLang's generators, and the flags that fit them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

LATENT = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
}
"""Architectures of latent attention, with the type of a config.json."""

LATENT_NUMBERS = {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    **{"first_k_dense_replace": 1, "num_key_value_heads": 32, "num_nextn_predict_layers": 1},
}


def with_latent_attention(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the numbers that its architecture has besides an ordinary decoder's."""
    architecture = config["architectures"][0]
    if architecture not in LATENT:
        return config
    config = config | {"model_type": LATENT[architecture]} | LATENT_NUMBERS
    if not architecture.startswith("Kimi"):
        return config
    inner = config | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
    outer = {name: config[name] for name in ("architectures", "model_type")}
    return outer | {"text_config": inner, "vision_config": {}}


def draw_latent(random: Random, flags: dict[str, list[str]]) -> None:
    """Draw backends of latent attention; a drafter's own is not emulated with it."""
    flags.pop("--speculative-draft-attention-backend", None)
    for flag in [flag for flag in flags if flag.endswith("attention-backend")]:
        names = ["fa3", "fa4", "flashinfer", "triton", "flashmla", "trtllm_mla", "cutedsl_mla"]
        flags[flag] = [random.choice(names)]


def without_whole_prefills(flags: dict[str, list[str]]) -> None:
    """Ask for no whole prefill graphs, which are emulated for ordinary decoders only."""
    if flags.get("--cuda-graph-backend-prefill") == ["full"]:
        flags["--cuda-graph-backend-prefill"] = ["breakable"]
    flag = "--cuda-graph-config"
    if flag in flags:
        config = json.loads(flags[flag][0])
        if config.get("prefill", {}).get("backend") == "full":
            config["prefill"]["backend"] = "breakable"
        flags[flag] = [json.dumps(config)]
