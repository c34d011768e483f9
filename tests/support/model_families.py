"""Tiny configurations of the families that are tested."""

from typing import Any

import transformers

VOCAB, LAYERS, WINDOW = 50, 3, 4
BASE: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    # Larger than the default, so that attention is far from uniform.
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MROPE = BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
WITHOUT_HEAD_DIM = {name: value for name, value in MROPE.items() if name != "head_dim"}
SEEING = {"depth": 1, "num_heads": 2, "hidden_size": 32}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "llama tied": lambda: transformers.LlamaConfig(**BASE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**BASE),
    "mistral": lambda: transformers.MistralConfig(**BASE, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **BASE, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "granite": lambda: transformers.GraniteConfig(**BASE, logits_scaling=4.0, embedding_multiplier=2.0),
    "cohere": lambda: transformers.CohereConfig(**BASE, logit_scale=0.25),
    "gpt-oss": lambda: transformers.GptOssConfig(**BASE, **EXPERTS, sliding_window=WINDOW),
    "mixtral": lambda: transformers.MixtralConfig(**BASE, **EXPERTS, sliding_window=None),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "granite hybrid": lambda: transformers.GraniteMoeHybridConfig(**BASE, **MAMBA, layer_types=HYBRID),
    "bamba": lambda: transformers.BambaConfig(**BASE, **MAMBA, attn_layer_indices=[1]),
    "gpt2": lambda: transformers.GPT2Config(n_layer=3, n_head=4, n_embd=32, n_positions=64, vocab_size=VOCAB),
    "qwen2-vl": lambda: transformers.Qwen2VLConfig(
        text_config=WITHOUT_HEAD_DIM, vision_config=SEEING | {"embed_dim": 16}
    ),
    "qwen3-vl": lambda: transformers.Qwen3VLConfig(
        text_config=MROPE, vision_config=SEEING | {"out_hidden_size": 32, "deepstack_visual_indexes": []}
    ),
}
