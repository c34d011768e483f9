"""Models of the library: a configuration read or made, and weights loaded without a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from capture_planner.errors import RunError
from capture_planner.records.model import Model
from capture_planner_runner.models.fp8 import FP8
from capture_planner_runner.models.fp8_folders import Fp8Format
from capture_planner_runner.models.interface import SUPPORTED
from capture_planner_runner.models.loading import Source, StoredTensor, read_tensors


def llama_of(shape: Model) -> LlamaConfig:
    if shape.latent is not None or shape.sinks or not shape.causal or shape.head_dim % 2:
        raise RunError(
            f"model {shape.name}: no random model is made with latent attention, sinks, attention that is not "
            "causal, or an odd head_dim; give a folder, or a configuration"
        )
    hidden = shape.hidden_size or shape.num_heads * shape.head_dim
    return LlamaConfig(
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        vocab_size=shape.vocab_size or 256,
        max_position_embeddings=shape.max_model_len,
        tie_word_embeddings=False,
    )


def read_configuration(found: Source) -> PreTrainedConfig:
    """Read a configuration; code next to it is not run, and no question about it is put on the terminal."""
    stated = found.read_config()
    if stated.get("auto_map") and stated.get("model_type") not in CONFIG_MAPPING:
        raise RunError(f"{found.config}: its model is code next to it, which is not run; {SUPPORTED}")
    config: PreTrainedConfig = AutoConfig.from_pretrained(found.config, trust_remote_code=False)
    return config


def taken_quantization(config: PreTrainedConfig) -> object:
    """Take ``quantization_config`` out of a configuration, and return it; None where it states nothing.

    The library would choose a quantizer by it, which needs kernels that are downloaded.
    """
    stated = [vars(each).pop("quantization_config", None) for each in (config, config.get_text_config(decoder=True))]
    return next((each for each in stated if each is not None), None)


def pretrained(
    factory: Any, found: Source, config: PreTrainedConfig, options: dict[str, Any], fp8: Fp8Format | None
) -> PreTrainedModel:
    """Load weights; the library would make up those that are missing.

    It is given tensors, not the folder: there it would follow the index, an adapter's configuration or a file name in
    config.json to other folders and to pickled weights.
    """
    folder = found.config.parent
    stored = read_tensors(found.files)
    tensors = _plain(stored) if fp8 is None else fp8.tensors(stored)
    # Without memory: only its class and its completed configuration are needed.
    with torch.device("meta"):
        alike = factory.from_config(config, **options)
    kind: Any = type(alike) if fp8 is None else fp8.kind(type(alike))
    with _no_progress_bars():
        model, loading = kind.from_pretrained(
            None, config=alike.config, state_dict=tensors, local_files_only=True, output_loading_info=True, **options
        )
    if fp8 is not None:
        fp8.refuse_others(folder, model, loading["missing_keys"], loading["unexpected_keys"])
    missing = sorted(loading["missing_keys"])
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise RunError(f"{folder}: its safetensors lack {listed}; they do not belong to config.json")
    loaded: PreTrainedModel = model
    return loaded


def _plain(stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by name. Raises ``RunError`` for one in FP8, whose scales the library would leave out."""
    for name, item in stored.items():
        if item.tensor.dtype is FP8:
            raise RunError(
                f"{item.file}: {name} is FP8, and config.json has no quantization_config; take both from one folder"
            )
    return {name: item.tensor for name, item in stored.items()}


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Leave standard error to our own progress bars; transformers has a switch for the whole process."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
