"""YAML files of flags, read as the engines read them, with the place of each key.

By PyYAML, that is YAML 1.1: ``on`` and ``yes`` are true, ``1e9`` is a string, and the last of two equal keys
holds. Only engines import this module, so PyYAML is a dependency of their distributions, not of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from capture_planner.codec import read
from capture_planner.engines.manifests import document_texts
from capture_planner.errors import FlagError, InvalidDocument, Problem


def read_yaml(path: str, load: Callable[[str], Any] = yaml.safe_load) -> Any:
    """Return the content of a YAML file; raises ``InvalidDocument`` with the place of the first error.

    ``FILE#1/backend/decode`` is a part of the second document of a file; a text there is a file of its own.
    """
    # A file may have # in its own name.
    file, _, part = path.partition("#") if not Path(path).exists() else (path, "", "")
    try:
        return load(read(file)) if not part else _part(read(file), part, load)
    except InvalidDocument as error:
        (problem,) = error.problems
        # Next to flags a sentence has to say that it is about a file.
        message = problem.message if problem.message.startswith("the file") else f"the file {problem.message}"
        raise InvalidDocument([attrs.evolve(problem, message=message)]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        problem = Problem(file=path, message=f"the file is not YAML: {reason}", remedy="fix the line")
        raise InvalidDocument([problem if mark is None else _at(problem, path, mark)]) from None


FASTEST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C, where it is installed with it."""


def _part(text: str, part: str, load: Callable[[str], Any]) -> Any:
    """Return the value, or the node, behind the number of a document and keys."""
    number, *keys = part.split("/")
    nodes = load is not yaml.safe_load
    # Lines stay those of the file.
    parts = document_texts(text)
    before = "\n" * sum(each.count("\n") + 1 for each in parts[: int(number)])
    own = before + parts[int(number)]
    found = yaml.compose(own, yaml.SafeLoader) if nodes else yaml.load(own, FASTEST)
    for key in keys:
        inside = _below(found, key, str) if nodes else (None, found[key])
        found = None if inside is None else inside[1]
    if nodes:
        return found if not isinstance(found, yaml.ScalarNode) else yaml.compose(found.value, yaml.SafeLoader)
    return yaml.safe_load(found) if isinstance(found, str) else found


def _at(problem: Problem, path: str, mark: Any) -> Problem:
    return attrs.evolve(problem, file=path, line=mark.line + 1, column=mark.column + 1)


def refused_file(error: InvalidDocument, flag: str, reason: str, remedy: str = "") -> FlagError:
    """Return the error of a file that an engine cannot read: its flag, ``reason``, and what is wrong with it."""
    return FlagError(
        attrs.evolve(problem, path=(flag,), message=f"{reason}: {problem.message}", remedy=problem.remedy or remedy)
        for problem in error.problems
    )


def read_flags(path: str, engine: str, example: str, *, may_be_empty: bool = False) -> dict[Any, Any]:
    """Return the mapping in a ``--config`` file; raises ``FlagError``, with a line as ``example``, where it is none."""
    try:
        content = read_yaml(path)
    except InvalidDocument as error:
        raise refused_file(error, "--config", f"{engine} cannot read it", "name a YAML file of flags") from None
    # An empty file is no mapping, and some engines take it.
    if content is None and may_be_empty:
        return {}
    if not isinstance(content, dict):
        message = f"{engine} expects a mapping of flags in the file"
        remedy = f"write one flag: value on each line, as in {example}"
        raise FlagError([Problem(path=("--config",), file=path, line=1, message=message, remedy=remedy)])
    return content


def in_its_file(error: FlagError, command: Sequence[str], name_of: Callable[[str], str]) -> FlagError:
    """Return an error whose problems have their places in the file of ``--config``, where they are about it.

    ``name_of`` turns a flag, as written in the command or the file, into the engine's own name of it.
    """
    words = list(command)
    if words.count("--config") != 1 or words[-1] == "--config":
        return error
    given = {name_of(word) for word in words if word.startswith("-")}

    def path_in_file(problem: Problem) -> tuple[str | int, ...]:
        flag = name_of(str(problem.path[0])) if problem.path else ""
        # What the command line says wins, so the file is not to blame.
        return () if flag in given else (flag, *problem.path[1:])

    try:
        return type(error)(located(error.problems, words[words.index("--config") + 1], path_in_file, name_of))
    except InvalidDocument:
        return error  # The error is about the file itself.


def located(
    problems: Iterable[Problem],
    path: str,
    path_in_file: Callable[[Problem], Sequence[str | int]],
    name_of: Callable[[str], str] = str,
) -> list[Problem]:
    """Return problems with file, line and column: of the nearest node on their path in the file.

    :param problems: those that already have a file are left alone.
    :param path_in_file: the path of a problem below the top of the file; empty where it is not about the file.
    :param name_of: turns a key at the top of the file into the name that paths begin with.
    :raises InvalidDocument: the file cannot be read.
    """
    root = read_yaml(path, lambda text: yaml.compose(text, yaml.SafeLoader))
    results = []
    for problem in problems:
        node, mark, normalized = root, None, name_of
        for part in () if problem.file else path_in_file(problem):
            below = _below(node, part, normalized)
            if below is None:
                break
            mark, node = below
            normalized = str
        results.append(problem if mark is None else _at(problem, path, mark))
    return results


def _below(node: Any, part: str | int, name_of: Callable[[str], str]) -> tuple[Any, Any] | None:
    """Return the place and the value of a mapping's entry, or of a list's item; None where it is missing."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        item = node.value[part]
        return item.start_mark, item
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):  # The last of two equal keys holds.
            if name_of(str(key.value)) == str(part):
                return key.start_mark, value
    return None
