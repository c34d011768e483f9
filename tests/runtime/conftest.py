"""Makes ``worlds`` and ``probe`` of the property tests importable under importlib import mode."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "property"))


@pytest.fixture(scope="session")
def one_thread():
    """Tiny products are slower on many threads; tests that compute ask for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
