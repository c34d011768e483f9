"""Mutants of LoRA: each is caught, by a check that is not about it alone, and nothing is found without them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from gallery.adapters import MUTANTS
from gallery.core import Mutant, detect
from support.mutants import searched
from support.runner_conformance.adapter_rows import check_adapters

pytestmark = pytest.mark.usefixtures("one_thread")


@searched(MUTANTS)
def test_it_is_caught(mutant: Mutant) -> None:
    """By its tokens or by the padding."""
    detection = detect(mutant)
    assert detection is not None
    assert detection.by == "adapters"


def test_nothing_is_found_in_the_runner() -> None:
    """Before the mutants and after: their patches are gone."""
    assert check_adapters(0) is None
