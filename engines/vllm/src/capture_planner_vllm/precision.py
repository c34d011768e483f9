"""What vLLM computes and stores in: ``--dtype``, ``--quantization``, ``--kv-cache-dtype``, ``--block-size``."""

from __future__ import annotations

from capture_planner_vllm.flags import Given, refusal
from capture_planner_vllm.model import Model
from capture_planner_vllm.parts import names
from capture_planner_vllm.unemulated import not_emulated

DEFAULT_BLOCK = 16
"""Tokens of a KV block where nothing says it."""
_SHORT = {"half": "float16", "float": "float32"}
_NO_HALF = ("gemma2", "gemma3", "gemma3_text", "glm4")
_BY_CHECKPOINT = "vLLM reads {} from a quantized checkpoint, and the model's config.json has none"


def dtype(given: Given, model: Model, capability: tuple[int, int], *, pooling: bool) -> str:
    """Return the dtype of weights and activations; raises ``FlagError`` as vLLM would refuse it."""
    asked = str(given.get("dtype", "auto")).lower()
    asked = _SHORT.get(asked, asked)
    supported = ["float16", "float32"] if capability < (8, 0) else ["bfloat16", "float16", "float32"]
    if asked == "auto":
        if model.model_type in _NO_HALF:
            supported.remove("float16")
        preferred = "float16" if pooling and "float16" in supported else supported[0]
        own = preferred if model.dtype == "float32" else model.dtype
        return own if own in supported else preferred
    if asked == "float16" and model.model_type in _NO_HALF:
        raise refusal("--dtype", f"vLLM has no float16 for {model.model_type}", "give bfloat16 or float32")
    if asked not in supported:
        raise refusal("--dtype", f"vLLM has no {asked} on this GPU", "give half, or auto")
    return asked


def quantization(given: Given, model: Model, dtype: str, capability: tuple[int, int]) -> None:
    """Raise ``FlagError`` where vLLM refuses the quantization for this model, dtype or machine."""
    asked: str | None = given.get("quantization")
    methods = names()["quantization"]
    if asked is not None and asked not in methods:
        raise refusal("--quantization", f"vLLM has no method {asked}", f"give one of {', '.join(methods)}")
    if asked is not None and not model.known:
        return
    if asked is not None and model.quantization is not None and asked != model.quantization:
        reason = f"the checkpoint is {model.quantization}; how vLLM reads it as {asked} is not emulated"
        raise not_emulated("--quantization", "", "leave the flag out", reason=reason)
    method = asked or model.quantization
    if method is None:
        return
    if method in names()["deprecated_quantization"] and not given.get("allow_deprecated_quantization"):
        raise refusal("--quantization", f"vLLM has given up {method}", "give --allow-deprecated-quantization")
    if method not in methods:
        raise refusal("--model", f"vLLM has no quantization {method}", "name another model")
    if model.quantization is None and method not in names()["online_quantization"]:
        raise refusal("--quantization", _BY_CHECKPOINT.format(method), "name a quantized model, or give fp8")
    if model.quantization is None and method in names()["online_shorthands"]:
        method = "online"
    least = names()["quantization_capability"][methods.index(method)]
    if capability[0] * 10 + capability[1] < int(least):
        reason = f"vLLM has {method} from compute capability {least} on"
        raise refusal("--quantization", reason, "name another GPU or model")
    dtypes = names()["quantization_dtypes"][methods.index(method)].split()
    if dtype not in dtypes:
        raise refusal("--dtype", f"vLLM has {method} with {' or '.join(dtypes)}, not {dtype}", "give another")


def cache_dtype(given: Given, model: Model, dtype: str) -> str:
    """Return the KV cache's dtype; raises ``FlagError`` as vLLM would refuse it."""
    asked = str(given.get("kv_cache_dtype", "auto"))
    if asked not in names()["cache_dtypes"]:
        known = ", ".join(names()["cache_dtypes"][:6])
        raise refusal("--kv-cache-dtype", f"vLLM has no KV cache dtype {asked}", f"such as {known}")
    return check_cache("--kv-cache-dtype", (model.cache or "auto") if asked == "auto" else asked, dtype)


def check_cache(flag: str, cache: str, dtype: str, *inside: str) -> str:
    """Return the dtype; raises ``FlagError`` for a float other than the model's."""
    if cache in ("float16", "bfloat16") and cache != dtype:
        raise refusal(flag, f"vLLM refuses {cache} beside a model in {dtype}", "give auto", *inside)
    return cache


def block_size(given: Given) -> int | None:
    """Return the KV cache's block size where a flag gives it."""
    asked: int | None = given.get("block_size")
    if asked is not None and asked < 1:
        raise refusal("--block-size", f"vLLM wants at least 1, got {asked}", "give 16 or more")
    return asked
