"""The JSON of a value: its fields by name, all of them, unless a hook says otherwise.

This is what ``--format json`` prints of an answer or a report. Plans, specs and environments are files:
their JSON is the data of the file (``to_data``), which leaves out defaults and writes sizes as ``2GiB``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import attrs
import cattrs

from capture_planner.codec.converter import label
from capture_planner.codec.writing import to_data
from capture_planner.records._base import key_of
from capture_planner.records.environment import Environment
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Spec
from capture_planner.records.traffic import Traffic

Hook = TypeVar("Hook", bound=Callable[[Any], Any])

_CONVERTER = cattrs.Converter()


def plain(value: Any) -> Any:
    """Return a value as JSON has it: by the hook of its own class, whatever type a field declares."""
    # cattrs would write the value of an enum, which is a number for some.
    return label(value) if isinstance(value, enum.Enum) else _CONVERTER.unstructure(value)


def plain_fields(value: Any, *properties: str, omit: Collection[str] = (), **keys: str) -> dict[str, Any]:
    """Return every field of a record except ``omit``, and then the properties that are named.

    The key of a field is its key in files (``key_of``), or what ``keys`` has for it: ``message="says"``.
    """
    fields = {field.name: key_of(field) for field in attrs.fields(type(value)) if field.name not in omit}
    names = fields | {name: name for name in properties} | keys
    return {key: plain(getattr(value, name)) for name, key in names.items()}


def plain_some(value: Any, *names: str) -> dict[str, Any]:
    """Return the named fields and properties of a value, as JSON has them."""
    return {name: plain(getattr(value, name)) for name in names}


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda cls: isinstance(cls, type) and issubclass(cls, kinds)


def json_of(*kinds: type) -> Callable[[Hook], Hook]:
    """Register a function as what writes the JSON of these classes and their subclasses."""

    def register(hook: Hook) -> Hook:
        _CONVERTER.register_unstructure_hook_func(_is(*kinds), hook)
        return hook

    return register


def json_fields(kind: type, *properties: str, omit: Collection[str] = (), **keys: str) -> None:
    """Register ``plain_fields`` with these arguments as the JSON of a class."""
    json_of(kind)(lambda value: plain_fields(value, *properties, omit=omit, **keys))


def json_some(kind: type, *names: str) -> None:
    """Register ``plain_some`` with these names, in this order, as the JSON of a class."""
    json_of(kind)(lambda value: plain_some(value, *names))


# cattrs tries the hooks in reverse order, so the hooks of ``json_of`` take precedence.
_CONVERTER.register_unstructure_hook_func(attrs.has, plain_fields)
_CONVERTER.register_unstructure_hook_func(_is(tuple, list), lambda items: [plain(item) for item in items])
_CONVERTER.register_unstructure_hook_func(
    _is(Mapping), lambda items: {str(plain(key)): plain(item) for key, item in items.items()}
)
json_of(Plan, Spec, Environment, Observation, Traffic, Profile)(to_data)
