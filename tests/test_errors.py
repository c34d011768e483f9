"""Errors carry objects; text is made where it is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import (
    InvalidDocument,
    InvalidValue,
    PlanningError,
    Problem,
    class_and_message,
    format_path,
    one_line,
)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem(message="m"), "m"),
        (Problem(message="m", remedy="r"), "m; r"),
        (Problem(message="m", path=("a", 0, "b")), "a[0].b: m"),
        (Problem(message="m", file="f", line=2, column=3), "f:2:3: m"),
        (Problem(message="m", file="f", line=2, column=3, path=("a",), remedy="r"), "f:2:3: a: m; r"),
    ],
)
def test_a_problem_says_as_much_as_is_known(problem, text):
    """``file:line:column: path: message; remedy``."""
    assert str(problem) == text


PATH = st.lists(st.sampled_from(["a", "bc", 0, 12])).map(tuple)


@given(PATH, PATH)
def test_a_path_grows_from_outside(outer, inner):
    """Under a prefix, the path is the prefix and then itself; parts can be left out."""
    assert Problem(message="m", path=inner).under(outer).path == outer + inner
    assert Problem(message="m", path=inner).under(outer, skip=1).path == outer + inner[1:]


def test_paths_read_as_people_write_them():
    """Names with dots, positions in brackets."""
    assert format_path(("roles", "target", "groups", 0, "name")) == "roles.target.groups[0].name"


@pytest.mark.parametrize("kind", [InvalidValue, InvalidDocument, PlanningError])
def test_an_error_carries_all_its_problems(kind):
    """One line each."""
    error = kind(Problem(message=m) for m in ("one", "two"))
    assert [p.message for p in error.problems] == ["one", "two"]
    assert str(error) == "one\ntwo"


WORDS = st.lists(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1))


@given(WORDS, st.sampled_from(["\n", "  ", "\r\n\t"]))
def test_an_error_is_quoted_in_one_line(words, between):
    """All its words, with one space between two."""
    assert one_line(ValueError(between.join(words))) == " ".join(words)


@given(st.text(max_size=20))
def test_error_is_quoted_with_its_class(text):
    """In one line, whatever its message."""
    line = class_and_message(ValueError(text))
    assert line.split() == ["ValueError:", *text.split()]
    assert len(line.splitlines()) == 1


def test_error_whose_message_fails_is_quoted():
    class MuteError(Exception):
        def __str__(self):
            return 1 / 0

    assert class_and_message(MuteError()) == "MuteError: (its message cannot be shown)"
