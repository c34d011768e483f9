"""Records: frozen keyword-only attrs classes whose field types carry their constraints.

A constraint is written once, in an ``Annotated`` type. It is enforced when the object is made (by
anyone), reported with file and line when a file is read (``codec``), and published in the JSON
Schema and the file reference (``schema``).
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, TypeVar, cast

import attrs

from capture_planner.errors import InvalidValue, Problem

T = TypeVar("T")


class Constraint(Protocol):
    """A rule that a single field value must meet; it describes itself."""

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with ``value``, or None."""

    def schema(self) -> dict[str, Any]:
        """Return the same rule as JSON Schema keywords."""


@attrs.frozen
class Between:
    """An integer from ``low`` to ``high``, both included; no upper end where ``high`` is None."""

    low: int
    high: int | None = None

    def problem(self, value: Any) -> str | None:
        if type(value) is not int:
            return f"expected an integer, got {value!r}"
        if value < self.low:
            return f"must be at least {self.low}, got {value}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high}, got {value}"
        return None

    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.low}
        return bounds if self.high is None else bounds | {"maximum": self.high}


@attrs.frozen
class Matches:
    """A string that matches ``pattern`` as a whole; ``says`` is the rule in words."""

    pattern: str
    says: str

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return f"expected text, got {value!r}"
        if re.fullmatch(self.pattern, value) is None:
            return f"must be {self.says}, got {value!r}"
        return None

    def schema(self) -> dict[str, Any]:
        return {"pattern": f"^(?:{self.pattern})$"}


@attrs.frozen
class Above:
    """A finite number, whole or not, greater than ``low``."""

    low: float

    def problem(self, value: Any) -> str | None:
        if type(value) not in (int, float) or not math.isfinite(value):
            return f"expected a number, got {value!r}"
        return None if value > self.low else f"must be more than {self.low:g}, got {value}"

    def schema(self) -> dict[str, Any]:
        return {"exclusiveMinimum": self.low}


@attrs.frozen
class Unit:
    """Not a rule but a way to write: ``codec`` reads and writes this integer as ``2GiB``."""

    name: str


BYTES = Unit("bytes")

# Limits are far above any machine's, and there so that a slip of the keyboard is a message rather
# than a gigabyte of tables.
Count = Annotated[int, Between(1, 1 << 20)]
NonNegative = Annotated[int, Between(0, 1 << 20)]
ByteCount = Annotated[int, Between(0, 1 << 60), BYTES]
Seconds = Annotated[float, Above(0)]
Name = Annotated[
    str,
    Matches(r"[A-Za-z0-9][A-Za-z0-9._/+ -]{0,127}", "a name of up to 128 letters, digits, spaces and ._/+-"),
]


def constraints(annotation: Any) -> tuple[Constraint, ...]:
    """Return the constraints that an annotation carries (``X | None`` carries those of X)."""
    if typing.get_origin(annotation) is Annotated:
        return tuple(m for m in annotation.__metadata__ if hasattr(m, "problem"))
    return ()


Check = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _validator(annotation: Any) -> Check | None:
    """Build the attrs validator of one annotation: each constraint, on each element of a tuple."""
    own = constraints(annotation)
    if own:

        def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
            for constraint in own:
                if (wrong := constraint.problem(value)) is not None:
                    raise InvalidValue([Problem(path=(attribute.name,), message=wrong)])

        return check
    args = typing.get_args(annotation)
    if type(None) in args:
        inner = next((v for a in args if (v := _validator(a)) is not None), None)
        return attrs.validators.optional(inner) if inner else None
    if typing.get_origin(annotation) is Mapping:
        return _of_items(*map(_validator, args))
    if isinstance(annotation, type) and (issubclass(annotation, enum.Enum | str) or attrs.has(annotation)):
        return _instance_of(annotation)
    if typing.get_origin(annotation) is tuple:
        repeated = args[1:] == (Ellipsis,)
        return _each([_validator(arg) for arg in args[: 1 if repeated else None]], repeated)
    return None


def _instance_of(kind: type) -> Check:
    """Check what no constraint does: a field of an enum, a record or plain text holds one."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, kind):
            wrong = f"expected {kind.__name__}, got {value!r}"
            raise InvalidValue([Problem(path=(attribute.name,), message=wrong)])

    return check


def _of_items(key: Check | None, value: Check | None) -> Check:
    def check(instance: Any, attribute: attrs.Attribute[Any], mapping: Any) -> None:
        for name, item in mapping.items():
            for element, part in ((key, name), (value, item)):
                if element is not None:
                    element(instance, attribute, part)

    return check


def _each(elements: list[Check | None], repeated: bool) -> Check:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, tuple):
            raise InvalidValue([Problem(path=(attribute.name,), message=f"expected a tuple, got {value!r}")])
        if not repeated and len(value) != len(elements):
            wrong = f"expected {len(elements)} items, got {len(value)}"
            raise InvalidValue([Problem(path=(attribute.name,), message=wrong)])
        for index, (element, item) in enumerate(zip(itertools.cycle(elements), value, strict=False)):
            try:
                if element is not None:
                    element(instance, attribute, item)
            except InvalidValue as error:
                raise InvalidValue(
                    problem.under((attribute.name, index), skip=1) for problem in error.problems
                ) from None

    return check


def _enforce(cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return [f if (check := _validator(hints[f.name])) is None else f.evolve(validator=check) for f in fields]


def field(doc: str, **options: Any) -> Any:
    """Declare a field of a record: one line of documentation, then what ``attrs.field`` takes.

    The documentation is published in the JSON Schema and in the file reference.
    """
    return attrs.field(metadata={"doc": doc}, **options)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, keyword-only attrs class that enforces the constraints of its types.

    Raises ``InvalidValue`` from the constructor, with the path of the field.
    """
    return attrs.frozen(kw_only=True, field_transformer=_enforce)(cls)


def replace(instance: T, **changes: Any) -> T:
    """Return a copy of a record with some fields changed; validated like a new one."""
    return cast(T, attrs.evolve(cast(Any, instance), **changes))


def canonical(value: Any) -> Any:
    """Return plain data that two equal values share: fields at their default are left out.

    A field that a later version adds with a default therefore changes no digest.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if attrs.has(type(value)):
        return {
            f.name: canonical(item)
            for f in attrs.fields(type(value))
            if f.init and (item := getattr(value, f.name)) != default_of(f)
        }
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1.0 equals 1, and is written so by some
    return value


def default_of(attribute: attrs.Attribute[Any]) -> Any:
    """Return the default value of a field, or ``attrs.NOTHING`` where it has none."""
    factory: Callable[[], Any] | None = getattr(attribute.default, "factory", None)
    return attribute.default if factory is None else factory()


def digest(value: Any) -> str:
    """Return ``sha256:...`` of a record: equal records have equal digests, in every process."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
