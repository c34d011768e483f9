"""A commented spec from a model's configuration; nothing is guessed silently."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from capture_planner import codec
from capture_planner.errors import CapturePlannerError, InvalidValue
from capture_planner.records.spec import Spec

ASSUMED = "not in the configuration; assumed"

# Our field, and the names that configurations have for it.
_SIZES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "max_model_len": ("max_position_embeddings", "n_positions"),
    "hidden_size": ("hidden_size", "n_embd"),
    "vocab_size": ("vocab_size",),
}

_TEMPLATE = Path(__file__).with_name("spec_template.txt")

_UNKNOWN_WINDOW = """
# The configuration has sliding_window {window}, but not which layers use it: all are planned with full attention.
# roles: {{target: {{groups: [{{name: full, layers: 1}}, {{name: sliding, layers: {rest}, window: {window}}}]}}}}
"""


def find_config(argument: str) -> tuple[Path, str]:
    """Return a config.json, by file, folder or cached name, and its model's name; raises ``CapturePlannerError``."""
    path = Path(argument)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CapturePlannerError(f"{argument}: the folder has no config.json")
        return path / "config.json", path.resolve().name
    if path.exists():
        # Every model's file has this name, so the folder names the model.
        return path, path.resolve().parent.name if path.name == "config.json" else path.stem
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(argument, "config.json")
        reason = f"not in the local Hugging Face cache; download it with `hf download {argument} config.json`"
    except ImportError:
        cached, reason = None, "huggingface_hub is not installed to look into its cache; install it"
    except ValueError:  # a path that can be no name
        cached, reason = None, "not the name of a Hugging Face model; name one"
    if not isinstance(cached, str):
        raise CapturePlannerError(f"{argument}: no such file or folder, and {reason}, or give a config.json")
    return Path(cached), argument


def spec_from_config(path: Path, name: str) -> str:
    """Return the text of a spec for the model whose configuration is at ``path``.

    Raises ``CapturePlannerError`` where that cannot be read, lacks a value, or describes what no spec can.
    """
    try:
        config = json.loads(codec.read(path))
    # Deeply nested JSON ends in a RecursionError.
    except (ValueError, RecursionError) as error:
        raise CapturePlannerError(f"{path}: not JSON: {error}; give a model's config.json") from None
    try:
        if not isinstance(config, dict):
            raise CapturePlannerError("expected an object, as in a model's config.json")
        text = spec_text(config, path.name, name)
        codec.loads(text, Spec)
        return text
    except InvalidValue as error:  # values that no spec can have, such as heads that do not divide
        raise InvalidValue(attrs.evolve(p, file=str(path), line=None, column=None) for p in error.problems) from None
    except CapturePlannerError as error:
        raise CapturePlannerError(f"{path}: {error}") from None


def spec_text(config: dict[str, Any], source: str, name: str) -> str:
    """Return the text of a spec for a model's configuration, which is from ``source``.

    Raises ``CapturePlannerError`` where it lacks a value, or describes what no spec can.
    """
    nested = config.get("text_config")  # of multimodal models
    text = config | nested if isinstance(nested, dict) else config
    if text.get("is_encoder_decoder"):
        raise CapturePlannerError("an encoder-decoder model, which a spec cannot describe")
    if state := sorted(key for key in text if key.startswith(("mamba_d_", "ssm_", "state_size"))):
        message = f"{state[0]}: recurrent layers, whose state no number of the configuration gives in all architectures"
        raise CapturePlannerError(f"{message}; write the spec by hand, with model.recurrent")
    sizes = {field: _size(text, *keys) for field, keys in _SIZES.items()}
    heads, width = sizes["num_heads"], sizes["hidden_size"]
    lines = [f"name: {json.dumps(name)}", *(f"{field}: {size}" for field, size in sizes.items())]
    lines.append(f"num_kv_heads: {_or_assumed(text, 'num_key_value_heads', heads, 'num_heads')}")
    draft = "{method: eagle3, num_tokens: 3}  # or method: eagle"
    # Checkpoints of such models contain the MTP layers (DeepSeek-V3).
    mtp = text.get("num_nextn_predict_layers")
    if text.get("kv_lora_rank") is not None:
        rank, rope = _size(text, "kv_lora_rank"), _size(text, "qk_rope_head_dim")
        latent = f"{{kv_lora_rank: {rank}, rope_head_dim: {rope}}}"
        lines += [f"head_dim: {_size(text, 'v_head_dim')}", f"latent: {latent}  # one vector per token"]
        draft = f"{{method: mtp, num_tokens: 1, model: {{latent: {latent}}}}}" if mtp else draft
    else:
        lines.append(f"head_dim: {_or_assumed(text, 'head_dim', width // heads, 'hidden_size / num_heads')}")
        draft = "{method: mtp, num_tokens: 1}" if mtp else draft
    # Older releases of transformers write torch_dtype.
    dtype = text.get("dtype") or text.get("torch_dtype")
    lines.append(f"dtype: {dtype}" if dtype in ("bfloat16", "float16", "float32") else f"dtype: bfloat16  # {ASSUMED}")
    if text.get("model_type") == "gpt_oss":
        lines.append("sinks: true  # gpt-oss has learned attention sinks")
    lines += _recurrent(text, sizes["num_layers"])
    if any("mrope_section" in str(text.get(key)) for key in ("rope_scaling", "rope_parameters")):
        lines.append("mrope: true  # positions have three sections")
    model, roles = "\n".join(f"  {line}" for line in lines), _roles(text, sizes["num_layers"])
    return _TEMPLATE.read_text(encoding="utf-8").format(
        name=name, source=source, model=model, speculative=draft, roles=roles
    )


def _recurrent(config: dict[str, Any], num_layers: int) -> Iterator[str]:
    """Yield the line of a gated delta net's recurrent layers, if the model has some, as Qwen3-Next has.

    A state has a matrix for each value head, and the last inputs of a convolution over queries, keys and values.
    """
    kinds, every = config.get("layer_types"), config.get("full_attention_interval")
    if isinstance(kinds, list):
        layers = kinds.count("linear_attention")
    else:
        layers = 0 if every is None else num_layers - num_layers // _size(config, "full_attention_interval")
    if not layers:
        return
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    key_heads, key, value_heads, value = (_size(config, name) for name in names)
    inputs = (2 * key_heads * key + value_heads * value) * (_size(config, "linear_conv_kernel_dim") - 1)
    state = 4 * value_heads * key * value + 2 * inputs
    yield f"recurrent: {{layers: {layers}, state: {state}}}  # bytes, {ASSUMED}: float32, the convolution bfloat16"


def _size(config: dict[str, Any], *keys: str) -> int:
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        raise CapturePlannerError(f"the configuration has no {keys[0]}; add it, or write the spec by hand")
    value = config[key]
    # JSON's true is an int in Python too, but no size.
    if type(value) is not int or value < 1:
        raise CapturePlannerError(f"{key}: expected a whole number of at least 1, got {json.dumps(value)}")
    return value


def _or_assumed(config: dict[str, Any], key: str, default: int, meaning: str) -> str:
    """Return a size of the configuration, or the usual default with a comment that says so."""
    return f"{default}  # {ASSUMED} to be {meaning}" if config.get(key) is None else str(_size(config, key))


def _roles(config: dict[str, Any], num_layers: int) -> str:
    """Return the attention groups of a model with sliding windows; nothing for one group of full attention."""
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if isinstance(kinds, list) and (
        other := set(map(str, kinds)) - {"full_attention", "sliding_attention", "linear_attention"}
    ):
        raise CapturePlannerError(f"layer_types: a spec cannot describe {', '.join(sorted(other))}")
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ""
    window = _size(config, "sliding_window")
    if isinstance(kinds, list):
        sliding = kinds.count("sliding_attention")
    elif pattern is not None:  # every so many layers, one has full attention
        sliding = num_layers - num_layers // _size(config, "sliding_window_pattern")
    elif config.get("use_sliding_window") and config.get("max_window_layers") is not None:
        sliding = max(0, num_layers - _size(config, "max_window_layers"))
    else:
        return _UNKNOWN_WINDOW.format(window=window, rest=num_layers - 1)
    groups = {"full": (num_layers - sliding, ""), "sliding": (sliding, f", window: {window}")}
    rows = ", ".join(f"{{name: {name}, layers: {n}{more}}}" for name, (n, more) in groups.items() if n)
    comment = "# Layers that share a KV layout form an attention group; a graph needs every group prepared."
    return f"\n{comment}\nroles: {{target: {{groups: [{rows}]}}}}\n" if sliding else ""
