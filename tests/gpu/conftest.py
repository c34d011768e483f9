"""Makes ``_deployments``, ``_equality`` and ``_logits`` of benchmarks/ importable, and threads fewer."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def one_thread():
    """Tiny products are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
