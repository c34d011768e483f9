"""SGLang 0.5.23's command line: which flags are read, and how they are parsed.

The parser is ``argparse`` as SGLang's is, with the same names, so that an abbreviation is taken or
ambiguous just as there: the flags of older releases, ``--cuda-graph-bs`` and ``--cuda-graph-max-bs``, now
fit two names each and are refused.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

from capture_planner.engines.parsing import Parser, did_you_mean, names, not_json, refusal
from capture_planner.engines.yaml_files import as_words, read_flags
from capture_planner.errors import NotEmulated, Problem
from capture_planner_sglang.names import CHOICES, INERT, NOT_FOLLOWED

ATTENTION_BACKENDS = ("fa3", "fa4", "flashinfer", "triton", "trtllm_mha", "torch_native", "flex_attention")
"""Those of ordinary decoders on CUDA devices; the others are for other attention or other hardware."""

_OTHER_ATTENTION = names(
    "dsa nsa qsa dsv4 compressed llada2_cfg_flashinfer flashmla trtllm_mla cutedsl_mla tokenspeed_mla hpc_ops "
    "minicpm_flashattn minicpm_flashinfer aiter wave intel_amx ascend intel_xpu"
)
_LORA_MODULES = names(
    "q_proj k_proj v_proj o_proj q_a_proj kv_a_proj_with_mqa q_b_proj kv_b_proj wq_b wk weights_proj gate_proj "
    "up_proj down_proj qkv_proj gate_up_proj embed_tokens lm_head qkvr wo_ud all"
)
_LOAD_FORMATS = names(
    "auto pt safetensors instanttensor npcache dummy sharded_state presharded gguf expert_pack bitsandbytes "
    "mistral layered flash_rl remote remote_instance fastsafetensors private runai_streamer"
)
_PHASE_KEYS = {
    "decode": ("backend", "max_bs", "bs"),
    "prefill": (
        "backend",
        "max_bs",
        "bs",
        "max_context_size",
        "full_prefill_max_req",
        "full_prefill_prefix_chunk_tokens",
        "max_seq_len",
    ),
}


def count(text: str) -> int:
    """Read a whole number with an optional suffix: 1k is 1000, 1Ki is 1024."""
    text = text.strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", text)
    if found is None:
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number; give one, or one with k or Ki"
            ) from None
    number, suffix = found.groups()
    power = "KMGT".index(suffix[0].upper()) + 1
    if not suffix.endswith("i"):
        return int(Decimal(number) * (1000**power))
    if "." in number:
        raise argparse.ArgumentTypeError(f"{text!r} has decimals before Ki; give a whole number")
    return int(number) << (10 * power)


def graph_config(text: str) -> dict[str, dict[str, Any]]:
    """Read the JSON of --cuda-graph-config: settings by phase, each key one that the phase has."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise not_json(text, error) from None
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError('not a JSON object; write it as in {"decode": {"bs": [1, 2]}}')
    for phase, settings in parsed.items():
        if phase not in _PHASE_KEYS:
            raise argparse.ArgumentTypeError(f"there is no phase {phase!r}; give decode and prefill")
        if not isinstance(settings, dict):
            raise argparse.ArgumentTypeError(f'{phase} is not a JSON object; write it as in {{"bs": [1, 2]}}')
        if settings.get("backend") == "tc_piecewise":
            raise argparse.ArgumentTypeError("backend tc_piecewise is gone; give breakable, full or disabled")
        keys = _PHASE_KEYS[phase]
        for key in settings:
            if key not in keys:
                remedy = did_you_mean(key, keys, f"give {', '.join(keys)}")
                raise argparse.ArgumentTypeError(f"{phase} has no key {key!r}; {remedy}")
    return dict(parsed)


class _LoraPaths(argparse.Action):
    """Adapters: NAME=PATH, a path, or a JSON object with a name and a path."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        for text in (value.strip() for value in values):
            if text.startswith("{") and text.endswith("}"):
                try:
                    found = json.loads(text)
                except json.JSONDecodeError as error:
                    parser.error(f"argument --lora-paths: {not_json(text, error)}")
                if not {"lora_name", "lora_path"} <= set(found):
                    parser.error(
                        "argument --lora-paths: an adapter lacks its name or path; give lora_name and lora_path"
                    )
        setattr(namespace, self.dest, list(values))


class _Parser(Parser):
    engine = "SGLang 0.5.23"
    wanted: ClassVar = {"int": "give a whole number, in digits", "float": "give a number"}
    renamed: ClassVar = {
        "--cuda-graph-bs": "--cuda-graph-bs-decode, in requests, or --cuda-graph-bs-prefill, in tokens",
        "--cuda-graph-max-bs": (
            "--cuda-graph-max-bs-decode, in requests, or --cuda-graph-max-bs-prefill, in tokens"
        ),
        "--piecewise-cuda-graph-tokens": "--cuda-graph-bs-prefill",
        "--piecewise-cuda-graph-max-tokens": "--cuda-graph-max-bs-prefill",
        "--disable-piecewise-cuda-graph": "--disable-prefill-cuda-graph",
        "--enable-piecewise-cuda-graph": "--cuda-graph-backend-prefill breakable",
        # vLLM's names
        "--max-num-seqs": "--max-running-requests",
        "--max-num-batched-tokens": "--chunked-prefill-size",
        "--max-model-len": "--context-length",
        "--cudagraph-capture-sizes": "--cuda-graph-bs-decode, in requests",
        "--enforce-eager": "--cuda-graph-backend-decode disabled and --cuda-graph-backend-prefill disabled",
    }

    def _placing(self, word: str) -> str:
        return "name the model as --model-path MODEL; a switch takes no value"


_Row = tuple[str, dict[str, Any], str]


def _switch(spelled: str, says: str) -> _Row:
    return spelled, {"action": "store_true", "default": None}, says


def _valued(
    spelled: str,
    kind: Callable[[str], Any],
    says: str,
    default: Any = None,
    choices: Sequence[Any] | None = None,
    nargs: str | None = None,
) -> _Row:
    options: dict[str, Any] = {"type": kind, "default": default, "choices": choices, "nargs": nargs}
    return spelled, options, says


NO_MODEL = "(an ordinary decoder)"
"""Stands for the model where none is named."""

_ATTENTION = ATTENTION_BACKENDS + _OTHER_ATTENTION
_BACKENDS = ("full", "breakable", "disabled")
_ROWS: tuple[_Row, ...] = (
    # SGLang demands it. Graphs can be asked about without one, which is assumed then.
    _valued("--model-path --model", str, "the model", NO_MODEL),
    _valued("--config", str, "a YAML file of flags, which the command line overrides"),
    _valued("--device", str, "cuda; other devices are not emulated"),
    _valued("--context-length", count, "longest sequence, in tokens"),
    _valued("--load-format", str, "how weights are loaded", "auto", _LOAD_FORMATS),
    _valued("--kv-cache-dtype", str, "element type of the KV cache", "auto"),
    _valued("--max-running-requests", int, "most requests at once, over all attention-DP ranks"),
    _valued("--max-total-tokens", count, "tokens in the KV pool"),
    _valued(
        "--chunked-prefill-size", int, "most tokens of a prefill, over all attention-DP ranks; -1: no chunks"
    ),
    _valued("--max-prefill-tokens", count, "most tokens of a prefill batch", 16384),
    _valued("--page-size", int, "tokens in a page of the KV pool"),
    _switch("--enable-mixed-chunk", "decodes may join a prefill chunk"),
    _valued("--nnodes", int, "hosts", 1),
    _valued("--tp-size --tensor-parallel-size", int, "tensor-parallel ranks", 1),
    _valued("--pp-size --pipeline-parallel-size", int, "pipeline stages", 1),
    _valued("--dp-size --data-parallel-size", int, "replicas", 1),
    _valued("--attn-dp-size --attention-data-parallel-size", int, "attention-DP groups in a TP group", 1),
    _switch("--enable-dp-attention", "deprecated: makes --dp-size count attention-DP groups"),
    _switch("--enable-dp-lm-head", "the LM head is data-parallel too"),
    _switch("--enable-tp-lm-head-all-to-all", "a sharded LM head under attention DP"),
    _switch("--no-enable-tp-lm-head-all-to-all", "the opposite"),
    _valued("--moe-dense-tp-size", int, "tensor-parallel ranks of dense MLP layers: 1 or all"),
    _switch("--disable-attn-tp-gather", "attention inputs are not scattered over its TP ranks"),
    _valued("--moe-a2a-backend", str, "expert all-to-all; only none is emulated", "none"),
    _valued("--attention-backend", str, "attention kernels", None, _ATTENTION),
    _valued("--decode-attention-backend", str, "attention kernels of decodes", None, _ATTENTION),
    _valued("--prefill-attention-backend", str, "attention kernels of prefills", None, _ATTENTION),
    _valued("--cuda-graph-config", graph_config, "graph settings by phase, as JSON; wins over the flags"),
    _valued("--cuda-graph-backend-decode", str, "graphs of decodes", None, _BACKENDS),
    _valued("--cuda-graph-backend-prefill", str, "graphs of prefills", None, _BACKENDS),
    _valued("--cuda-graph-max-bs-decode", int, "largest decode graph, in requests"),
    _valued("--cuda-graph-max-bs-prefill", int, "largest prefill graph, in tokens"),
    _valued("--cuda-graph-bs-decode", int, "decode graphs, in requests", nargs="+"),
    _valued("--cuda-graph-bs-prefill", int, "prefill graphs, in tokens", nargs="+"),
    _valued("--cuda-graph-max-seq-len-prefill", int, "longest sequence that a prefill graph serves"),
    _switch("--disable-prefill-cuda-graph", "no prefill graphs"),
    _switch("--disable-decode-cuda-graph", "no decode graphs"),
    _switch("--disable-cuda-graph", "deprecated: no graphs"),
    _switch("--disable-cuda-graph-padding", "a graph for each batch size, and none for others"),
    _switch("--enable-torch-compile", "compile the model for small batches"),
    _valued("--speculative-algorithm", str, "EAGLE, EAGLE3, NEXTN, STANDALONE or NGRAM"),
    _valued("--speculative-draft-model-path --speculative-draft-model", str, "the draft model"),
    _valued("--speculative-num-steps", int, "draft steps"),
    _valued("--speculative-eagle-topk", int, "branches of a draft step"),
    _valued("--speculative-num-draft-tokens", int, "tokens that are verified for a request"),
    _valued("--speculative-ngram-max-bfs-breadth", int, "branches of an n-gram draft", 10),
    _switch("--enable-lora", "serve adapters"),
    ("--lora-paths", {"type": str, "nargs": "*", "action": _LoraPaths}, "adapters to load"),
    _valued("--max-lora-rank", int, "largest rank of an adapter"),
    _valued("--lora-target-modules", str, "modules that adapters change", None, _LORA_MODULES, "*"),
    _valued("--max-loaded-loras", int, "most adapters in host memory"),
    _valued("--max-loras-per-batch", int, "most adapters in a batch, the bare model included", 8),
    _valued(
        "--lora-backend",
        str,
        "LoRA kernels",
        "csgmv",
        ("triton", "csgmv", "ascend", "torch_native", "triton_v2"),
    ),
    _valued("--max-lora-chunk-size", int, "rows of a csgmv chunk", 16, (16, 32, 64, 128)),
    _valued("--disaggregation-mode", str, "prefill or decode server", "null", ("null", "prefill", "decode")),
    _valued("--debug-tensor-dump-output-folder", str, "dump tensors, without graphs"),
)

FLAGS: dict[str, str] = {
    name: says if name == names(spelled)[0] else f"as {names(spelled)[0]}"
    for spelled, _, says in _ROWS
    for name in names(spelled)
}
"""Each flag that graphs can depend on, with what it is for."""

_NO_YAML = {"--lora-paths", "--disable-cuda-graph", "--enable-dp-attention"}
"""Flags that SGLang does not take from a YAML file, besides those that have a --no- form."""


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _parser() -> _Parser:
    parser = _Parser(prog="sglang serve", add_help=False)
    for spelled, options, _ in _ROWS:
        kept = {key: value for key, value in options.items() if value is not None or key == "default"}
        parser.add_argument(*names(spelled), dest=_dest(names(spelled)[0]), **kept)
    types: dict[str, Callable[[str], Any]] = {
        "int": int, "float": float, "count": count, "json": json.loads, "text": str, "list": str
    }  # fmt: skip
    for table, prefix in ((INERT, "inert"), (NOT_FOLLOWED, "not_followed")):
        for kind, flags in table.items():
            for flag in flags:
                dest = f"{prefix}:{flag}"
                if kind == "switch":
                    parser.add_argument(flag, dest=dest, action="store_true", default=None)
                else:
                    nargs = "*" if kind == "list" else None
                    values = [types[kind](value) for value in CHOICES.get(flag, ())] or None
                    parser.add_argument(flag, dest=dest, type=types[kind], nargs=nargs, choices=values)
    return parser


_PARSER = _parser()


def parse(command: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the flags' values and where each one that was given comes from: ``flag`` or ``file``.

    Raises ``FlagError`` where SGLang's parser would stop, and for a flag that is not emulated.
    """
    command = list(command)
    by_file: list[str] = []
    if "--config" in command:
        command, by_file = _without_config(command)
    found = _PARSER.parse_args([*by_file, *command])
    strays = [name.partition(":")[2] for name, value in vars(found).items() if _stray(name, value)]
    if strays:
        raise NotEmulated(
            Problem(
                path=(flag,),
                message="SGLang takes it, and its effect on graphs is not emulated",
                remedy="leave it out to see the graphs without it",
            )
            for flag in strays
        )
    sources = dict.fromkeys(_given(by_file), "file") | dict.fromkeys(_given(command), "flag")
    return found, sources


def _stray(name: str, value: Any) -> bool:
    return name.startswith("not_followed:") and value is not None


def _given(command: Sequence[str]) -> set[str]:
    """Return the destinations that a command line sets."""
    return {name_of(word) for word in command if word.startswith("--")}


def _without_config(command: list[str]) -> tuple[list[str], list[str]]:
    """Take --config FILE out of a command line; return the rest, and the file's flags."""
    at = command.index("--config")
    if command.count("--config") > 1:
        raise refusal("--config", "SGLang reads one file, and two are given", "merge them")
    if at == len(command) - 1:
        raise refusal("--config", "it names no file", "name a YAML file behind it")
    path = command[at + 1]
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise refusal("--config", f"SGLang reads YAML, and {path} ends otherwise", "name it *.yaml")
    words = _words(read_flags(path, "SGLang", "tp-size: 2", may_be_empty=True))
    return command[:at] + command[at + 2 :], words


def name_of(flag: str) -> str:
    """Return SGLang's own name of a flag, however it is written; itself where there is none."""
    head = flag.partition("=")[0]
    head = head if head.startswith("-") else f"--{head}"
    every = _PARSER._option_string_actions
    fits = [head] if head in every else [name for name in every if name.startswith(head)]
    return every[fits[0]].dest if fits else head


def _words(content: Mapping[Any, Any]) -> list[str]:
    """Write a YAML file's flags as a command line has them; some are refused there."""
    switches = set(INERT["switch"]) | set(NOT_FOLLOWED["switch"])
    switches |= {
        name
        for spelled, options, _ in _ROWS
        if options.get("action") == "store_true"
        for name in names(spelled)
    }
    both = {name for name in switches if f"--no-{name[2:]}" in switches or name.startswith("--no-")}
    for flag in map(_dashed, content):
        if flag in _NO_YAML | both:
            raise refusal(
                "--config", f"SGLang does not take {flag} from a file", "give it on the command line"
            )
    return as_words(content, lambda name: _dashed(name) in switches)


def _dashed(name: object) -> str:
    return f"--{str(name).replace('_', '-')}"
