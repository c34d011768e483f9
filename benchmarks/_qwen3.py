"""Qwen3-0.6B's shape: what the scripts for a GPU run, with random weights."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3Config

from capture_planner.records._base import replace
from capture_planner.records.model import DataType, Model

DRAFT_VOCABULARY = 32000
"""What published EAGLE-3 heads of Qwen3 have."""

RATES = (0.69, 0.48, 0.33)
"""Synthetic acceptance of drafts 0 to 2: 2.5 tokens a step, as benchmarks/drafter_graphs.py has by chance."""


def shape(*, max_model_len: int, dtype: DataType = DataType.BFLOAT16) -> Model:
    """Return the model as a spec has it, for sequences of at most ``max_model_len`` tokens."""
    return Model(
        name="Qwen3-0.6B shape",
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        hidden_size=1024,
        vocab_size=151936,
        max_model_len=max_model_len,
        dtype=dtype,
    )


def tiny(model: Model) -> Model:
    """Return the model shrunk, to try a script on a CPU."""
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "hidden_size": 16}
    return replace(model, **sizes, vocab_size=61, max_model_len=64)


def qwen3_config(model: Model) -> Qwen3Config:
    """Return transformers' configuration of a model of this shape."""
    return Qwen3Config(
        vocab_size=model.vocab_size or 0,
        hidden_size=model.hidden_size or 0,
        intermediate_size=3072,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=40960,
        architectures=["Qwen3ForCausalLM"],
    )


def write_config(model: Model, folder: Path) -> None:
    """Write the config.json of a model of this shape."""
    qwen3_config(model).save_pretrained(folder)
