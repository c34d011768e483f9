"""What vLLM's settings take from a model: read from a local folder's ``config.json``, or assumed.

Nothing is downloaded. A model that is not a local folder counts as a dense decoder of ``ASSUMED_LENGTH``
tokens with grouped-query attention; the settings say so with the source ``assumed``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from capture_planner.engines.vllm.flags import refusal
from capture_planner.engines.vllm.parts import names

ASSUMED_LENGTH = 32768
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE whose length the file already has scaled."""
_TABLES = ("default", "linear", "llama3", "ntk", "proportional")
"""Kinds of RoPE that a longer table of positions suffices for."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@attrs.frozen(kw_only=True)
class Model:
    """The facts of one model; ``known`` where they come from its own file."""

    name: str
    known: bool = False
    architecture: str = ""
    model_type: str = ""
    heads: int = 0
    """Attention heads, or 0 where they are not known."""
    kv_heads: int = 0
    head_size: int = 128
    max_len: int = ASSUMED_LENGTH
    experts: int = 0
    mla: bool = False
    encoder_decoder: bool = False
    vocabulary: int = 0
    mtp_modules: int = 0
    """Modules for multi-token prediction that the checkpoint ships."""
    dtype: str = "bfloat16"
    """As the file has it; float32 where it says nothing."""
    quantization: str | None = None
    """The method by which the checkpoint is quantized."""
    cache: str | None = None
    """The KV cache dtype that the checkpoint asks for."""
    nope_size: int = 128
    """Of MLA's heads, the part without positions."""
    sinks: bool = False
    """Whether attention has sinks."""
    soft_cap: bool = False
    """Whether attention logits are capped."""
    chunked: bool = False
    """Whether attention is cut into chunks, which no graph captures."""
    recurrent: bool = False
    """Whether some layers keep a state in place of a KV cache (Mamba, gated delta nets)."""
    multimodal: bool = False
    causal: bool = False
    """Whether every layer of a parallel draft sees earlier tokens only."""
    anchored: bool = True
    """Whether a DSpark draft's first token is drafted too, so that K tokens make a pass."""
    block: int = 0
    """The tokens that a DSpark draft is made for."""
    stretches: bool = True
    """Whether positions beyond the file's only need a longer table (not so for YaRN)."""
    limit: int = ASSUMED_LENGTH
    """The longest ``--max-model-len`` that is taken."""
    odd: str | None = None
    """What the model has that is not emulated."""

    @property
    def source(self) -> str:
        return "model" if self.known else "assumed"


def read_model(flag: str, name: str) -> Model:
    """Return the facts of a model by folder or name; raises ``FlagError`` for a broken ``config.json``."""
    file = Path(name) / "config.json"
    if not file.is_file():
        if Path(name).is_dir():
            raise refusal(flag, f"vLLM finds no config.json in {name}", "name the folder of a model")
        return Model(name=name)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return _from_config(name, config)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise refusal(flag, f"vLLM cannot read {file}: {error}", "give a model's own config.json") from error


def _from_config(name: str, config: dict[str, Any]) -> Model:
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, dict) else config
    heads = int(text.get("num_attention_heads") or text.get("encoder_attention_heads") or 0)
    width = int(text.get("hidden_size") or text.get("d_model") or 0)
    kind = str(text.get("model_type") or "")
    mla = text.get("kv_lora_rank") is not None and kind in names()["mla_types"]
    quantized = config.get("quantization_config") or text.get("quantization_config") or {}
    size = int(text.get("head_dim") or (width // heads if heads else 0) or 128)
    if mla:
        size = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    architectures = config.get("architectures") or [""]
    model_type = str(config.get("model_type") or "")
    return Model(
        name=name,
        known=True,
        architecture=str(architectures[0]),
        model_type=model_type,
        heads=heads,
        kv_heads=1 if mla else int(text.get("num_key_value_heads") or heads),
        head_size=size,
        max_len=_length(text, model_type)[0],
        experts=next((int(text[key]) for key in _EXPERTS if text.get(key)), 0),
        mla=mla,
        encoder_decoder=bool(config.get("is_encoder_decoder")),
        vocabulary=int(text.get("vocab_size") or 0),
        mtp_modules=int(text.get("num_nextn_predict_layers") or 0),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch."),
        quantization=quantized.get("quant_method"),
        cache=_cache(quantized),
        nope_size=int(text.get("qk_nope_head_dim") or 1),
        sinks=_sinks(str(architectures[0]), text),
        soft_cap=bool(text.get("attn_logit_softcapping")),
        chunked=text.get("attention_chunk_size") is not None,
        recurrent=str(architectures[0]) in names()["hybrids"] and _has_state(config),
        odd=_odd(name, str(architectures[0]), config, text),
        multimodal=str(architectures[0]) in names()["multimodal"],
        causal=_causal(text),
        anchored=bool(text.get("sample_from_anchor", True)),
        block=int(text.get("block_size") or text.get("dspark_block_size") or 0),
        stretches=_rope(text) in _TABLES,
        limit=_length(text, model_type)[1],
    )


def _cache(quantized: dict[str, Any]) -> str | None:
    """Return the KV cache dtype of a quantized checkpoint."""
    scheme = quantized.get("kv_cache_scheme")
    if not str(quantized.get("quant_method") or "").startswith("modelopt"):
        return "fp8" if scheme is not None and quantized.get("quant_method") == "compressed-tensors" else None
    inner = quantized.get("quantization") or quantized
    asked = inner.get("kv_cache_scheme") or scheme
    asked = asked or inner.get("kv_cache_quant_algo") or quantized.get("kv_cache_quant_algo")
    if isinstance(asked, dict):
        is_float, bits = asked.get("type") == "float", asked.get("num_bits")
        if is_float and bits == 8 and asked.get("dynamic") is False:
            return "fp8_e4m3"
        return "nvfp4" if is_float and bits == 4 else None
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(asked).lower())


def _sinks(architecture: str, text: dict[str, Any]) -> bool:
    if architecture not in (*names()["sinks"], "GraniteMoeSWAForCausalLM"):
        return False
    granite = architecture.startswith("Granite")
    return not granite or bool(text.get("attention_sinks", text.get("layer_types") is not None))


def _has_state(config: dict[str, Any]) -> bool:
    kinds = config.get("layer_types")
    return kinds is None or not all(kind in ("attention", "full_attention") for kind in kinds)


def _rope(text: dict[str, Any]) -> str:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _causal(text: dict[str, Any]) -> bool:
    """Say whether every layer of a DFlash draft sees earlier tokens only."""
    asked = text.get("is_causal")
    if asked is None:
        asked = (text.get("dflash_config") or {}).get("causal")
    if asked is not None:
        return bool(asked)
    kinds = text.get("layer_types") or [""]
    return all(kind == "sliding_attention" for kind in kinds)


def _length(text: dict[str, Any], model_type: str) -> tuple[int, int]:
    """Return the length that vLLM starts from, and the longest that it takes."""
    given = [int(text[key]) for key in _LENGTHS if text.get(key) is not None]
    own: float = min(given, default=2048)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = _rope(text)
    if kind not in _SCALED and "gemma3" not in model_type:
        own *= rope.get("factor") or 1
    first = int(text.get("original_max_position_embeddings") or own) if kind == "longrope" else int(own)
    return first, max(int(own), int(text.get("model_max_length") or 0))


def _odd(name: str, architecture: str, config: dict[str, Any], text: dict[str, Any]) -> str | None:
    """Return what is not emulated of a model, or None where it counts as a decoder."""
    inner = str((text.get("architectures") or [""])[0]) if text is not config else ""
    known = (*names()["decoders"], *names()["hybrids"], *names()["multimodal"], "")
    for each in (architecture, inner):
        if each not in known:
            return f"the architecture {each}"
    if config.get("model_type") in names()["prefix_types"] and architecture in names()["multimodal"]:
        return "attention that sees images in both directions"
    keys = {
        "index_topk": "sparse attention",
        "dual_chunk_attention_config": "dual chunk attention",
        "block_configs": "layers of different shapes",
        "rswa_window": "a window over generated tokens",
    }
    for key, what in keys.items():
        if text.get(key) is not None:
            return what
    if text.get("is_causal") is False:
        return "attention in both directions"
    told = text.get("num_attention_heads") or text.get("encoder_attention_heads")
    if architecture in names()["multimodal"] and not told:
        return "a text model that config.json does not describe as text_config"
    return "pooling by modules.json" if (Path(name) / "modules.json").is_file() else None
