"""Model folders for the fuzzer: their configuration, index, weights or code is wrong, or leads elsewhere."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from _fuzz_inputs import CONTROLS, ODD, Input
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MixtralConfig, Qwen3Config

from capture_planner.runtime.models.fp8 import quantized

NUMBERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOCK = 8, 16
QUANTIZED: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}}
FAMILIES: tuple[Callable[[], Any], ...] = (
    lambda: LlamaConfig(**NUMBERS),
    lambda: Qwen3Config(**NUMBERS),
    lambda: Gemma2Config(**NUMBERS, sliding_window=4),
    lambda: MixtralConfig(**NUMBERS, num_local_experts=2, num_experts_per_tok=1),
    lambda: LlamaConfig(**NUMBERS, **QUANTIZED),
)
INDEX = "model.safetensors.index.json"
_KEYS = (
    *NUMBERS,
    *("dtype", "torch_dtype", "model_type", "layer_types", "rope_parameters", "rope_scaling", "sliding_window"),
    *("hidden_act", "architectures", "tie_word_embeddings", "quantization_config", "text_config", "auto_map"),
    *(
        "transformers_weights",
        "rms_norm_eps",
        "attention_bias",
        "draft_vocab_size",
        "eagle_config",
        "initializer_range",
    ),
)


@attrs.frozen
class Checkpoints:
    """Small models, made once in each process: a configuration as JSON, and its tensors."""

    made: tuple[tuple[dict[str, Any], dict[str, torch.Tensor]], ...]

    @classmethod
    def make(cls) -> Checkpoints:
        made, auto = [], cast(Any, AutoModelForCausalLM)
        for family in FAMILIES:
            config = family()
            model = auto.from_config(config, dtype=torch.float32)
            tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
            if getattr(config, "quantization_config", None):
                tensors = dict(_quantized(tensors))
            architecture = {"architectures": [type(model).__name__]}
            made.append((json.loads(config.to_json_string()) | architecture, tensors))
        return cls(tuple(made))


def _quantized(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with those of linear layers in FP8, and their scales."""
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            weight, scale = quantized(tensor, BLOCK)
            yield from ((name, weight), (f"{name}_scale_inv", scale))
        else:
            yield name, tensor


class _Bomb:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("echo executed",)


def model_folder(rng: random.Random, folder: Path, checkpoints: Checkpoints) -> Input:
    """Write a model folder: its configuration, its weights or both are wrong, or neither."""
    base, tensors = rng.choice(checkpoints.made)
    config, names = json.loads(json.dumps(base)), []
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        key = rng.choice((*_KEYS, *config))
        config[key] = rng.choice(ODD)
        names.append(key)
    text = json.dumps(config)
    if rng.random() < 0.05:
        text = rng.choice(
            ("", "{", "[]", "5", "{" * 100_000, '{"a":' * 100_000, text[: rng.randrange(len(text))], "\0")
        )
        names.append("no JSON")
    (folder / "config.json").write_text(text, "utf-8")
    if rng.random() < 0.15:
        config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
        config["model_type"] = rng.choice(("own", config.get("model_type")))
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        (folder / "own.py").write_text("import os\nos.system('echo executed')\n", "utf-8")
        names.append("own code")
    if rng.random() < 0.1:
        wanted = {"base_model_name_or_path": str(folder.parent / "outside"), "peft_type": "LORA"}
        (folder / "adapter_config.json").write_text(json.dumps(wanted), "utf-8")
        names.append("adapter")
    layout, must_refuse = _weights(rng, folder, tensors)
    return Input(made_by=f"{layout}; {', '.join(map(str, names))}", must_refuse=must_refuse)


def _weights(rng: random.Random, folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[str, bool]:
    layout = rng.choice(("none", "single", "shards", "foreign", "absent", "index", "pickle", "broken", "other"))
    names = sorted(tensors)
    half = {name: tensors[name] for name in names[: len(names) // 2]}
    rest = {name: tensors[name] for name in names if name not in half}
    if layout in ("single", "broken", "other"):
        kept = rest if layout == "other" else tensors
        kept = {rng.choice(CONTROLS) + name: item for name, item in kept.items()} if rng.random() < 0.1 else kept
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    if layout == "broken":
        data = bytearray((folder / "model.safetensors").read_bytes())
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(min(len(data), 300))] = rng.randrange(256)
        (folder / "model.safetensors").write_bytes(data[: rng.choice((len(data), 7, 0, len(data) // 2))])
    if layout == "pickle":
        torch.save(tensors, folder / "pytorch_model.bin")
        return layout, True
    if layout in ("shards", "foreign", "absent", "index"):
        first = "model-00001-of-00002.safetensors"
        second = "model-00002-of-00002.safetensors"
        save_file(half, folder / first, metadata={"format": "pt"})
        if layout == "foreign":
            second = rng.choice(_foreign(folder))
            (folder / "0.bin").write_bytes(pickle.dumps(_Bomb()))
            torch.save(rest, folder / "0.dat")
            (folder.parent / "outside").mkdir(exist_ok=True)
            save_file(rest, folder.parent / "outside" / "s.safetensors", metadata={"format": "pt"})
        elif layout != "absent":
            save_file(rest, folder / second, metadata={"format": "pt"})
        index = json.dumps({"weight_map": dict.fromkeys(half, first) | dict.fromkeys(rest, second)})
        if layout == "index":
            maps: tuple[Any, ...] = ({}, None, [], {"a": 5}, {"a": None}, {"a": ""}, {"a": "."}, "x")
            index = rng.choice(("", "{", "[" * 100_000, "5", *(json.dumps({"weight_map": each}) for each in maps)))
        (folder / INDEX).write_text(index, "utf-8")
    return layout, layout in ("foreign", "absent", "index")


def _foreign(folder: Path) -> tuple[str, ...]:
    """Return names of shards that no index may have."""
    outside = folder.parent / "outside" / "s.safetensors"
    return (
        *("0.bin", "0.dat", "../outside/s.safetensors", str(outside), "/etc/passwd", "../../../etc/passwd", ""),
        *("./../outside/s.safetensors", "x/../../outside/s.safetensors", "..", ".", "\x1b[31m.safetensors", "a\0b"),
        *("..\\outside\\s.safetensors", "0.bin.safetensors/../0.bin", "http://localhost/s.safetensors"),
    )
