"""Models of other families than text decoders for SGLang's generators: vision, linear and sparse attention."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from engines.generators.sglang_latent import LATENT_NUMBERS

VISION = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "Glm4vForConditionalGeneration": "glm4v",
}
"""Architectures that take images, with the type of a config.json."""

HYBRID = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
"""Architectures with linear attention in most layers; those of Qwen3.5 take images too."""

SPARSE = {"DeepseekV32ForCausalLM": "deepseek_v32", "GlmMoeDsaForCausalLM": "glm_moe_dsa"}
"""Architectures whose latent attention is to selected tokens only."""

_INDEXER = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
_VISION_TOWER = {"depth": 2, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 4096}


def with_family(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as its architecture has it; that of an ordinary decoder stays as it is."""
    architecture = config["architectures"][0]
    if architecture in SPARSE:
        return config | LATENT_NUMBERS | _INDEXER | {"model_type": SPARSE[architecture]}
    kind = (VISION | HYBRID).get(architecture)
    if kind is None or architecture == "Qwen3NextForCausalLM":
        return config | ({} if kind is None else {"model_type": kind})
    outer = {"architectures": [architecture], "model_type": kind}
    text = {key: value for key, value in config.items() if key not in outer} | {"model_type": f"{kind}_text"}
    return outer | {"text_config": text, "vision_config": _VISION_TOWER}


def draw_family(random: Random, architecture: str, flags: dict[str, list[str]]) -> None:
    """Draw the flags that a family reads, and none whose graphs are not emulated with it."""

    def maybe(chance: float, flag: str, *values: Any) -> None:
        if random.random() < chance:
            flags[flag] = [str(random.choice(values))] if values else []

    if architecture.startswith("Gemma4"):
        for flag in [flag for flag in flags if flag.endswith("attention-backend")]:
            flags[flag] = [random.choice(["trtllm_mha", "triton", "triton", "fa4", "flashinfer"])]
    if architecture in SPARSE:
        flags.pop("--speculative-draft-attention-backend", None)
        for flag in [flag for flag in flags if flag.endswith("attention-backend")]:
            flags[flag] = ["dsa"]
    hybrid = architecture in HYBRID
    for flag in ("--tp-size", "--tensor-parallel-size"):
        if hybrid and flags.get(flag) == ["3"]:
            # Heads that ranks do not divide stop SGLang, whatever the graphs.
            flags[flag] = ["4"]
    if flags.get("--disaggregation-mode") == ["decode"]:
        maybe(0.3, "--disaggregation-decode-enable-radix-cache")
    maybe(0.15 if hybrid else 0.03, "--disable-radix-cache")
    maybe(0.15 if hybrid else 0.03, "--disable-overlap-schedule")
    maybe(0.05, "--disable-chunked-prefix-cache")
    maybe(0.2 if hybrid else 0.02, "--linear-attn-decode-backend", "triton", "flashinfer", "flashkda")
    maybe(0.2 if hybrid else 0.02, "--mamba-ssm-dtype", "bfloat16", "float32")
    lengths: tuple[dict[str, Any], ...] = (
        {},
        {"max_position_embeddings": 3000},
        {"max_position_embeddings": 9000, "rope_scaling": {"rope_type": "yarn"}},
    )
    maybe(0.05, "--json-model-override-args", *map(json.dumps, lengths))
    maybe(0.3 if hybrid else 0.02, "--max-mamba-cache-size", 0, 4, 40, 300, 3000)
    maybe(0.2 if hybrid else 0.01, "--mamba-track-interval", 2, 64, 100, 512)
    strategies = ("auto", "no_buffer", "extra_buffer", "extra_buffer", "extra_buffer_lazy")
    maybe(0.3 if hybrid else 0.02, "--mamba-radix-cache-strategy", *strategies)


def draw_overlap(random: Random, flags: dict[str, list[str]]) -> None:
    """Draw experts' all-to-all and microbatches, whose prefill graphs are not emulated where a flag asks for them."""
    if random.random() < 0.12:
        flags["--moe-a2a-backend"] = ["deepep"]
        if random.random() < 0.5:
            flags["--deepep-mode"] = [random.choice(["auto", "normal", "low_latency"])]
        if random.random() < 0.4:
            flags["--enable-dp-lm-head"] = []
    if random.random() < (0.4 if "--moe-a2a-backend" in flags else 0.05):
        flags["--enable-two-batch-overlap"] = []
        flags.pop("--cuda-graph-backend-prefill", None)
        if "prefill" in flags.get("--cuda-graph-config", [""])[0]:
            del flags["--cuda-graph-config"]
