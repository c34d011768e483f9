"""Mutants of sampling: each is caught, by a check that is not about it alone, and nothing is found without them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from gallery.core import Mutant, detect
from gallery.sampling import MUTANTS
from support.mutants import searched
from support.runner_conformance.sampled import check_sampling

pytestmark = pytest.mark.usefixtures("one_thread")


@searched(MUTANTS)
def test_it_is_caught(mutant: Mutant) -> None:
    """By a token or by the distribution."""
    detection = detect(mutant)
    assert detection is not None
    assert detection.by == "sampling"


def test_nothing_is_found_in_the_runner() -> None:
    """Before the mutants and after: their patches are gone."""
    assert check_sampling(0) is None
