"""What was probably meant: names that engines have for fields of a spec, and values written another way."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ELSEWHERE = {
    "max_num_seqs": "limits.max_num_reqs",
    "max_running_requests": "limits.max_num_reqs",
    "max_batch_size": "limits.max_num_reqs",
    "max_num_batched_tokens": "limits.max_num_tokens",
    "chunked_prefill_size": "limits.max_num_tokens",
    "max_model_len": "model.max_model_len",
    "context_length": "model.max_model_len",
    "cudagraph_mode": "mode",
    "attention_backend": "backend",
    "attn_backend": "backend",
    "speculative_config": "speculative",
    "num_speculative_tokens": "speculative.num_tokens",
    "speculative_num_steps": "speculative.num_tokens",
    "num_speculative_tokens_per_batch_size": "speculative.schedule",
    "cudagraph_capture_sizes": "sizes.num_tokens",
    "cuda_graph_bs": "sizes.num_reqs",
    "tensor_parallel_size": "parallel.tensor",
    "tensor_parallel": "parallel.tensor",
    "tp_size": "parallel.tensor",
    "tp": "parallel.tensor",
    "data_parallel_size": "parallel.data",
    "data_parallel": "parallel.data",
    "dp_size": "parallel.data",
    "dp": "parallel.data",
    "decode_context_parallel_size": "parallel.decode_context",
    "dcp_size": "parallel.decode_context",
    "enable_lora": "lora",
    "max_loras": "lora.max_active",
    "max_loras_per_batch": "lora.max_active",
    "specialize_active_lora": "lora.specialize",
    "max_graphs": "budget.max_graphs",
    "memory": "budget.memory",
}
"""Names of vLLM, SGLang and TensorRT-LLM, or of a field without its block, each with the field of a spec."""


def key_meant(key: str, known: Iterable[str], *, in_spec: bool) -> str | None:
    """Return the field that an unknown key probably means: an engine's name for it, or one spelt nearly so."""
    name = key[:100].replace("-", "_").lower()
    if in_spec and name in ELSEWHERE:
        return ELSEWHERE[name]
    return next(iter(difflib.get_close_matches(key[:100], list(known), n=1)), None)


def word_meant(value: str, words: Iterable[str]) -> str | None:
    """Return the word of a closed set that a text probably means: in another case, or spelt nearly so."""
    folded = {word.casefold(): word for word in words}
    near = difflib.get_close_matches(value.casefold().replace("-", "_"), folded, n=1, cutoff=0.5)
    return folded[near[0]] if near else None
