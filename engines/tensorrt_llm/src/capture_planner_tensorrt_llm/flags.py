"""The command line of ``trtllm-serve`` and its YAML file, as two mappings of the engine's own names.

``options.json`` has every flag and key, by what is done with it:

    flags, files      graphs can depend on it; the key that a flag sets, and its help
    switches, ignored_flags, ignored_keys
                      it decides nothing about graphs; accepted by name, whatever its value
    emulated_values   keys of which only these values are emulated, and what others would add
    speculative_keys  keys of speculative_config: of any decoding type, and of each
    renamed_flags     flags of other engines, with what to write here
    renamed_keys      keys of older releases, with what to write now (TensorRT-LLM pull requests 4603, 5014, 5585)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs

from capture_planner.engines.history import History, json_table, old_names, values_behind
from capture_planner.engines.parsing import did_you_mean
from capture_planner.engines.yaml_files import located, read_yaml, refused_file
from capture_planner.errors import InvalidDocument, Problem
from capture_planner_tensorrt_llm.values import Problems, integer

OPTIONS = json_table(__package__, "options.json")
"""Every flag and key, as in the module's docstring."""

FLAGS: dict[str, str] = {name: row["help"] for name, row in OPTIONS["flags"].items()} | OPTIONS["files"]
"""Flags that graphs can depend on, with their help."""

HISTORY = History(flags=old_names(OPTIONS["renamed_flags"]))
"""Flags of older releases and other engines. Without release numbers: no release has all of these rules."""

OLD_KEYS = old_names(OPTIONS["renamed_keys"])

ACCEPTED = (*FLAGS, *OPTIONS["switches"], *OPTIONS["ignored_flags"])
"""Every flag of the release."""


@attrs.define
class ServeCommand:
    """The values of a command line, as far as graphs can depend on them."""

    values: dict[str, Any] = attrs.Factory(dict)
    """By the engine's own names."""
    spelled: dict[str, str] = attrs.Factory(dict)
    """The flag that each came with."""
    file: str | None = None
    file_flag: str = "--config"
    """The flag that the file came with."""

    def placed(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return problems under the flag that the file came with, and with their places in it."""
        renamed = [
            attrs.evolve(problem, path=(self.file_flag, *problem.path[1:]))
            if problem.path[:1] == ("--config",)
            else problem
            for problem in problems
        ]
        # Without a file there is no line to name.
        if self.file is None:
            return renamed
        try:
            return located(renamed, self.file, lambda p: p.path[1:] if p.path[:1] == (self.file_flag,) else ())
        except InvalidDocument:
            return renamed  # One of them is about the file itself.


def read_flags(command: Sequence[str], problems: Problems) -> ServeCommand:
    """Return the values of a command line: of a flag that is given twice, the last. One word is the model."""
    result, words, models = ServeCommand(), deque(command), 0
    while words:
        word = words.popleft()
        if not word.startswith("-"):
            models += 1
            if models > 1:
                problems.refuse((word,), "only one model is accepted", "leave it out")
            continue
        name, equals, value = word.partition("=")
        if name in OPTIONS["switches"]:
            # Click takes no value for a switch.
            if equals:
                problems.refuse((name,), "a switch takes no value", "write it without one")
            continue
        if name not in ACCEPTED:
            old, values = HISTORY.flags.get(name), [value] if equals else values_behind(list(words))
            listed = f"known are {', '.join(FLAGS)}"
            remedy = old.remedy(values) if old else did_you_mean(name, ACCEPTED, listed)
            problems.refuse((name,), "unknown flag", remedy)
        if not equals:
            # The word behind an unknown flag is its value, unless that is a flag itself.
            if not words or (name not in ACCEPTED and words[0].startswith("-")):
                if name in ACCEPTED:
                    problems.refuse((name,), "its value is missing", "give its value behind it")
                continue
            value = words.popleft()
        if name in OPTIONS["files"]:
            result.file, result.file_flag = value, name
        elif name in OPTIONS["flags"]:
            key = OPTIONS["flags"][name]["key"]
            # ``backend`` is the one flag that is no number.
            result.values[key] = value if key == "backend" else integer(value, (name,), problems)
            result.spelled[key] = name
    return result


_keys: ContextVar[Mapping[str, Any]] = ContextVar("keys in place of those in the file")


@contextmanager
def replacing(keys: Mapping[str, Any]) -> Iterator[None]:
    """Read every file as if it had these keys, while the context lasts; so is a command line without a file."""
    token = _keys.set(keys)
    try:
        yield
    finally:
        _keys.reset(token)


def options_of(line: ServeCommand, problems: Problems) -> Mapping[str, Any]:
    """Return the mapping in the file of a command line; empty without one."""
    return {**({} if line.file is None else read_file(line.file, problems)), **_keys.get({})}


def read_file(path: str, problems: Problems) -> Mapping[str, Any]:
    """Return the mapping in a YAML file; an empty file is an empty one."""
    try:
        data = read_yaml(path)
    except InvalidDocument as error:
        refused = refused_file(error, "--config", "TensorRT-LLM refuses it", "name a YAML file of options")
        problems.refused += refused.problems
        return {}
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        remedy = "write one option: value on each line, as in max_batch_size: 64"
        message = "TensorRT-LLM refuses it: expected a mapping"
        problems.refused.append(Problem(path=("--config",), file=path, line=1, message=message, remedy=remedy))
        return {}
    return data
