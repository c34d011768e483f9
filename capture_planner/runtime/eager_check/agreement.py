"""Whether two tensors agree: errors by row, and how large they may be."""

from __future__ import annotations

import math

import torch

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far a row may be from the eager one, relative to its norm: kernels sum in another order at padded extents. Whole
numbers must be equal; a token of the target may have a logit that is short of the largest by so much of it."""

HALF = 1e-3
"""Dtypes with a larger tolerance have near ties: two tokens that are as likely."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype that has the bits of an element, by its bytes."""


def tolerance_of(tensor: torch.Tensor) -> float:
    """Return the largest error that a row may have; 0 for whole numbers."""
    return TOLERANCES[tensor.dtype] if tensor.is_floating_point() else 0.0


def row_errors(graph: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """Return ``float64[rows]``: the norm of what is between two rows, relative to the eager row's.

    Infinite where whole numbers differ, and where a number is not finite.
    """
    actual, expected = graph.reshape(len(graph), -1), eager.reshape(len(eager), -1)
    if not eager.is_floating_point():
        return torch.where((actual != expected).any(1), torch.inf, 0.0).double()
    apart = (actual.double() - expected.double()).norm(dim=1)
    return _finite(torch.where(apart == 0, 0.0, apart / expected.double().norm(dim=1)))


def shortfall(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return ``float64[rows]``: how far the logit of each token ``int64[rows]`` is below the largest of
    ``logits [rows, vocab_size]``, as a share of the largest magnitude; infinite for a token that is none.
    """
    found = logits.double()
    inside = (tokens >= 0) & (tokens < found.shape[1])
    chosen = found.gather(1, torch.where(inside, tokens, 0)[:, None])[:, 0]
    short = found.amax(1) - chosen
    return _finite(torch.where(inside, torch.where(short == 0, 0.0, short / found.abs().amax(1)), torch.inf))


def prints(cache: torch.Tensor) -> torch.Tensor:
    """Return ``int64[slots]``, which tell whether a slot of ``cache [slots, width]`` was written.

    There is no memory for a second copy of a whole cache.
    """
    return cache.view(INTEGERS[cache.element_size()]).sum(1, dtype=torch.int64)


def _finite(errors: torch.Tensor) -> torch.Tensor:
    return errors.nan_to_num(torch.inf, torch.inf)


def finite(value: torch.Tensor) -> float | int | None:
    """Return the number of a tensor that has one; None where it is not finite."""
    found: float | int = value.item()
    return found if math.isfinite(found) else None
