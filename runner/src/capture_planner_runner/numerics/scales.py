"""Estimates of scale errors in one part of one layer: the rows' errors, projected on the effect of such a scale.

A scale of 1 % in one layer of many is far below the rounding noise of a row in half precision. But it moves every
row in a direction that is known, and noise does not. So the difference of all rows from the reference is projected on
that direction, which a forward of the reference with the part scaled shows. The same projection of exact runs, in
blocks of rows, says how much of it is noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import attrs
import torch

from capture_planner_runner.numerics.dense import DenseForward
from capture_planner_runner.numerics.record import LayerScale

TOKENS = 4096
"""Tokens of the reference that are recomputed for each part."""
STEP = 0.01
"""The scale that shows the direction: 1 % more."""
SIGMAS = 6
"""Standard errors that noise explains: a run has a few hundred estimates."""
FLOOR = 0.001
"""Scale error that is allowed without noise: other algorithms have a small bias (below 0.03 % on a CPU)."""
BLOCK = 16
"""Neighbouring rows of a sequence with dependent errors."""
FEWEST = 32
"""Fewest rows of a graph for an estimate of its own."""


@attrs.frozen(kw_only=True, eq=False)
class ComparedRows:
    """Served rows without gross and infinite errors."""

    hidden: torch.Tensor
    """``[rows, hidden_size]``"""
    tokens: torch.Tensor
    """``int64[rows]``: the row of the reference for each one."""
    served_by: Sequence[Sequence[str]]
    """Kinds of forwards of each row: its mode, and its graph."""
    modes: frozenset[str]
    """Kinds that are modes of graphs."""


def scales(
    dense: DenseForward,
    exact: torch.Tensor,
    runs: tuple[torch.Tensor, torch.Tensor],
    served: ComparedRows,
    wider: Callable[[], AbstractContextManager[None]],
    advance: Callable[[str], None],
) -> Iterator[LayerScale]:
    """Yield the scale of each part of each layer over all rows, and of single graphs where it is beyond its bound.

    :param exact: ``[tokens, hidden_size]`` of the reference, for whole sequences from the first on.
    :param runs: two exact runs in the model's dtype, for the same tokens.
    :param wider: makes the model the reference while it is entered.
    """
    count, tokens = _counted(dense.sequences)
    blocks = torch.tensor(_blocks(dense.sequences[:count]), device=exact.device)
    exact, first, second = exact[:tokens], *(run[:tokens].to(exact.dtype) for run in runs)
    # Exact runs round where the served one does: what differs between them is the noise, and less than the rounding.
    usual, apart = (first + second) / 2, second - first
    # Columns are weighted by the inverse of their noise: in trained models a few are far larger than the others.
    scatter = ((first - exact).square() + (second - exact).square()).mean(0)
    weights = torch.where(scatter > 0, 1 / scatter, 0.0)
    near = served.tokens < tokens
    at = served.tokens[near]
    own = served.hidden[near].to(exact.dtype) - usual[at]
    kinds = [kinds for kinds, is_near in zip(served.served_by, near.tolist(), strict=True) if is_near]
    counts = Counter(kind for each in kinds for kind in each)
    members = {
        kind: torch.tensor([kind in each for each in kinds], device=exact.device)
        for kind, number in counts.items()
        if FEWEST <= number < len(kinds)
    }
    members["all"] = torch.ones(len(kinds), dtype=torch.bool, device=exact.device)
    # An error in graphs only has another effect than one in all forwards, which makes the keys wrong as well.
    modes = {
        kind: torch.zeros(tokens, dtype=torch.bool, device=exact.device).index_fill_(0, at[rows], True)
        for kind, rows in members.items()
        if kind in served.modes
    }
    for layer in range(dense.model.num_layers):
        with wider():
            attention = (dense.hidden(scales={layer: 1 + STEP}, count=count) - exact) / STEP
            alone = {
                kind: (dense.hidden(scales={layer: 1 + STEP}, scaled=scaled, count=count) - exact) / STEP
                for kind, scaled in modes.items()
            }
            with dense.model.scaled(layer, 1 + STEP):
                whole = (dense.hidden(count=count) - exact) / STEP
        advance(f"layer {layer}")
        for part, direction, judged in (
            ("attention", attention, members),
            ("rest", whole - attention, members),
            *(("attention", direction, {kind: members["all"]}) for kind, direction in alone.items()),
        ):
            weighted = direction * weights
            size = (direction * weighted).sum(1)
            error_of_scale = _standard_error((apart * weighted).sum(1), size, blocks)
            along, sizes = (own * weighted[at]).sum(1), size[at]
            for label, rows in judged.items():
                total = float(sizes[rows].sum())
                if not total or not math.isfinite(total):
                    continue
                # The fewer rows, the more noise.
                bound = FLOOR + SIGMAS * error_of_scale * math.sqrt(max(float(size.sum()) / total, 1.0))
                error = float(along[rows].sum()) / total
                scale = LayerScale(
                    layer=layer, part=part, served_by=label, rows=int(rows.sum()), error=error, bound=bound
                )
                if math.isfinite(error) and math.isfinite(bound) and (label == "all" or not scale.is_within):
                    yield scale


def _counted(sequences: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return how many sequences from the first on are of ``TOKENS`` tokens together, and their tokens; at least one."""
    tokens = len(sequences[0])
    for count, sequence in enumerate(sequences[1:], 1):
        if tokens + len(sequence) > TOKENS:
            return count, tokens
        tokens += len(sequence)
    return len(sequences), tokens


def _blocks(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the block of each token: none goes on from one sequence to the next."""
    found: list[int] = []
    for sequence in sequences:
        first = found[-1] + 1 if found else 0
        found += [first + at // BLOCK for at in range(len(sequence))]
    return found


def _standard_error(along: torch.Tensor, size: torch.Tensor, blocks: torch.Tensor) -> float:
    """Return the standard error of a scale that least squares over all rows find, from the scatter of the blocks."""
    total, count = float(size.sum()), int(blocks[-1]) + 1
    if not total:
        return 0.0
    sums = torch.zeros(count, dtype=along.dtype, device=along.device).index_add_(0, blocks, along)
    return float(sums.norm()) / total
