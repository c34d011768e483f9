"""Files in: text -> places -> records, with every problem of a file at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import attrs
from cattrs.errors import ClassValidationError

from capture_planner.codec.converter import CONVERTER, problems_of
from capture_planner.codec.documents import MAX_BYTES, Node, parse
from capture_planner.errors import InvalidDocument, InvalidValue, Problem
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan
from capture_planner.records.spec import SCHEMA_VERSION, Spec

T = TypeVar("T")


def load_spec(path: str | Path) -> Spec:
    """Read a spec file; raises ``InvalidDocument`` with every problem in it."""
    return _load(path, Spec)


def load_environment(path: str | Path) -> Environment:
    """Read an environment file; raises ``InvalidDocument`` with every problem in it."""
    return _load(path, Environment)


def load_plan(path: str | Path) -> Plan:
    """Read a plan file; raises ``InvalidDocument`` with every problem in it."""
    return _load(path, Plan)


def is_plan(node: Node) -> bool:
    """Say whether a parsed file is a plan: its roles are a list, those of a spec a mapping."""
    roles = node.value.get("roles") if isinstance(node.value, dict) else None
    return roles is not None and isinstance(roles.value, list)


def loads(text: str, kind: type[T], name: str = "<text>") -> T:
    """Read a record of ``kind`` from YAML (or JSON) text."""
    return _structure(parse(text, name), name, kind)


def _load(path: str | Path, kind: type[T]) -> T:
    return loads(read(path), kind, str(path))


def read(path: str | Path) -> str:
    """Read a text file, no further than the size limit; raises ``InvalidDocument``."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise InvalidDocument([Problem(file=str(path), message=message)]) from error
    if len(content) > MAX_BYTES:
        raise InvalidDocument([Problem(file=str(path), message="the file is larger than 1 MiB")])
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text, at byte {error.start}"
        raise InvalidDocument([Problem(file=str(path), message=message)]) from error


def _structure(node: Node, name: str, kind: type[T]) -> T:
    version = node.value.get("version") if isinstance(node.value, dict) else None
    if version is not None and type(version.value) is int and version.value > SCHEMA_VERSION:
        problem = Problem(
            path=("version",),
            message=f"the file has schema version {version.value}, and this capture-planner reads {SCHEMA_VERSION}",
            remedy="upgrade capture-planner",
        )
        raise InvalidDocument([_located(problem, node, name)])
    other = {Spec: "a plan, not a spec", Plan: "a spec, not a plan"}.get(kind)
    is_either = isinstance(node.value, dict) and "model" in node.value
    if other is not None and is_either and is_plan(node) is not (kind is Plan):
        raise InvalidDocument([_located(Problem(message=f"this is {other}"), node, name)])
    try:
        return CONVERTER.structure(node.plain(), kind)
    except (ClassValidationError, InvalidValue) as error:
        raise InvalidDocument(placed(problems_of(error), node, name)) from None


def placed(problems: Iterable[Problem], node: Node, name: str) -> list[Problem]:
    """Return problems with the file, line and column of their paths, in the order of the file."""
    located = [_located(problem, node, name) for problem in problems]
    return sorted(located, key=lambda problem: (problem.line or 0, problem.column or 0))


def _located(problem: Problem, node: Node, name: str) -> Problem:
    line, column = node.locate(problem.path)
    return attrs.evolve(problem, file=name, line=line, column=column)
