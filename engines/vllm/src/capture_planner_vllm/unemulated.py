"""What vLLM takes and is not emulated, although it decides about graphs: refused, never answered as plain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capture_planner.engines.parsing import unfollowed
from capture_planner.errors import NotEmulated

if TYPE_CHECKING:  # both refuse by what is here
    from capture_planner_vllm.flags import Given
    from capture_planner_vllm.model import Model

_REASON = "vLLM takes it, and its graphs are not emulated"

_FLAGS: dict[str, tuple[Any, ...]] = {
    "prefill_context_parallel_size": (1,),
    "diffusion_config": (None,),
    "watermark_config": (None,),
    "model_class_overrides": (None, "{}"),
    "mm_encoder_only": (False,),
    "hf_config_path": (None,),
    "runner": ("auto", "generate", "pooling"),
    "model_impl": ("auto", "vllm"),
    "use_replayssm": (False,),
    "enable_hc_sp": (False,),
    "enable_batch_sharded_sampling": (False,),
    "engram_config": (None,),
    "kv_sharing_fast_prefill": (False,),
    "pooler_config": (None,),
    "kv_cache_dtype_skip_layers": (None, []),
    "disable_sliding_window": (False,),
    "worker_cls": ("auto",),
    "distributed_executor_backend": (None, "mp", "ray", "uni"),
}
"""Flags with the values of theirs that change nothing."""
_ALL2ALL = ("moonep",)
_INSIDE: dict[str, dict[str, tuple[Any, ...]]] = {
    "attention_config": {
        "backend_per_kind": (None, {}),
        "hisparse_config": (None,),
        "use_non_causal": (None, False, "false"),
    },
    "compilation_config": {"cudagraph_mm_encoder": (None, False, "false")},
    "profiler_config": {"profiler": (None, "torch", "cuda")},
}
"""The same for parts of JSON flags."""


def not_emulated(flag: str, what: str, remedy: str, *inside: str | int, reason: str = _REASON) -> NotEmulated:
    """Return the error for ``what`` a flag asks for, with a place inside its JSON value where there is one."""
    return unfollowed(flag, f"{reason}: {what}" if what else reason, remedy, *inside)


def unemulated(given: Given, model: Model) -> None:
    """Raise ``NotEmulated`` for the first flag or model that is taken by vLLM and not emulated."""
    for name, plain in _FLAGS.items():
        if given.get(name, plain[0]) not in plain:
            raise _refused(name)
    if given.get("all2all_backend") in _ALL2ALL:
        raise _refused("all2all_backend")
    for name, parts in _INSIDE.items():
        value = given.get(name)
        for part, plain in parts.items():
            if isinstance(value, dict) and value.get(part) not in plain:
                raise _refused(name, part)
    if given.get("hf_overrides") not in (None, "{}") and model.known:
        raise _refused("hf_overrides", remedy="write the values into the model's config.json")
    if given.get("runner") == "generate" and given.get("convert", "auto") not in ("auto", "none"):
        raise _refused("convert")
    if model.odd is not None:
        remedy = "name a decoder, or leave the folder out: a name alone counts as one"
        raise not_emulated("--model", model.odd, remedy)


def _refused(name: str, *inside: str, remedy: str = "leave it out") -> NotEmulated:
    return not_emulated(f"--{name.replace('_', '-')}", "", remedy, *inside)
