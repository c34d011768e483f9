"""vLLM's own configuration and layers for one attention group, without a model and without weights.

Made of ``EngineArgs`` and a folder with a ``config.json`` of the group's shape, as vLLM reads it. Import it where vLLM
is installed.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config  # type: ignore[import-not-found, unused-ignore]
from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found, unused-ignore]
from vllm.model_executor.layers.attention import Attention  # type: ignore[import-not-found, unused-ignore]

from capture_planner.modes import GraphMode
from capture_planner.plugins.backend import Attention as AttentionFacts
from capture_planner.plugins.backend import Reservation
from capture_planner.records.batch import Entry


def configuration(reservation: Reservation, engine: str) -> Any:
    """Return a ``VllmConfig`` whose graphs are the entries of the reservation.

    The sizes, the mode, and the number of drafts are as vLLM has them when its runner makes the metadata builders.
    """
    model, entries = reservation.attention, reservation.entries
    base = _base(model, reservation.page_size, engine)
    sizes = sorted({entry.num_tokens for entry in entries})
    limits = reservation.limits
    drafts = model.max_query_len - 1
    # What layers and builders read of the speculation; its own configuration needs a drafter's checkpoint.
    speculation = SimpleNamespace(
        num_speculative_tokens=drafts, parallel_drafting=False, enable_adaptive_verification=False
    )
    return _changed(
        base,
        scheduler_config=_changed(
            base.scheduler_config, max_num_seqs=limits.max_num_reqs, max_num_batched_tokens=limits.max_num_tokens
        ),
        compilation_config=_changed(
            base.compilation_config,
            cudagraph_mode=CUDAGraphMode[_mode(entries).value],
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=sizes[-1] if sizes else 0,
            # Of its own: vLLM refuses a layer's name that a context has already.
            static_forward_context={},
        ),
        speculative_config=speculation if drafts else None,
    )


def layers_of(reservation: Reservation, config: Any) -> dict[int, Any]:
    """Return vLLM's ``Attention`` layer for each layer of the group, as a model's constructor makes them."""
    model = reservation.attention
    with _making(config, reservation):
        return {
            layer: Attention(
                model.num_heads,
                model.head_dim,
                1 / math.sqrt(model.head_dim),
                model.num_kv_heads,
                cache_config=config.cache_config,
                per_layer_sliding_window=model.window,
                prefix=f"model.layers.{layer}.self_attn.attn",
            )
            for layer in reservation.caches
        }


def builder_of(reservation: Reservation, config: Any, layers: dict[int, Any]) -> Any:
    """Return vLLM's metadata builder of the group."""
    first = next(iter(layers.values()))
    with _making(config, reservation):
        spec = first.get_kv_cache_spec(config)
        names = [layer.layer_name for layer in layers.values()]
        return first.get_attn_backend().get_builder_cls()(spec, names, config, reservation.device)


@contextmanager
def _making(config: Any, reservation: Reservation) -> Iterator[None]:
    """Make layers as vLLM's model loader does: under the configuration, on the device, in the model's dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, reservation.attention.dtype.value))
    try:
        with set_current_vllm_config(config), reservation.device:
            yield
    finally:
        torch.set_default_dtype(before)


def _mode(entries: Sequence[Entry]) -> GraphMode:
    """Return the mode that captures such entries."""
    full = [entry for entry in entries if entry.mode is GraphMode.FULL]
    if any(entry.mode is GraphMode.PIECEWISE for entry in entries):
        return GraphMode.FULL_AND_PIECEWISE if full else GraphMode.PIECEWISE
    if not full:
        return GraphMode.NONE
    return GraphMode.FULL_DECODE_ONLY if all(entry.query_len for entry in full) else GraphMode.FULL


def _base(model: AttentionFacts, page_size: int, engine: str) -> Any:
    """Return vLLM's configuration for layers of that shape, made once in a process."""
    # What a role's entries and limits decide is changed in a copy, so that these few numbers are the key.
    shape = (model.num_heads, model.num_kv_heads, model.head_dim, model.max_model_len, model.dtype.value)
    return _made(shape, page_size, engine)


@functools.lru_cache(maxsize=64)
def _made(shape: tuple[int, int, int, int, str], page_size: int, engine: str) -> Any:
    heads, kv_heads, head_dim, longest, dtype = shape
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": heads * head_dim,
        # Attention reads neither this nor the vocabulary, and no weights are made.
        "intermediate_size": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": longest,
        "torch_dtype": dtype,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(facts), encoding="utf-8")
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=dtype,
            max_model_len=longest,
            max_num_seqs=8,  # any number: each reservation sets its own
            max_num_batched_tokens=max(longest, 64),
            block_size=page_size,
            attention_backend=engine,
            enforce_eager=False,
        )
        return arguments.create_engine_config()


def _changed(record: Any, **fields: Any) -> Any:
    """Return a copy with other fields: vLLM's own ``replace`` would resolve all others anew."""
    made = copy.copy(record)
    vars(made).update(fields)
    return made
