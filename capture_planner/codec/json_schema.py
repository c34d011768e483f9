"""JSON Schema of the file kinds, generated from the records."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs

from capture_planner import codec
from capture_planner.codec.converter import WORDS
from capture_planner.codec.rows import ROWS
from capture_planner.records._base import BYTES, UNIONS, constraints, default_of, key_of
from capture_planner.records.environment import Environment
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.spec import SCHEMA_VERSION, Spec
from capture_planner.records.traffic import Traffic

DRAFT = "https://json-schema.org/draft/2020-12/schema"

_PRIMITIVES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema(kind: type) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the files of one record type."""
    definitions: dict[str, Any] = {}
    top = _record_schema(kind, definitions)
    top["properties"]["version"] = {"const": SCHEMA_VERSION, "description": "version of this file's schema"}
    return {"$schema": DRAFT, "title": f"capture-planner {kind.__name__.lower()}", **top, "$defs": definitions}


SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {
    kind.__name__.lower(): partial(json_schema, kind)
    for kind in (Spec, Plan, Environment, Observation, Traffic, Profile)
}
"""The kinds of file, each with its schema."""


def fields_of(kind: type) -> Iterator[tuple[attrs.Attribute[Any], Any]]:
    """Return the fields of a record that its file has, each with its type as the file has it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for attribute in attrs.fields(kind):
        if attribute.init:
            hint = hints[attribute.name]
            yield attribute, types.GenericAlias(tuple, (ROWS[hint].row, ...)) if hint in ROWS else hint


def _record_schema(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    properties, required = {}, []
    for attribute, hint in fields_of(kind):
        described = {"description": attribute.metadata["doc"], **_schema(hint, definitions)}
        default = default_of(attribute)
        if default is attrs.NOTHING:
            required.append(key_of(attribute))
        elif default is None or isinstance(default, bool | int | float | str | enum.Enum):
            described["default"] = codec.label(default) if isinstance(default, enum.Enum) else default
        properties[key_of(attribute)] = described
    return {
        "type": "object",
        "description": inspect.cleandoc(kind.__doc__ or "").splitlines()[0],
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        base = _schema(args[0], definitions)
        for rule in constraints(hint):
            base |= rule.schema()
        if BYTES in args:
            return {"anyOf": [base, {"type": "string", "pattern": "^[0-9]{1,19}\\s*(B|KiB|MiB|GiB|TiB)$"}]}
        return base
    if origin in UNIONS:
        return {"anyOf": [_schema(arg, definitions) for arg in args]}
    if origin is tuple and args[1:] == (Ellipsis,):
        return {"type": "array", "items": _schema(args[0], definitions)}
    if origin is tuple:
        items = [_schema(arg, definitions) for arg in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is Mapping:
        key, value = (_schema(arg, definitions) for arg in args)
        return {"type": "object", "propertyNames": key, "additionalProperties": value}
    if hint is type(None):
        return {"type": "null"}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [codec.label(member) for member in hint]}
    if attrs.has(hint):
        if hint.__name__ not in definitions:
            # Taken first, so that a record that held itself would end here.
            definitions[hint.__name__] = {}
            definitions[hint.__name__] = _record_schema(hint, definitions)
        mapping = {"$ref": f"#/$defs/{hint.__name__}"}
        if hint not in WORDS:
            return mapping
        word = typing.get_type_hints(hint, include_extras=True)[WORDS[hint]]
        return {"anyOf": [_schema(word, definitions), mapping]}
    return {"type": _PRIMITIVES[hint]}
