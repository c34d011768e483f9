"""Flags of vLLM that have no effect on graphs, and of which vLLM rejects some values: the emulation ignores them.

That a flag has no effect is checked, not assumed: a command line that vLLM rejects over such a value must be
accepted by vLLM once the flag is left out, with the answer that the emulation gives for the whole line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from capture_planner_vllm.emulation.flags import name_of

_RANKS = "how data-parallel ranks are launched on nodes, not how many there are"
_MEMORY = "KV-cache memory and scheduling within a batch's budget; no size depends on it"
_SAMPLING = "how drafts are sampled and accepted; K and the drafter's passes stay"
_KERNELS = "operators and caches of the compiled graph; capture sizes and modes stay"
_CHECKED = "checked by vLLM for launching; modes and sizes do not depend on it"

IGNORED: dict[str, str] = {
    "gpu_memory_utilization": _MEMORY,
    "long_prefill_token_threshold": _MEMORY,
    "max_num_active_seqs": _MEMORY,
    "max_cpu_loras": _MEMORY,
    "stream_interval": "output streaming",
    "max_logprobs": "sampling output",
    "quantization": "weights of a checkpoint without a method of its own; the KV cache has another flag",
    "enable_eplb": "placement of experts",
    "data_parallel_rank": _RANKS,
    "data_parallel_size_local": _RANKS,
    "data_parallel_external_lb": _RANKS,
    "data_parallel_hybrid_lb": _RANKS,
    "kv_transfer_config": "the role of a connector; which connectors need PIECEWISE is emulated",
    "compilation_config.custom_ops": _KERNELS,
    "compilation_config.compile_sizes": _KERNELS,
    "compilation_config.compile_ranges_endpoints": _KERNELS,
    "compilation_config.cudagraph_num_of_warmups": "warm-up runs before each capture",
    "compilation_config.cudagraph_copy_inputs": _KERNELS,
    "compilation_config.compile_cache_save_format": _KERNELS,
    **{
        f"speculative_config.{part}": _SAMPLING
        for part in (
            *("rejection_sample_method", "draft_sample_method", "draft_lm_head_quantization"),
            *("synthetic_acceptance_rates", "synthetic_acceptance_length", "fly_window_size"),
            *("fly_entropy_top_k", "dspark_draft_topk", "xpress_topc", "use_local_argmax_reduction"),
            *("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth"),
            *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
            *("suffix_decoding_min_token_prob", "index_share_for_mtp_iteration"),
        )
    },
    **{
        f"speculative_config.{part}": _CHECKED
        for part in ("moe_backend", "quantization", "revision", "code_revision", "tensor_parallel_size")
    },
}
"""Each flag, or part of a JSON flag, with the reason why no graph depends on its value."""


def present(command: Sequence[str]) -> Iterator[str]:
    """Yield the ignored flags, and parts of JSON flags, that a command line gives."""
    for flag in IGNORED:
        if without(command, [flag]) != list(command):
            yield flag


def without(command: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return a command line without these flags, and without these parts of JSON flags."""
    words = list(command)
    for flag in flags:
        words = _without(words, *flag.split("."))
    return words


def _without(words: Sequence[str], flag: str, part: str = "") -> list[str]:
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        head, dot, key = name.partition(".")
        if not word.startswith("-") or name_of(head) != flag:
            kept.append(word)
            continue
        values = []
        while rest and not equals and not _is_flag(rest[0]):
            values.append(rest.pop(0))
        inside = key.replace("-", "_").partition(".")[0]
        if part and dot and inside != part:
            kept += [word, *values]
        elif part and not dot:
            trimmed = _trimmed(text if equals else "".join(values[:1]), part)
            kept += [f"{name}={trimmed}"] if equals else [word, trimmed, *values[1:]]
    return kept


def _trimmed(text: str, part: str) -> str:
    """Return a JSON object without a part; any other text, and one without the part, as it is."""
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError:
        return text
    if not isinstance(value, dict) or part not in value:
        return text
    return json.dumps({key: item for key, item in value.items() if key != part})


def _is_flag(word: str) -> bool:
    return word.startswith("-") and re.fullmatch(r"-[\d.]+", word) is None
