"""Tests of the bench import what they share from this folder, and run on one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _computes(one_thread: None) -> None:
    """All of these compute."""
