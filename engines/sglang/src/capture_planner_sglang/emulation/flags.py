"""SGLang 0.5.23's command line: which flags are read, and how they are parsed.

The parser is ``argparse`` as SGLang's is, with the same names, so that an abbreviation is accepted or
ambiguous just as there: the flags of older releases, ``--cuda-graph-bs`` and ``--cuda-graph-max-bs``, now
fit two names each and are refused.

``flags.json`` has every flag of the release, by what is done with it:

    read          graphs can depend on it: its names, type, default, choices and help
    ignored       it decides nothing about graphs; accepted by name, whatever its value
    not_emulated  it can change graphs in ways that are not emulated, and is refused

The last two by how many values a flag takes: a switch none, a list any number.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import attrs

from capture_planner.engines.engine import OTHER_DEVICE
from capture_planner.engines.history import History, json_table
from capture_planner.engines.parsing import Parser, as_words, did_you_mean, not_json, refusal
from capture_planner.engines.shell import split_variables
from capture_planner.engines.yaml_files import read_flags
from capture_planner.errors import NotEmulated, Problem
from capture_planner_sglang.emulation.releases import RELEASES
from capture_planner_sglang.emulation.resolution import Phase

TABLE = json_table(__package__, "flags.json")
"""Every flag of the release, as in the module's docstring."""

VARIABLES = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1: --context-length may exceed what the model states",
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "most tokens of a rank that DeepEP dispatches at low latency",
    "SGLANG_VIT_ENABLE_CUDA_GRAPH": "1: graphs of the vision encoder",
}
"""Variables of the environment that the rules read, with their help."""

FLAGS: dict[str, str] = VARIABLES | {
    name: row["help"] if name == row["names"][0] else f"as {row['names'][0]}"
    for row in TABLE["read"]
    for name in row["names"]
}
"""Each flag that graphs can depend on, with its help."""

DISPATCH_TOKENS = 128
"""Tokens of a rank that DeepEP dispatches at low latency, unless its variable says otherwise."""

ATTENTION_BACKENDS = ("fa3", "fa4", "flashinfer", "triton", "trtllm_mha", "torch_native", "flex_attention")
"""Backends for ordinary decoders on CUDA devices; the others are for other attention or hardware."""

HISTORY = History.load(json_table(__package__, "history.json"))
"""What older releases called differently."""

UNEMULATED_VARIABLES: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH",
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        "SGLANG_ENABLE_SINGLE_CG_DRAFT",
        "SGLANG_MINICPM_FORCE_DENSE",
        "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK",
        "SGLANG_USE_AITER",
        "SGLANG_USE_BREAKABLE_CUDA_GRAPH",
    ),
    ("0", "false", "n", "no", "off", ""),
) | {"SGLANG_RAGGED_VERIFY_MODE": ("static", ""), "SGLANG_EXTERNAL_MM_MODEL_ARCH": ("",)}
"""Variables that can change graphs, and the values that do not (``srt/environ.py``)."""

_SWITCHES = {row["names"][0] for row in TABLE["read"] if row["type"] == "switch"}
_SWITCHES |= {flag for kind in ("ignored", "not_emulated") for flag in TABLE[kind]["switch"]}
_NOT_IN_FILES = {"--lora-paths", "--disable-cuda-graph", "--enable-dp-attention"}
_NOT_IN_FILES |= {f for f in _SWITCHES if f"--no-{f[2:]}" in _SWITCHES or f.startswith("--no-")}
"""Flags that SGLang does not take from a YAML file."""

_GRAPH_KEYS = {"decode": ("backend", "max_bs", "bs"), "prefill": tuple(field.name for field in attrs.fields(Phase))}


def count(text: str) -> int:
    """Read a whole number with an optional suffix: 1k is 1000, 1Ki is 1024."""
    text = text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", text)
    if match is None:
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give one, or one with k or Ki") from None
    number, suffix = match.groups()
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
        if phase not in _GRAPH_KEYS:
            raise argparse.ArgumentTypeError(f"there is no phase {phase!r}; give decode and prefill")
        if not isinstance(settings, dict):
            raise argparse.ArgumentTypeError(f'{phase} is not a JSON object; write it as in {{"bs": [1, 2]}}')
        if settings.get("backend") == "tc_piecewise":
            raise argparse.ArgumentTypeError("backend tc_piecewise is gone; give breakable, full or disabled")
        keys = _GRAPH_KEYS[phase]
        for key in settings:
            if key not in keys:
                remedy = did_you_mean(key, keys, f"give {', '.join(keys)}")
                raise argparse.ArgumentTypeError(f"{phase} has no key {key!r}; {remedy}")
    return dict(parsed)


class SglangParser(Parser):
    wanted: ClassVar = {"int": "give a whole number, in digits", "float": "give a number"}
    history: ClassVar = HISTORY
    placing = "name the model as --model-path MODEL; a switch takes no value"

    @property
    def engine(self) -> str:  # type: ignore[override]
        """The engine's name and the followed release."""
        return f"SGLang {RELEASES.followed()}"


_TYPES: dict[str, Any] = {"int": int, "text": str, "count": count, "graph_config": graph_config}
_SWITCH: dict[str, Any] = {"action": "store_true", "default": None}


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


@cache
def sglang_parser() -> SglangParser:
    """Return the parser of all flags."""
    parser = SglangParser(prog="sglang serve", add_help=False)
    for row in TABLE["read"]:
        options = {key: row[key] for key in ("default", "choices", "nargs") if key in row}
        options |= _SWITCH if row["type"] == "switch" else {"type": _TYPES[row["type"]]}
        parser.add_argument(*row["names"], dest=_dest(row["names"][0]), **options)
    for group in ("ignored", "not_emulated"):
        for kind, flags in TABLE[group].items():
            options = {"switch": _SWITCH, "list": {"nargs": "*"}}.get(kind, {})
            for flag in flags:
                parser.add_argument(flag, dest=f"{group}:{flag}", **options)
    return parser


def parse(command: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the flags' values and where each one that was given comes from: ``flag`` or ``file``.

    Raises ``FlagError`` where SGLang's parser would stop, and ``NotEmulated`` for flags that can change graphs
    in ways that are not emulated.
    """
    args, sources = parse_any(command)
    given = (name.partition(":") for name, value in vars(args).items() if value is not None)
    strays = [flag for group, _, flag in given if group == "not_emulated"]
    if strays:
        raise NotEmulated(
            Problem(
                path=(flag,),
                message="SGLang accepts it, and its effect on graphs is not emulated",
                remedy="remove it to see the graphs without it",
            )
            for flag in strays
        )
    return args, sources


def _split_config(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Take ``--config FILE`` out of a command line; raises ``FlagError`` for two, none, or one not named as YAML."""
    rest = list(words)
    if "--config" not in rest:
        return rest, None
    index = rest.index("--config")
    if rest.count("--config") > 1:
        raise refusal("--config", "SGLang reads one file, and two are given", "merge them")
    if index == len(rest) - 1:
        raise refusal("--config", "its value is missing", "name a YAML file")
    path = rest[index + 1]
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise refusal("--config", f"SGLang reads .yaml and .yml files only, got {path}", "rename the file")
    return rest[:index] + rest[index + 2 :], path


def parse_any(command: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse as ``parse``, with flags that are not emulated too: their names begin with ``not_emulated:``."""
    variables, own = split_variables(command)
    rest, path = _split_config(own)
    from_file = [] if path is None else _words(read_flags(path, "SGLang", "tp-size: 2", may_be_empty=True))
    # The command line comes last, as of a flag given twice the last counts.
    given = [*from_file, *rest]
    spelled = RELEASES.without_gone(given, HISTORY)
    sglang_parser().refuse_gone(spelled, RELEASES.newer_flags(given))
    args = sglang_parser().parse_args(spelled)
    args.other_device = variables.get(OTHER_DEVICE, "")
    longer, most, encoder = (variables.get(name, "").lower() for name in VARIABLES)
    args.longer_context, args.encoder_graphs = (value in ("1", "true", "yes", "y") for value in (longer, encoder))
    args.dispatch_tokens = int(most) if most.isdigit() else DISPATCH_TOKENS
    sources = {name_of(word): "file" for word in from_file if word.startswith("--")}
    sources |= {name_of(word): "flag" for word in rest if word.startswith("--")}
    return args, sources


def name_of(flag: str) -> str:
    """Return SGLang's own name of a flag, however it is written; itself where it is unknown."""
    head = flag.partition("=")[0]
    head = head if head.startswith("-") else f"--{head}"
    actions = sglang_parser()._option_string_actions
    # argparse takes any beginning of a name that fits one flag.
    fitting = [head] if head in actions else [name for name in actions if name.startswith(head)]
    return actions[fitting[0]].dest if fitting else head


def _words(content: Mapping[Any, Any]) -> list[str]:
    """Write a YAML file's flags as a command line has them; SGLang refuses some of them there."""

    def dashed(name: object) -> str:
        return f"--{str(name).replace('_', '-')}"

    for flag in map(dashed, content):
        if flag in _NOT_IN_FILES:
            raise refusal("--config", f"SGLang does not read {flag} from a file", "give it on the command line")
    return as_words(content, lambda name: dashed(name) in _SWITCHES)
