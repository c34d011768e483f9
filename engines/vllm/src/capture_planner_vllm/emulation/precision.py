"""Dtypes, which limit the attention backends, and what quantized checkpoints need."""

from __future__ import annotations

from capture_planner.engines.parsing import refusal
from capture_planner_vllm.emulation.flags import CommandLine
from capture_planner_vllm.emulation.model import ModelFacts
from capture_planner_vllm.emulation.refusals import not_emulated
from capture_planner_vllm.emulation.releases import has
from capture_planner_vllm.emulation.tables import names

_SHORT = {"half": "float16", "float": "float32"}
_NO_HALF = ("gemma2", "gemma3", "gemma3_text", "glm4")


def model_dtype(line: CommandLine, model: ModelFacts, capability: tuple[int, int], *, pooling: bool) -> str:
    """Return the dtype of weights and activations; raises ``FlagError`` where vLLM does not support it."""
    dtype = str(line.get("dtype", "auto")).lower()
    dtype = _SHORT.get(dtype, dtype)
    supported = ["bfloat16"] if capability >= (8, 0) else []
    # These models are unstable in float16 (_FLOAT16_NOT_SUPPORTED_MODELS).
    supported += ["float32"] if model.model_type in _NO_HALF else ["float16", "float32"]
    if dtype == "auto":
        preferred = "float16" if pooling and "float16" in supported else supported[0]
        # vLLM serves float32 checkpoints in 16 bits unless a flag says otherwise.
        own = preferred if model.dtype == "float32" else model.dtype
        return own if own in supported else preferred
    if dtype not in supported:
        remedy = f"give {' or '.join(supported)}, or auto"
        raise refusal("--dtype", f"vLLM does not support {dtype} for this model on this GPU", remedy)
    return dtype


def check_quantization(line: CommandLine, model: ModelFacts, dtype: str, capability: tuple[int, int]) -> None:
    """Raise where vLLM cannot load the checkpoint, or the flag overrides its method; others ignore the flag."""
    method, override, known = model.quantization, line.get("quantization"), names()["quantization"]
    if method is None:
        return
    if override is not None and override != method:
        reason = f"the checkpoint is {method}; loading it as {override} is not emulated"
        raise not_emulated("--quantization", "", "leave the flag out", reason=reason)
    deprecated = method in names()["deprecated_quantization"]
    if method not in known or (deprecated and not line.get("allow_deprecated_quantization")):
        raise refusal("--model", f"vLLM does not load {method} checkpoints", "name another model")
    least = int(names()["quantization_capability"][known.index(method)])
    dtypes = names()["quantization_dtypes"][known.index(method)].split()
    if capability[0] * 10 + capability[1] < least or dtype not in dtypes:
        supported = f"compute capability {least / 10} or above and {' or '.join(dtypes)}"
        raise refusal("--model", f"{method} checkpoints need {supported}", "use another GPU or --dtype")


def cache_dtype(line: CommandLine, model: ModelFacts, dtype: str) -> str:
    """Return the KV cache's dtype; raises ``FlagError`` as vLLM does."""
    cache = str(line.get("kv_cache_dtype", "auto"))
    if cache not in names()["cache_dtypes"]:
        known = ", ".join(names()["cache_dtypes"][:6])
        raise refusal("--kv-cache-dtype", f"vLLM has no KV cache dtype {cache}", f"give one such as {known}")
    # DeepSeek V3.2's own cache is bfloat16, and vLLM makes the flag auto (models/config.py).
    if cache == "bfloat16" and model.architecture == "DeepseekV32ForCausalLM":
        return "auto"
    return check_cache("--kv-cache-dtype", (model.cache or "auto") if cache == "auto" else cache, dtype)


def check_cache(flag: str, cache: str, dtype: str, *inside: str) -> str:
    """Return the KV cache's dtype; raises ``FlagError`` for a 16-bit float other than the model's."""
    if cache in ("float16", "bfloat16") and cache != dtype and has("cache-dtype-is-models"):
        raise refusal(flag, f"vLLM does not combine a {cache} KV cache with a {dtype} model", "give auto", *inside)
    return cache
