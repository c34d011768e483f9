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

ASSUMED_LENGTH = 32768
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
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
    heads = int(text.get("num_attention_heads") or 0)
    width = int(text.get("hidden_size") or 0)
    mla = text.get("kv_lora_rank") is not None
    size = int(text.get("head_dim") or (width // heads if heads else 0) or 128)
    if mla:
        size = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    architectures = config.get("architectures") or [""]
    return Model(
        name=name,
        known=True,
        architecture=str(architectures[0]),
        model_type=str(config.get("model_type") or ""),
        heads=heads,
        kv_heads=1 if mla else int(text.get("num_key_value_heads") or heads),
        head_size=size,
        max_len=int(text.get("max_position_embeddings") or ASSUMED_LENGTH),
        experts=next((int(text[key]) for key in _EXPERTS if text.get(key)), 0),
        mla=mla,
        encoder_decoder=bool(config.get("is_encoder_decoder")),
        vocabulary=int(text.get("vocab_size") or 0),
        mtp_modules=int(text.get("num_nextn_predict_layers") or 0),
    )
