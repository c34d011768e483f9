"""Tolerances by dtype, and the errors that they bound: of rows, of tokens and of cache slots."""

from __future__ import annotations

import math

import attrs
import torch


@attrs.frozen
class Tolerance:
    """Largest relative error of a row's norm, for kernels that sum in another order at padded extents."""

    layer: float
    """After attention of one layer."""
    model: float
    """After all layers of a model; also of a token: how far its logit may be below the largest one."""


TOLERANCES = {
    torch.float64: Tolerance(layer=1e-9, model=1e-9),
    torch.float32: Tolerance(layer=1e-4, model=1e-4),
    torch.float16: Tolerance(layer=5e-3, model=1e-2),
    torch.bfloat16: Tolerance(layer=2e-2, model=5e-2),
}
"""More than kernels of the dtype round, and far less than one wrong key. Integers must be equal."""

NEAR_TIES = 1e-3
"""Above this tolerance of a model, two tokens may be equally likely: a near tie."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype with the bits of an element, by its size in bytes."""


def tolerance_of(tensor: torch.Tensor) -> float:
    """Return the largest error that a row of a model's tensor may have; 0 for integers."""
    return TOLERANCES[tensor.dtype].model if tensor.is_floating_point() else 0.0


def row_errors(graph: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """Return ``float64[rows]``: the norm of each row's difference, relative to the eager row's.

    Infinite where integers differ, and where a number is not finite.
    """
    actual, expected = graph.reshape(len(graph), -1), eager.reshape(len(eager), -1)
    if not eager.is_floating_point():
        return torch.where((actual != expected).any(1), torch.inf, 0.0).double()
    apart = (actual.double() - expected.double()).norm(dim=1)
    # Two rows of zeros are equal, and 0 / 0 would be NaN, which counts as infinite.
    return _finite(torch.where(apart == 0, 0.0, apart / expected.double().norm(dim=1)))


def below_best(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return ``[rows]``: how far the logit of each token ``int64[rows]`` is below the largest of ``logits
    [rows, vocab_size]``; infinite for a number that is no token.
    """
    inside = (tokens >= 0) & (tokens < logits.shape[1])
    chosen = logits.gather(1, torch.where(inside, tokens, 0)[:, None])[:, 0]
    return torch.where(inside, logits.amax(1) - chosen, torch.inf)


def shortfall(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return ``float64[rows]``: ``below_best`` as a share of the row's largest magnitude."""
    found = logits.double()
    short = below_best(tokens, found)
    # A row of zeros has no magnitude to divide by, and all of its tokens are the best.
    return _finite(torch.where(short == 0, 0.0, short / found.abs().amax(1)))


def prints(cache: torch.Tensor) -> torch.Tensor:
    """Return ``int64[slots]``: checksums that show which slots of ``cache [slots, width]`` were written.

    There is no memory for a second copy of a whole cache.
    """
    return cache.view(INTEGERS[cache.element_size()]).sum(1, dtype=torch.int64)


def _finite(errors: torch.Tensor) -> torch.Tensor:
    return errors.nan_to_num(torch.inf, torch.inf)


def finite(value: torch.Tensor) -> float | int | None:
    """Return the number in a tensor of one element; None if it is not finite."""
    found: float | int = value.item()
    return found if math.isfinite(found) else None
