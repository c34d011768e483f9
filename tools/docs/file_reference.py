"""The reference of a file kind in Markdown: every record that it is made of, field by field."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from capture_planner import codec
from capture_planner.codec.json_schema import fields_of
from capture_planner.records._base import BYTES, Constraint, Pattern, constraints, default_of, key_of


def reference(kind: type) -> str:
    """Return the reference of one file kind: every record it is made of, field by field, in Markdown."""
    sections, seen = [], {kind}
    waiting = [kind]
    while waiting:
        current = waiting.pop(0)
        sections.append(_section(current))
        for _, hint in fields_of(current):
            for record in _records_in(hint):
                if record not in seen:
                    seen.add(record)
                    waiting.append(record)
    return "\n".join(sections)


def _records_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and attrs.has(hint):
        yield hint
    for arg in typing.get_args(hint):
        yield from _records_in(arg)


def _section(kind: type) -> str:
    lines = [f"### {kind.__name__}", "", inspect.cleandoc(kind.__doc__ or ""), ""]
    lines += ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for attribute, hint in fields_of(kind):
        default = _default_text(attribute, is_size=BYTES in getattr(hint, "__metadata__", ()))
        lines.append(f"| `{key_of(attribute)}` | {type_text(hint)} | {default} | {attribute.metadata['doc']} |")
    return "\n".join([*lines, ""])


def type_text(hint: Any) -> str:
    """Write a type in words, with its bounds."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        if BYTES in args:
            return "size such as `2GiB`"
        bounds = _bound_text(constraints(hint))
        return bounds if args[0] is str else f"{type_text(args[0])} {bounds}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin is tuple and args[1:] == (Ellipsis,):
        return f"list of {type_text(args[0])}"
    if origin is tuple:
        return "[" + ", ".join(type_text(arg) for arg in args) + "]"
    if origin is Mapping:
        return f"mapping of {type_text(args[0])} to {type_text(args[1])}"
    if hint is type(None):
        return "none"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{codec.label(member)}`" for member in hint)
    if attrs.has(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return {int: "integer", float: "number", bool: "`true` or `false`", str: "text"}[hint]


def _bound_text(rules: Sequence[Constraint]) -> str:
    meanings = [rule.meaning for rule in rules if isinstance(rule, Pattern)]
    if meanings:
        return "; ".join(meanings)
    schema: dict[str, Any] = {}
    for rule in rules:
        schema |= rule.schema()
    if "exclusiveMinimum" in schema:
        return f"above {schema['exclusiveMinimum']:g}"
    low, high = schema["minimum"], schema.get("maximum")
    return f"from {low}" if high is None else f"{low} to {high}"


def _default_text(attribute: attrs.Attribute[Any], *, is_size: bool) -> str:
    default = default_of(attribute)
    if is_size and default:
        return f"`{codec.format_bytes(default)}`"
    if default is attrs.NOTHING:
        return "required"
    if default in ((), {}, "", None):
        return "none"
    if attrs.has(type(default)):
        return "all defaults"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, enum.Enum):
        return f"`{codec.label(default)}`"
    return f"`{default}`"
