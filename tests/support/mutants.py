"""Mutants of the gallery as parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gallery.core import LATE, Mutant


def searched(mutants: Iterable[Mutant]) -> pytest.MarkDecorator:
    """Return the parameter ``mutant`` of a test that searches for each; late ones are ``thorough``."""
    thorough = [pytest.mark.thorough]
    return pytest.mark.parametrize(
        "mutant", [pytest.param(each, id=each.name, marks=thorough if each.name in LATE else []) for each in mutants]
    )
