"""Records: frozen keyword-only attrs classes whose field types carry their constraints.

A constraint is written once, in an ``Annotated`` type. It is enforced when the object is made (by
anyone), reported with file and line when a file is read (``codec``), and published in the JSON
Schema and the file reference (``codec.json_schema``).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

import attrs

from capture_planner.errors import InvalidValue, Problem

T = TypeVar("T")
K = TypeVar("K")


@attrs.frozen
class Interval:
    """An integer from ``ge`` to ``le``, both included; no upper end where ``le`` is None."""

    ge: int
    le: int | None = None
    instead: str = ""
    """Remedy for a value below ``ge``."""

    def problem(self, value: Any) -> str | None:
        # Not isinstance: a bool is an int too, and is no count.
        if type(value) is not int:
            return f"expected an integer, got {value!r}"
        if value < self.ge:
            return f"must be at least {self.ge}, got {value}" + (f"; {self.instead}" if self.instead else "")
        return f"must be at most {self.le}, got {value}" if self.le is not None and value > self.le else None

    def schema(self) -> dict[str, Any]:
        return {"minimum": self.ge} if self.le is None else {"minimum": self.ge, "maximum": self.le}


@attrs.frozen(kw_only=True)
class Number:
    """A finite number, whole or not: ``ge`` or more, more than ``gt``, and ``le`` or less."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def problem(self, value: Any) -> str | None:
        # NaN and infinity pass a lower bound, so they are refused first.
        if type(value) not in (int, float) or not math.isfinite(value):
            return f"expected a number, got {value!r}"
        if self.ge is not None and value < self.ge:
            return f"must be at least {self.ge:g}, got {value}"
        if self.gt is not None and value <= self.gt:
            return f"must be more than {self.gt:g}, got {value}"
        return None if self.le is None or value <= self.le else f"must be at most {self.le:g}, got {value}"

    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.ge, "exclusiveMinimum": self.gt, "maximum": self.le}
        return {keyword: bound for keyword, bound in bounds.items() if bound is not None}


@attrs.frozen
class Pattern:
    """A string that matches ``regex`` as a whole; ``meaning`` is the rule in words, after "must be"."""

    regex: str
    meaning: str

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return f"expected text, got {value!r}"
        return None if re.fullmatch(self.regex, value) else f"must be {self.meaning}, got {value!r}"

    def schema(self) -> dict[str, Any]:
        # JSON Schema searches in a text, so the pattern gets the anchors that fullmatch implies.
        return {"pattern": f"^(?:{self.regex})$"}


Constraint = Interval | Number | Pattern
"""A rule for one field: ``problem`` returns what is wrong with a value, ``schema`` the rule in JSON Schema keywords."""


BYTES = "bytes"
"""In the metadata of a type: ``codec`` reads and writes the number as ``2GiB``."""

# Limits are far above any machine's. They turn a slip of the keyboard into a message, where it would
# otherwise become a gigabyte of tables.
Count = Annotated[int, Interval(1, 1 << 20)]
NonNegative = Annotated[int, Interval(0, 1 << 20)]
ByteCount = Annotated[int, Interval(0, 1 << 60), BYTES]
Tally = Annotated[int, Interval(0)]
Amount = Annotated[float, Number(ge=0, le=1e12)]  # nothing that was measured is larger
Sum = Annotated[float, Number(ge=0)]
Positive = Annotated[float, Number(gt=0, le=1e12)]
Share = Annotated[float, Number(ge=0, le=1)]
Name = Annotated[
    str, Pattern(r"[A-Za-z0-9][A-Za-z0-9._/+ -]{0,127}", "a name of up to 128 letters, digits, spaces and ._/+-")
]


def constraints(annotation: Any) -> tuple[Constraint, ...]:
    """Return the constraints of an ``Annotated`` type."""
    if typing.get_origin(annotation) is Annotated:
        return tuple(m for m in annotation.__metadata__ if isinstance(m, Constraint))
    return ()


Path = tuple[str | int, ...]
# ``Optional[X]`` has the first as its origin, ``X | None`` the second.
UNIONS = (typing.Union, types.UnionType)


Check = Callable[[Any], Sequence[Problem]]
"""Returns each place in a value that breaks a type, constraints included; paths begin at the value."""


def _check(hint: Any) -> Check:
    """Return the check of a type. Plain numbers are not checked: a field that needs it has a constraint."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return functools.partial(_check_constraints, constraints(hint))
    if origin in UNIONS:
        # NoneType has no check of its own: it would accept every value.
        checks = [_check(arg) for arg in args if arg is not type(None)]
        return functools.partial(_check_union, checks, type(None) in args)
    if origin is Mapping:
        return functools.partial(_check_mapping, *map(_check, args))
    if origin is tuple:
        checks = [_check(arg) for arg in args if arg is not Ellipsis]
        return functools.partial(_check_tuple, checks, Ellipsis in args)
    if isinstance(hint, type) and (issubclass(hint, enum.Enum | str) or attrs.has(hint)):
        return lambda value: () if isinstance(value, hint) else _wrong(f"expected {hint.__name__}, got {value!r}")
    return lambda value: ()


def _wrong(message: str) -> Sequence[Problem]:
    return [Problem(message=message)]


def _check_constraints(rules: Sequence[Constraint], value: Any) -> Sequence[Problem]:
    return [Problem(message=message) for rule in rules if (message := rule.problem(value)) is not None]


def _check_union(checks: Sequence[Check], optional: bool, value: Any) -> Sequence[Problem]:
    if value is None and optional:
        return ()
    wrong_as = [check(value) for check in checks]
    # By the first alternative, the usual form: the problems of all of them would contradict each other.
    return wrong_as[0] if all(wrong_as) else ()


def _check_mapping(key: Check, item: Check, value: Any) -> Sequence[Problem]:
    return [problem for each, of in value.items() for problem in (*key(each), *item(of))]


def _check_tuple(items: list[Check], repeated: bool, value: Any) -> Sequence[Problem]:
    if not isinstance(value, tuple):
        return _wrong(f"expected a tuple, got {value!r}")
    if not repeated and len(value) != len(items):
        return _wrong(f"expected {len(items)} items, got {len(value)}")
    typed = zip(items * len(value) if repeated else items, value, strict=True)
    return [problem.under((index,)) for index, (item, each) in enumerate(typed) for problem in item(each)]


@functools.cache
def _checks(cls: type) -> Mapping[str, Check]:
    """Return the check of each field of a record's class: made for its first instance, as most commands have few."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: _check(hints[field.name]) for field in attrs.fields(cls)}


def _validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Raise the first problem of a field's value."""
    cls: Any = type(instance)
    if problems := _checks(cls)[attribute.name](value):
        raise InvalidValue([problems[0].under((key_of(attribute),))])


def _enforce(_: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Give each field the validator."""
    return [field.evolve(validator=_validate) for field in fields]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by their key; keys, and the items of each, in the order of ``items``."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def raise_any(problems: Iterable[Problem]) -> None:
    """Raise ``InvalidValue`` with the problems, if there are any."""
    if found := list(problems):
        raise InvalidValue(found)


def duplicates(values: Sequence[Any], message: str, items: str, key: str) -> Iterator[Problem]:
    """Yield each value that occurs earlier, at the ``key`` of its item; ``message`` has a place for it."""
    again = ((index, value) for index, value in enumerate(values) if value in values[:index])
    return (Problem(path=(items, index, key), message=message.format(value)) for index, value in again)


def field(doc: str, *, key: str | None = None, **options: Any) -> Any:
    """Declare a field of a record.

    :param doc: one line, published in the JSON Schema and in the file reference.
    :param key: its key in files and in digests, where that is not the attribute's name.
    :param options: what ``attrs.field`` takes.
    """
    return attrs.field(metadata={"doc": doc, "key": key}, **options)


def key_of(attribute: attrs.Attribute[Any]) -> str:
    """Return the key that files have for a field."""
    return attribute.metadata.get("key") or attribute.name


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, keyword-only attrs class that enforces the constraints of its types.

    Its method ``_problems``, where it has one, yields what is wrong with its fields together. Raises ``InvalidValue``
    from the constructor, with the path of each field.
    """
    checked: Any = cls
    if hasattr(cls, "_problems"):
        # attrs calls it after the validators: each field is right by itself when fields are compared.
        checked.__attrs_post_init__ = lambda self: raise_any(self._problems())
    return attrs.frozen(kw_only=True, field_transformer=_enforce)(cls)


def replace(instance: T, **changes: Any) -> T:
    """Return a copy of a record with some fields changed; validated like a new one."""
    return cast(T, attrs.evolve(cast(Any, instance), **changes))


def canonical(value: Any) -> Any:
    """Return plain data that is equal for equal values; without defaults, so that a new field changes no digest."""
    if isinstance(value, enum.Enum):
        return value.name
    if attrs.has(type(value)):
        fields = (f for f in attrs.fields(type(value)) if f.init)
        return {key_of(f): canonical(item) for f in fields if (item := getattr(value, f.name)) != default_of(f)}
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        # 1.0 equals 1, and files have either: both give the same digest.
        return int(value)
    return value


def default_of(attribute: attrs.Attribute[Any]) -> Any:
    """Return the default value of a field, or ``attrs.NOTHING`` where it has none."""
    factory: Callable[[], Any] | None = getattr(attribute.default, "factory", None)
    # A factory is called: defaults are compared with values, and published.
    return attribute.default if factory is None else factory()


def digest(value: Any) -> str:
    """Return ``sha256:...`` of a record: equal records have equal digests, in every process."""
    # Sorted keys and ASCII: the digest depends neither on the order of fields nor on an encoding.
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
