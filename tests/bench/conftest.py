"""Tests of the bench import what they share from this folder, and run on one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _computes(one_thread: None) -> None:
    """All of these compute."""
