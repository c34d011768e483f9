"""YAML files of flags, read as the engines read them (PyYAML, YAML 1.1), with the place of each key.

What differs from YAML as it is read elsewhere here: ``on`` and ``yes`` are true, ``1e9`` is a text, and of a
key that is given twice the last one holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver

from capture_planner.codec import read
from capture_planner.errors import FlagError, InvalidDocument, Problem

_NARROWER = {
    "tag:yaml.org,2002:bool": r"(?i:yes|no|true|false|on|off)",
    "tag:yaml.org,2002:int": r"[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*(:[0-5]?[0-9])*|0x[0-9a-fA-F_]+)",
    "tag:yaml.org,2002:float": (
        r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?"
        r"|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}
"""What PyYAML takes for these kinds; other words that ruamel takes are texts."""


class _Resolver(VersionedResolver):
    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        narrower = _NARROWER.get(str(tag)) if kind is ScalarNode and implicit[0] else None
        if narrower is not None and not re.fullmatch(narrower, value):
            return super().resolve(kind, value, (False, True))
        return tag


class _Constructor(SafeConstructor):
    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        return True  # the last one holds


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    yaml.Resolver, yaml.Constructor = _Resolver, _Constructor
    return yaml


def read_yaml(path: str) -> Any:
    """Return what a YAML file holds; raises ``InvalidDocument`` with the place where it is no YAML."""
    text = _text(path)
    try:
        return _yaml().load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        line, column = (None, None) if mark is None else (mark.line + 1, mark.column + 1)
        message = f"the file is not YAML: {reason}"
        raise InvalidDocument(
            [Problem(file=path, line=line, column=column, message=message, remedy="mend the line")]
        ) from None


def _text(path: str) -> str:
    try:
        return read(path)
    except InvalidDocument as error:
        (problem,) = error.problems
        message = problem.message if problem.message.startswith("the file") else f"the file {problem.message}"
        raise InvalidDocument([attrs.evolve(problem, message=message)]) from None


def refused_file(error: InvalidDocument, flag: str, says: str, remedy: str = "") -> FlagError:
    """Return the error of a file that an engine cannot read: its flag, ``says``, and what is wrong with it."""
    return FlagError(
        attrs.evolve(
            problem, path=(flag,), message=f"{says}: {problem.message}", remedy=problem.remedy or remedy
        )
        for problem in error.problems
    )


def read_flags(path: str, engine: str, example: str, *, may_be_empty: bool = False) -> dict[Any, Any]:
    """Return the flags in the file of ``--config``; raises ``FlagError`` where it holds none by name.

    ``example`` is a line of such a file.
    """
    try:
        content = read_yaml(path)
    except InvalidDocument as error:
        remedy = "name a YAML file of flags"
        raise refused_file(error, "--config", f"{engine} cannot read it", remedy) from None
    if content is None and may_be_empty:
        return {}
    if not isinstance(content, dict):
        says = f"{engine} wants flags by name in the file"
        remedy = f"write one flag: value on each line, as in {example}"
        raise FlagError([Problem(path=("--config",), file=path, line=1, message=says, remedy=remedy)])
    return content


def as_words(content: Mapping[Any, Any], is_switch: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return the flags of a file as a command line has them.

    Of a switch, and of an empty list, nothing is left where it is false. A flag that is no switch takes
    ``true`` and ``false`` as its value.
    """
    words: list[str] = []
    for name, value in content.items():
        flag = f"--{name}"
        if isinstance(value, bool) and is_switch(str(name)):
            words += [flag] if value else []
        elif isinstance(value, bool):
            words += [flag, str(value).lower()]
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def in_its_file(error: FlagError, command: Sequence[str], name_of: Callable[[str], str]) -> FlagError:
    """Return an error with the places of what stands in the file of ``--config``.

    ``name_of`` makes of a flag, as it is written here or there, the engine's own name of it.
    """
    words = list(command)
    if words.count("--config") != 1 or words[-1] == "--config":
        return error
    given = {name_of(word) for word in words if word.startswith("-")}
    try:
        return type(error)(_located(error.problems, words[words.index("--config") + 1], given, name_of))
    except (InvalidDocument, YAMLError):
        return error  # it is about the file itself


def _located(
    problems: Iterable[Problem], path: str, given: Container[str], name: Callable[[str], str]
) -> Iterator[Problem]:
    """Return problems with file, line and column where what they are about stands in a file of flags.

    ``given`` are the names that the command line has, which wins over the file.
    """
    root = _yaml().compose(_text(path))
    for problem in problems:
        flag, inside = str(problem.path[0]) if problem.path else "", problem.path[1:]
        node = None if name(flag) in given else _below(root, name(flag), name)
        yield problem if node is None or problem.file else at(problem, path, node, inside)


def located_inside(problems: Iterable[Problem], path: str, flag: str) -> Iterator[Problem]:
    """Return problems with file, line and column where their paths lead from ``flag`` into its file."""
    root = _yaml().compose(_text(path))
    for problem in problems:
        leads = problem.path[:1] == (flag,) and len(problem.path) > 1 and not problem.file
        yield at(problem, path, root, problem.path[1:]) if leads else problem


def at(problem: Problem, path: str, node: Any, inside: Iterable[str | int]) -> Problem:
    """Return a problem with the place that is nearest to the end of a path below a node."""
    for part in inside:
        found = _below(node, part)
        if found is None:
            break
        node = found
    mark = node.start_mark
    return attrs.evolve(problem, file=path, line=mark.line + 1, column=mark.column + 1)


def _below(node: Any, part: str | int, name: Callable[[str], str] = str) -> Any:
    """Return the entry of a mapping, or an item of a list; None where there is none."""
    if isinstance(node, _Key):
        node = node.value
    if isinstance(node, SequenceNode) and isinstance(part, int):
        return node.value[part] if part < len(node.value) else None
    if isinstance(node, MappingNode):
        for key, value in reversed(node.value):
            if name(str(key.value)) == str(part):
                return _Key(key.start_mark, value)
    return None


@attrs.frozen
class _Key:
    """The key of a mapping's entry: where it stands, and the value behind it."""

    start_mark: Any
    value: Any
