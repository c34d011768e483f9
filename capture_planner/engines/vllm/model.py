"""What vLLM's settings take from a model: read from its ``config.json``, or assumed.

A model that is neither a local folder nor a known one counts as a dense decoder of ``ASSUMED_LENGTH`` tokens
with grouped-query attention; the settings say so with the source ``assumed``.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from capture_planner.engines import checkpoints
from capture_planner.engines.checkpoints import ASSUMED, Checkpoint
from capture_planner.engines.vllm.flags import refusal
from capture_planner.engines.vllm.parts import names
from capture_planner.errors import FlagError

ASSUMED_LENGTH = 32768
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
COUNTS_AS = f"a dense decoder of {ASSUMED_LENGTH} tokens"
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_LENGTH_LEFT_OUT = 2048
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embedding whose factor the stated length has in it."""


@attrs.frozen(kw_only=True)
class Model:
    """The facts of one model, and where they come from."""

    name: str
    source: str = ASSUMED
    architecture: str = ""
    model_type: str = ""
    heads: int = 0
    """Attention heads, or 0 where they are not known."""
    kv_heads: int = 0
    head_size: int = 128
    max_len: int = ASSUMED_LENGTH
    """Tokens of the longest sequence where no flag says it."""
    longest: int = ASSUMED_LENGTH
    """Tokens of the longest sequence that a flag may ask for."""
    experts: int = 0
    mla: bool = False
    encoder_decoder: bool = False
    vocabulary: int = 0
    mtp_modules: int = 0
    """Modules for multi-token prediction that the checkpoint ships."""

    @property
    def known(self) -> bool:
        return self.source != ASSUMED

    def refusal(self, flag: str, reason: str, remedy: str, *inside: str | int) -> FlagError:
        """Return the error of a flag that the model's facts rule out; it says so where they are assumed."""
        if not self.known:
            reason = f"{checkpoints.assumption(self.name, COUNTS_AS)}; {reason}"
            remedy = f"name a folder with its config.json{f', or {remedy}' if remedy else ''}"
        return refusal(flag, reason, remedy, *inside)


def read_model(flag: str, name: str) -> Model:
    """Return the facts of a model by folder or name; raises ``FlagError`` for a broken ``config.json``."""
    try:
        checkpoint = checkpoints.find(name)
        return _from_config(checkpoint) if checkpoint.source != ASSUMED else Model(name=name)
    except FileNotFoundError as error:
        raise refusal(flag, f"vLLM finds no config.json in {name}", "name the folder of a model") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        file = Path(name) / "config.json"
        raise refusal(flag, f"vLLM cannot read {file}: {error}", "give a model's own config.json") from error


def _from_config(checkpoint: Checkpoint) -> Model:
    config, text = checkpoint.config, checkpoint.text
    heads = int(text.get("num_attention_heads") or 0)
    width = int(text.get("hidden_size") or 0)
    size = int(text.get("head_dim") or (width // heads if heads else 0) or 128)
    mla = text.get("model_type") in names()["latent_types"] and text.get("kv_lora_rank") is not None
    if mla:
        size = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    architectures = config.get("architectures") or [""]
    max_len, longest = _lengths(checkpoint)
    return Model(
        name=checkpoint.name,
        source=checkpoint.source,
        architecture=str(architectures[0]),
        model_type=str(config.get("model_type") or ""),
        heads=heads,
        kv_heads=1 if mla else next((int(text[key]) for key in _KV_HEADS if text.get(key)), heads),
        head_size=size,
        max_len=max_len,
        longest=longest,
        experts=next((int(text[key]) for key in _EXPERTS if text.get(key)), 0),
        mla=mla,
        encoder_decoder=bool(config.get("is_encoder_decoder")),
        vocabulary=int(text.get("vocab_size") or 0),
        mtp_modules=int(text.get("num_nextn_predict_layers") or 0),
    )


def _lengths(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the longest sequence by default, and the longest that may be asked for."""
    text = checkpoint.text
    stated = [text[key] for key in _LENGTHS if text.get(key) is not None]
    longest = text.get("model_max_length") or min(stated, default=_LENGTH_LEFT_OUT)
    kinds = [rope["rope_type"] for rope in checkpoint.rope]
    if "gemma3" not in str(text.get("model_type")):
        factors = [
            rope.get("factor", 1) for rope in checkpoint.rope if rope["rope_type"] not in _SCALED_ALREADY
        ]
        longest = int(longest * ((factors or [1])[-1] or 1))
    if "longrope" in kinds or "su" in kinds:
        return int(text.get("original_max_position_embeddings") or longest), int(longest)
    return int(longest), int(longest)
