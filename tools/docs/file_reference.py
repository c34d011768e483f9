"""The reference of a file kind in Markdown: every record that it is made of, field by field.

A file that people write says of each field what it takes and what stands where it is absent. Of a file that a
command writes, readers need the meaning; ``capture-planner schema`` has its types.
"""

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


def reference(kind: type, *, written_by_hand: bool) -> str:
    """Return the reference of one file kind: every record it is made of, field by field, in Markdown."""
    sections, seen = [], {kind}
    waiting = [kind]
    while waiting:
        # First in, first out: a record stands near what names it.
        current = waiting.pop(0)
        sections.append(_section(current, written_by_hand))
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


def _section(kind: type, written_by_hand: bool) -> str:
    lines = [f"### {kind.__name__}", "", inspect.cleandoc(kind.__doc__ or ""), ""]
    for attribute, hint in fields_of(kind):
        takes = type_text(hint) if written_by_hand else " or ".join(_links(hint))
        if written_by_hand:
            takes += _default_text(attribute, is_size=BYTES in getattr(hint, "__metadata__", ()))
        lines.append(f"- `{key_of(attribute)}`: {attribute.metadata['doc']}{f' ({takes})' if takes else ''}")
    return "\n".join([*lines, ""])


def _links(hint: Any) -> list[str]:
    """Return the records in a type, as links."""
    return [_link(record) for record in dict.fromkeys(_records_in(hint))]


def _link(record: type) -> str:
    return f"[{record.__name__}](#{record.__name__.lower()})"


def type_text(hint: Any) -> str:
    """Write a type in words, with its bounds."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        if BYTES in args:
            return "size such as `2GiB`"
        bounds = _bound_text(constraints(hint))
        # Bounds of a whole number or a text say what it is.
        return bounds if args[0] in (str, int) else f"{type_text(args[0])} {bounds}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(arg) for arg in args if arg is not type(None))
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
        return _link(hint)
    return {int: "integer", float: "number", bool: "boolean", str: "text"}[hint]


def _bound_text(rules: Sequence[Constraint]) -> str:
    # What a name is made of is said once, on the page.
    meanings = [rule.meaning.partition(" of up to")[0] for rule in rules if isinstance(rule, Pattern)]
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
    """Return what stands where the field is absent, after a semicolon; nothing of a field that is required."""
    default = default_of(attribute)
    if default is attrs.NOTHING:
        return ""
    # The defaults in a record are in its own section.
    if default in ((), {}, "", None) or attrs.has(type(default)):
        return "; optional"
    if is_size:
        text = codec.format_bytes(default)
    elif isinstance(default, bool):
        text = str(default).lower()
    elif isinstance(default, enum.Enum):
        text = codec.label(default)
    else:
        text = str(list(default) if isinstance(default, tuple) else default)
    return f"; default `{text}`"
