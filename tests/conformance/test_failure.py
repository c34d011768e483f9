"""Violations: which law an exception of a forward breaks."""

import pytest
import torch

from capture_planner_conformance.failure import Check, Violation


@pytest.mark.parametrize(
    ("error", "check"),
    [
        (IndexError("index 9 is out of range"), Check.BOUNDED),
        (RuntimeError("index 9 is out of bounds for dimension 0 with size 4"), Check.BOUNDED),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.06 GiB"), Check.RAN),
        (ValueError("out of ideas"), Check.RAN),
    ],
)
def test_only_indices_are_out_of_bounds(error, check):
    """A device without memory is not an index that is too large."""
    failure = Violation.of(error).failure
    assert failure.check is check
    assert ("beyond what it indexes" in failure.message) == (check is Check.BOUNDED)
