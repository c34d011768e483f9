"""Inputs for the fuzzer that are no documents: plugins, traces, prompts, texts of plans, outputs, and model folders.

Each input is a folder of its own, made from a seed and an index. What uses it may raise ``CapturePlannerError`` only,
may open nothing outside of the folder but installed code, may start no program, and may print no control character.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from capture_planner import codec
from capture_planner.records.plan import Plan
from capture_planner_runner.models.fp8 import quantized

CONTROLS = ("\x1b]0;owned\x07", "\x1b[31m", "\x9b2J", "\u202e", "\u2066", "\x00", "\r", "\x7f", "\u2028", "\U000e0041")
"""What a terminal, or an eye, takes for something else than text."""

_NUMBERS = (0, -1, 1, 2, 3, 7, 33, 10**30, 0.5, float("nan"))
ODD: tuple[Any, ...] = (*_NUMBERS, True, None, "x", "", "../x", [], [1], {}, {"a": 1}, *CONTROLS)
"""Values that no field of a configuration expects."""


@attrs.frozen
class Input:
    """What was written into a folder."""

    made_by: str
    files: tuple[Path, ...] = ()
    must_refuse: bool = False
    """Whether a use that succeeds is a violation: its index leaves the folder, or names what is absent."""
    must_read: bool = False
    """Whether a use that fails is a violation: what is odd in it stands next to what is not."""
    words: tuple[str, ...] = ()


# Plugins ---------------------------------------------------------------------------------------

_ERRORS = (
    *("ValueError('no')", "SystemExit(3)", "Odd('base')", "RecursionError()", "MemoryError()", "Mute()", "OSError(5)"),
    *("GeneratorExit()", "ImportError('\\x1b]0;owned\\x07')", "UnicodeDecodeError('utf-8', b'', 0, 1, '\\u202e')"),
)
_HEAD = """
from capture_planner.plugins import hookimpl
def real(): import capture_planner_reference as r; return r.capture_planner_backends()
class Odd(BaseException): pass
class Mute(Exception):
    def __str__(self): raise ValueError('mute')
class Hidden:
    def __repr__(self): raise ValueError('hidden')
    def __getattr__(self, name): raise ValueError(name)
def fail(error): raise error
class Backend:
    name = 'odd'
    def __init__(self, **changes): self.__dict__.update(changes)
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return getattr(list(real())[0], name)
"""


def plugin(rng: random.Random, folder: Path, index: int) -> Input:
    """Write an installed distribution whose plugin is broken, or a little odd."""
    module = f"odd_plugin_{index}"
    error, call = rng.choice(_ERRORS), rng.choice(("support", "padding", "refresh", "workspace"))
    brings = (
        *("None", "5", "[None]", "['x']", "[Hidden()]", f"(fail({error}) for _ in 'a')", f"fail({error})", "[]"),
        *("real()", "[Backend(name='')]", "[Backend(name='\\x1b[31m')]", "[Backend(name=5)]", "[Backend()]"),
        *("[Backend(), Backend()]", f"[Backend({call}=lambda *_: 3)]", f"[Backend({call}=lambda *_: fail({error}))]"),
        *(f"[Backend({call}=lambda: None)]", f"[Backend({call}=5)]", f"[Backend({call}=lambda *_: Hidden())]"),
    )
    bring = rng.choice(brings)
    hook = rng.choice(("capture_planner_backends",) * 4 + ("capture_planner_engines", "capture_planner_backend", "x"))
    signature = rng.choice(("()",) * 6 + ("(config)", "(*a)"))
    marker = rng.choice(("@hookimpl\n",) * 6 + ("",))
    source = f"{_HEAD}\n{marker}def {hook}{signature}:\n    return {bring}\n"
    made_by = f"{marker.strip()} {hook}{signature}: {bring}"
    if rng.random() < 0.25:
        odd = "def __getattr__(n): raise ValueError(n)"
        source = made_by = _HEAD + rng.choice(("def", "raise " + error, "\0", "import no_such_module", "x = 1", odd))
        made_by = source.rpartition("\n")[2]
    (folder / f"{module}.py").write_text(source, "utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    name = rng.choice((f"odd-plugin-{index}", "capture-planner-reference"))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    value = rng.choice((module,) * 8 + (f"{module}:missing", "no_such_module_either", f"{module}:real"))
    (info / "entry_points.txt").write_text(f"[capture_planner]\nodd = {value}\n", "utf-8")
    return Input(made_by=made_by, words=(module,))


# Requests --------------------------------------------------------------------------------------

_ROWS = "TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,4,3\n0.5,7,2\n1.5,1,1\n"
_LINES = "alpha beta\n\ngamma delta alpha\n"
_OBJECTS = '{"prompt": "alpha beta", "max_new_tokens": 3, "arrival": 0.5}\n{"prompt": "gamma"}\n'
_BITS = (
    *("\0", "\ufeff", "\r", "\r\n", "\n", "\t", ",", ";", '"', "'", "é", "-1", "1e400", "9" * 400, "nan", "inf"),
    *("2023-11-16 18:17:03.97", "2023-11-16T18:17:03Z", "9999-99-99 99:99:99", "null", '"\\ud800"'),
    *("{", "[", "[" * 100_000, *CONTROLS),
)


def changed(rng: random.Random, text: str) -> bytes:
    """Return a text with a few cuts, copies and strange insertions."""
    data = text.encode()
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:at] + data[min(end, at + rng.choice((1, 5, 500))) :]
        elif kind == 1:
            data = data[:end] + data[at:end] * rng.choice((1, 2, 50)) + data[end:]
        elif kind == 2:
            data = data[:at] + rng.randbytes(rng.choice((1, 4))) + data[at:]
        else:
            data = data[:at] + rng.choice(_BITS).encode("utf-8", "surrogatepass") + data[at:]
    return data


def trace(rng: random.Random, folder: Path, index: int) -> Input:
    """Write a trace."""
    file = folder / "trace.csv"
    file.write_bytes(changed(rng, _ROWS))
    return Input(made_by="trace", files=(file,))


def prompts(rng: random.Random, folder: Path, index: int) -> Input:
    """Write a file of prompts, and the folder of a tokenizer."""
    file, text = rng.choice(((folder / "p.txt", _LINES), (folder / "p.jsonl", _OBJECTS)))
    file.write_bytes(changed(rng, text))
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "alpha": 2, "beta": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"})
    if broken := rng.random() < 0.4:
        config = json.dumps(json.loads(config) | {rng.choice(("tokenizer_class", "eos_token", "x")): rng.choice(ODD)})
        if rng.random() < 0.3:
            config = json.dumps(json.loads(config) | {"auto_map": {"AutoTokenizer": ["own.Own", None]}})
            (folder / "own.py").write_text("import os\nos.system('echo executed')\n", "utf-8")
    own = words.to_str()
    (folder / "tokenizer.json").write_bytes(changed(rng, own) if broken and rng.random() < 0.5 else own.encode())
    (folder / "tokenizer_config.json").write_text(config, "utf-8")
    return Input(made_by=f"prompts {file.suffix}{', other tokenizer' if broken else ''}", files=(file, folder))


# Text and outputs ------------------------------------------------------------------------------


def plan_text(rng: random.Random, folder: Path, plan: str) -> Input:
    """Write a plan with control characters in some of its texts."""
    data = json.loads(json.dumps(codec.to_data(codec.loads(plan, Plan))))
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            if isinstance(node[key], str):
                places.append((node, key))
            elif isinstance(node[key], dict | list):
                walk(node[key])

    walk(data)
    shown = ("says", "before", "after", "version", "reason", "formula", "cause")
    likely = [place for place in places if place[1] in shown]
    for _ in range(rng.choice((1, 2, 5))):
        node, key = rng.choice(likely if likely and rng.random() < 0.8 else places)
        at = rng.randrange(len(node[key]) + 1)
        node[key] = node[key][:at] + rng.choice(CONTROLS) + node[key][at:]
    if rng.random() < 0.1:
        data[rng.choice(CONTROLS) + "key"] = 1
    file = folder / "plan.yaml"
    file.write_text(json.dumps(data, ensure_ascii=rng.random() < 0.5), "utf-8")
    return Input(made_by="plan text", files=(file,))


def output(rng: random.Random, folder: Path, spec: str, plan: str) -> Input:
    """Write a spec, and something in the place where a plan is to be written."""
    source, target = folder / "spec.yaml", folder / "out.yaml"
    source.write_text(spec, "utf-8")

    def read_only() -> None:
        target.write_text(plan, "utf-8")
        target.chmod(0o444)

    def long_loop() -> None:
        target.symlink_to("other")
        (folder / "other").symlink_to(target.name)

    def link() -> None:
        (folder / "p.yaml").write_text(plan, "utf-8")
        target.symlink_to("p.yaml")

    kinds: dict[str, Callable[[], object]] = {
        "new": lambda: None,
        "a plan": lambda: target.write_text(plan, "utf-8"),
        "a read-only plan": read_only,
        "a spec": lambda: target.write_text(spec, "utf-8"),
        "a loop": lambda: target.symlink_to(target.name),
        "a long loop": long_loop,
        "a link to nothing": lambda: target.symlink_to("nothing"),
        "a link to no folder": lambda: target.symlink_to("no/such/folder"),
        "a link to a plan": link,
        "a folder": target.mkdir,
        "junk": lambda: target.write_bytes(rng.randbytes(20)),
        "empty": lambda: target.write_bytes(b""),
    }
    kind = rng.choice(list(kinds))
    kinds[kind]()
    odd = ("x" * 300, "", "no/such/file.yaml", "spec.yaml", "spec.yaml/out", "/dev/null", "/dev/full", "-", "\x1b[31m")
    name = rng.choice(
        (str(target),) * 3 + tuple(str(folder / each) if each and each[0] != "/" else each for each in odd)
    )
    command = rng.choice((("plan", str(source), "-e", "cpu"), ("environment",)))
    return Input(made_by=f"{command[0]} -o {kind}", files=(source,), words=(*command, "-o", name))


NUMBERS: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 16,
    "intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
BLOCK = 8, 16
QUANTIZED: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}}
FAMILIES: tuple[Callable[[], Any], ...] = (
    lambda: transformers.LlamaConfig(**NUMBERS),
    lambda: transformers.Qwen3Config(**NUMBERS),
    lambda: transformers.Gemma2Config(**NUMBERS, sliding_window=4),
    lambda: transformers.MixtralConfig(**NUMBERS, num_local_experts=2, num_experts_per_tok=1),
    lambda: transformers.LlamaConfig(**NUMBERS, **QUANTIZED),
    lambda: transformers.Qwen3MoeConfig(**NUMBERS, **QUANTIZED, **EXPERTS),
    lambda: transformers.GraniteMoeHybridConfig(**NUMBERS, **MIXERS),
)
EXPERTS: dict[str, Any] = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "tie_word_embeddings": False,
}  # fmt: skip
MIXERS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0, "shared_intermediate_size": 16,
    "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_d_conv": 2,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
_KEYS = (
    *NUMBERS,
    *("dtype", "torch_dtype", "model_type", "layer_types", "rope_parameters", "rope_scaling", "sliding_window"),
    *("hidden_act", "architectures", "tie_word_embeddings", "quantization_config", "text_config", "auto_map"),
    *("transformers_weights", "rms_norm_eps", "attention_bias", "draft_vocab_size", "eagle_config"),
    "initializer_range",
)


@attrs.frozen
class Checkpoints:
    """Small models, made once in each process: a configuration as JSON, and its tensors."""

    made: tuple[tuple[dict[str, Any], dict[str, torch.Tensor]], ...]

    @classmethod
    def make(cls) -> Checkpoints:
        made, auto = [], cast(Any, transformers.AutoModelForCausalLM)
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
    """Yield the tensors, with linear layers in FP8 and their scales; those of each expert have names of their own."""
    for name, tensor in tensors.items():
        prefix, _, projection = name.rpartition(".")
        if prefix.endswith(".experts"):
            layers = projection.split("_")[:-1]
            parts = {
                f"{prefix}.{number}.{layer}_proj.weight": part
                for number, expert in enumerate(tensor)
                for layer, part in zip(layers, expert.chunk(len(layers)), strict=True)
            }
            yield from _quantized(parts)
        elif name.endswith("_proj.weight"):
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
        first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
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
