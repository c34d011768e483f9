"""Records: constraints in types are enforced, and digests are equal where records are."""

import enum
from typing import Annotated

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import InvalidValue
from capture_planner.records._base import (
    Count,
    Interval,
    Name,
    Number,
    Pattern,
    canonical,
    default_of,
    digest,
    field,
    record,
    replace,
)


class Colour(enum.Enum):
    """Two members."""

    RED = "red"


@record
class Sample:
    """One field of each shape that records have."""

    count: Count = field("one", default=1)
    maybe: Count | None = field("two", default=None)
    many: tuple[Count, ...] = field("three", default=())
    pair: tuple[Count, Name] = field("four", default=(1, "a"))
    nested: tuple[tuple[Count, ...], ...] = field("five", default=())
    plain: tuple[int, ...] = field("six", default=())
    share: Annotated[float, Number(gt=0.5)] = field("seven", default=1.0)
    names: dict[str, int] = field("eight", factory=dict)
    colour: Colour = field("nine", default=Colour.RED)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"count": 0}, "count: must be at least 1, got 0"),
        ({"count": True}, "count: expected an integer, got True"),
        ({"count": 1 << 21}, "count: must be at most 1048576, got 2097152"),
        ({"maybe": 0}, "maybe: must be at least 1, got 0"),
        ({"many": (1, 0)}, "many[1]: must be at least 1, got 0"),
        ({"pair": (1,)}, "pair: expected 2 items, got 1"),
        ({"pair": (1, "")}, "pair[1]: must be a name of up to 128 letters, digits, spaces and ._/+-, got ''"),
        ({"pair": (1, 1)}, "pair[1]: expected text, got 1"),
        ({"nested": ((1,), (0,))}, "nested[1][0]: must be at least 1, got 0"),
        ({"share": 0.5}, "share: must be more than 0.5, got 0.5"),
        ({"share": float("nan")}, "share: expected a number, got nan"),
        ({"share": "1"}, "share: expected a number, got '1'"),
    ],
)
def test_record_rejects_broken_constraints_with_path(change, problem):
    """The constructor and ``replace`` refuse alike."""
    for make in (Sample, lambda **changes: replace(Sample(), **changes)):
        with pytest.raises(InvalidValue) as caught:
            make(**change)
        assert [str(p) for p in caught.value.problems] == [problem]


def test_records_are_frozen_and_keyword_only():
    """Nothing changes in place, and no position has a meaning."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Sample().count = 2
    with pytest.raises(TypeError):
        Sample(1)


def test_canonical_form_omits_defaults():
    """A field that comes later with a default changes no digest."""
    assert canonical(Sample()) == {}
    assert canonical(Sample(count=2, names={"b": 1}, many=(1, 2))) == {"count": 2, "names": {"b": 1}, "many": [1, 2]}
    assert default_of(attrs.fields(Sample).names) == {}
    assert canonical((Colour.RED,)) == ["RED"]


@given(st.integers(1, 9), st.integers(1, 9))
def test_equal_records_have_equal_digests(one, other):
    """And different records different ones, whole numbers being numbers."""
    assert (digest(Sample(count=one)) == digest(Sample(count=other))) == (one == other)
    assert digest(Sample(share=one)) == digest(Sample(share=float(one)))


@given(st.integers(-5, 20), st.integers(-3, 3), st.integers(4, 10))
def test_constraint_schema_agrees_with_check(value, low, high):
    """Bounds in JSON Schema are those of the check."""
    rule = Interval(low, high)
    schema = rule.schema()
    assert (rule.problem(value) is None) == (schema["minimum"] <= value <= schema["maximum"])
    assert Interval(low).schema() == {"minimum": low}
    assert Number(gt=low).schema() == {"exclusiveMinimum": low}
    assert Pattern("a|b", "a or b").schema() == {"pattern": "^(?:a|b)$"}
