"""From a ``vllm serve`` command line to the values of its flags, read as vLLM reads it.

Names and kinds of all flags are in ``flags.json``, recorded from the release. What vLLM does before its
parser sees the words is done here too: underscores for dashes, ``-O2``, dotted parts of JSON flags,
``--config FILE``, the model as ``--model``. Leading words such as ``VLLM_USE_V2_MODEL_RUNNER=0`` are
environment variables, as in a shell.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import attrs

from capture_planner.engines.history import History
from capture_planner.engines.parsing import Parser, as_words, not_json, refusal
from capture_planner.engines.shell import ASSIGNMENT, VARIABLE
from capture_planner.errors import FlagError
from capture_planner_vllm.emulation.parts import translated
from capture_planner_vllm.emulation.releases import RELEASES, followed, minor
from capture_planner_vllm.emulation.tables import flag_table, older, rules

_THOUSANDS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Flags that stand for one part of ``--speculative-config``."""
HISTORY = History.load(older())
_SHORT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


@attrs.frozen(kw_only=True)
class CommandLine:
    """The flags of one command line, by vLLM's name for each: ``max_num_seqs``."""

    values: Mapping[str, Any]
    from_file: frozenset[str] = frozenset()
    """Flags that only the file of ``--config`` gives."""
    overridden: Mapping[str, Sequence[Any]] = attrs.field(factory=dict)
    """Earlier values of JSON flags that are given more than once."""
    model: str | None = None
    variables: Mapping[str, str] = attrs.field(factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def every(self, name: str) -> Sequence[Any]:
        """Return all values of a JSON flag, the one that counts last; vLLM checks each."""
        return (*self.overridden.get(name, ()), self.values.get(name))

    def source(self, name: str) -> str:
        """Return ``flag``, ``file`` or ``default``."""
        if name not in self.values:
            return "default"
        return "file" if name in self.from_file else "flag"


def read(command: Sequence[str]) -> CommandLine:
    """Return the flags of the words behind ``vllm serve``; raises ``FlagError`` for the first invalid one."""
    variables, words = _variables(list(command))
    words = _model_first(words)
    from_file: list[str] = []
    if "--config" in words:
        from_file, words = _without_file(words)
    # A model in front stays in front; the file's flags come next, so that the command line's override them.
    model = words[:1] if words and not words[0].startswith("-") else []
    values = _parse([*model, *from_file, *words[len(model) :]])
    only_file = frozenset(_parse(from_file)) - frozenset(_parse(words)) if from_file else frozenset()
    tag = values.pop("model_tag", None)
    if tag is not None and tag.startswith("-") and " " in tag:
        message = "vLLM reads a word with a space as the model's name, and finds no such model"
        raise refusal(re.split(r"[\s=]", tag)[0], message, "write flag and value as two words")
    objects = [name for name in values if flag_table()[name]["kind"].startswith("object")]
    return CommandLine(
        values={**values, **{name: values[name][-1] for name in objects}},
        overridden={name: values[name][:-1] for name in objects},
        from_file=only_file,
        model=tag if tag is not None else values.get("model"),
        variables=variables,
    )


def name_of(flag: str) -> str:
    """Return vLLM's own name of a flag from any spelling or unambiguous prefix, or the flag itself."""
    spelled = flag.partition("=")[0].partition(".")[0].replace("_", "-")
    spelled = spelled if spelled.startswith("-") else f"--{spelled}"
    table = flag_table().items()
    spellings = [(name, dest) for dest, entry in table for name in (*entry["names"], *entry.get("no", ()))]
    exact = [dest for name, dest in spellings if name == spelled]
    prefixed = {dest for name, dest in spellings if name.startswith(spelled)}
    return exact[0] if exact else prefixed.pop() if len(prefixed) == 1 else spelled


def _variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split leading environment variables off the words, and normalize their values."""
    variables: dict[str, str] = {}
    while words and ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        if name == "VLLM_USE_BREAKABLE_CUDAGRAPH":  # compared with "1"; the others are read as integers
            value = "1" if value == "1" else "0"
        elif name in rules()["variables"]:
            try:
                value = "1" if int(value) else "0"
            except ValueError:
                raise refusal(name, f"expected an integer, got {value!r}", "give 0 or 1") from None
        variables[name] = value
    return variables, words


def _model_first(words: list[str]) -> list[str]:
    """Move the first ``--model`` to the front; without one, a served name needs a model in front."""
    for index, word in enumerate(words):
        if word == "--model":
            if index + 1 == len(words):
                raise refusal("--model", "its value is missing", "name a model or a folder")
            return [words[index + 1], *words[:index], *words[index + 2 :]]
        if word.startswith("--model=") and word != "--model=":
            return [word.removeprefix("--model="), *words[:index], *words[index + 1 :]]
    names = {word.partition("=")[0].replace("_", "-") for word in words}
    if words and words[0].startswith("-") and "--served-model-name" in names and "--config" not in names:
        message = "with this flag vLLM requires the model as the first word"
        raise refusal("--served-model-name", message, "write the model in front")
    return words


def _without_file(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that the file of ``--config`` stands for, and the others."""
    if words.count("--config") > 1:
        raise refusal("--config", "vLLM accepts one file only", "put all flags into one file")
    index = words.index("--config")
    if index + 1 == len(words):
        raise refusal("--config", "its value is missing", "name a YAML file")
    path = words[index + 1]
    if path.rpartition(".")[2] not in ("yaml", "yml"):
        raise refusal("--config", f"vLLM reads only .yaml and .yml files, got {path}", "rename the file")
    # Few lines name a file, and what reads YAML takes as long to import as all of this package.
    from capture_planner.engines.yaml_files import read_flags

    # A false is dropped: vLLM looks for the --no- form among the flags of `vllm`, not of `serve`.
    content = as_words(read_flags(path, "vLLM", "max-num-seqs: 64"))
    if words[0].startswith("-") and "--model" not in content:
        raise refusal("--config", "vLLM finds a model neither in front nor in the file", "name a model")
    return content, words[:index] + words[index + 2 :]


_LEVELS = ("0", "1", "2", "3")


def _spelled(words: Sequence[str]) -> list[str]:
    """Write every flag with dashes up to its first dot, and ``-O2`` as what it stands for."""
    spelled: list[str] = []
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            head, dot, tail = name.partition(".")
            spelled.append(head.replace("_", "-") + dot + tail + equals + value)
        elif word.startswith("-O") and word != "-O":
            spelled += ["--optimization-level", word[3:] if word[2] == "=" else word[2:]]
        elif word == "-O" and index + 1 < len(words) and words[index + 1] in _LEVELS:
            spelled.append("--optimization-level")
        else:
            spelled.append(translated(word) if spelled[-1:] == ["-O"] else word)
    return spelled


def _undotted(words: Sequence[str]) -> list[str]:
    """Gather dotted parts, ``-cc.mode=3``, into one JSON value for each flag, after all other words."""
    plain: list[str] = []
    gathered: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=")
        if not word.startswith("-") or "." not in name:
            plain.append(word)
            continue
        if not equals:
            following = next(rest, None)
            if following is None:
                raise refusal(name.partition(".")[0], f"the value of {name} is missing", "give one")
            text = following
        # `--flag.key+ a,b` is vLLM's way to write a list.
        if name.endswith("+"):
            name, text = name[:-1], json.dumps(text.split(","))
        flag, *keys = name.split(".")
        value: Any = _loose(text)
        for key in reversed(keys):
            value = {key: value}
        _merge(gathered.setdefault(flag, {}), value)
    for flag, parts in gathered.items():
        plain += [flag, json.dumps(parts)]
    return plain


def _loose(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    # Numbers may be short here too, as in 80g.
    try:
        return short_number(text)
    except (ValueError, argparse.ArgumentTypeError):
        return text


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        present = into.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            _merge(present, value)
        elif isinstance(value, list) and isinstance(present, list):
            present += value
        else:
            into[key] = value


def short_number(text: str) -> int:
    """Read 8192, 8k (thousands) or 8K (1,024s), and so on for m, g, t; raises ``ValueError``."""
    text = text.strip()
    match = _SHORT.fullmatch(text)
    if match is None:
        return int(text)
    number, suffix = match.groups()
    power = _THOUSANDS[suffix.lower()]
    return int(float(number) * 1000**power) if suffix.islower() else int(number) * 1024**power


def _object(text: str) -> Any:
    """Read a JSON object in which numbers may be short: {"x": 80m}."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    short = re.compile(rf"\b{_SHORT.pattern}\b")
    parts[::2] = [short.sub(lambda match: str(short_number(match.group())), part) for part in parts[::2]]
    value = json.loads("".join(parts))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _length(text: str) -> int:
    return -1 if text.strip().lower() in ("-1", "auto") else short_number(text)


_KINDS: dict[str, tuple[Any, str, str]] = {
    "text": (str, "text", "give text"),
    "int": (int, "integer", "give a whole number, in digits"),
    "float": (float, "number", "give a number"),
    "json": (json.loads, "JSON", ""),
    "object": (_object, "JSON object", "give a JSON object, as in '{\"a\": 1}', or dotted parts"),
    "count": (short_number, "count", "give a whole number, or one such as 8k or 8K; fractions go with k only"),
    "length": (_length, "length", "give auto, a whole number, or one such as 8k or 8K"),
    "name": (lambda text: text.lower().replace("-", "_"), "name", "give one of its names"),
}
"""Of each kind of value: how it is read, its name in messages, and the remedy for another value."""


def _reader(kind: str, *, decides: bool = True) -> Any:
    """Return what reads a value of a kind; a variable of the shell will do where the flag decides nothing."""
    (inner, name, _), optional = _KINDS[kind.rstrip("?")], kind.endswith("?")

    def read_value(text: str) -> Any:
        if optional and text in ("", "None"):
            return None
        if not decides and VARIABLE.fullmatch(text):
            return text
        try:
            return inner(text)
        except json.JSONDecodeError as error:
            raise not_json(text, error) from None

    # argparse names the function in its message.
    read_value.__name__ = name
    return read_value


class _Switch(argparse.Action):
    """Sets True, or False where one of its negative names was written."""

    negatives: frozenset[str]

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string not in self.negatives)


class ServeParser(Parser):
    wanted: ClassVar = {name: remedy for _, name, remedy in _KINDS.values()}
    history: ClassVar = HISTORY
    placing = "give one model, then flags; a switch takes no value"

    def __init__(self) -> None:
        super().__init__(add_help=False, argument_default=argparse.SUPPRESS)
        self.engine = f"vLLM {minor()}"


@cache
def _parser(release: str) -> ServeParser:
    parser = ServeParser()
    parser.add_argument("model_tag", nargs="?")
    for dest, entry in flag_table().items():
        kind, names = entry["kind"], entry["names"]
        if kind == "switch":
            action = parser.add_argument(*names, *entry["no"], dest=dest, action=_Switch, nargs=0)
            action.negatives = frozenset(entry["no"])  # type: ignore[attr-defined]
        elif kind == "on":
            parser.add_argument(*names, dest=dest, action="store_true")
        elif entry.get("append"):
            parser.add_argument(*names, dest=dest, action="append")
        else:
            decides = f"--{dest.replace('_', '-')}" in rules()["flags"]
            options: dict[str, Any] = {"type": _reader(kind, decides=decides), "nargs": entry.get("nargs")}
            if "choices" in entry:
                options["choices"] = [*entry["choices"], *([None] if kind.endswith("?") else [])]
            if entry.get("nargs") == "?":
                options["const"] = True
            if kind.startswith("object"):
                options["action"] = "append"
                del options["nargs"]
            parser.add_argument(*names, dest=dest, **options)
    return parser


def _parse(words: Sequence[str]) -> dict[str, Any]:
    given = _spelled(words)
    spelled = RELEASES.without_gone(given, HISTORY)
    parser = _parser(followed())
    parser.refuse_gone(spelled, RELEASES.newer_flags(given))
    namespace, unknown = parser.parse_known_args(_undotted(spelled))
    if unknown:
        raise FlagError(parser.strangers(unknown))
    return _folded(dict(vars(namespace)))


def _folded(values: dict[str, Any]) -> dict[str, Any]:
    """Put ``--spec-method`` and its like into ``--speculative-config``."""
    short = [(flag, key, values.pop(flag, None)) for flag, key in _SPECULATIVE.items()]
    given = [each for each in short if each[2] is not None]
    whole = values.get("speculative_config")
    if given and isinstance(whole, dict | None):
        values["speculative_config"] = whole = dict(whole or {})
        for flag, key, value in given:
            if key in whole:
                message = f"{key} is given twice, by --{flag.replace('_', '-')} too"
                raise refusal("--speculative-config", message, "drop one", key)
            whole[key] = value
    return values
