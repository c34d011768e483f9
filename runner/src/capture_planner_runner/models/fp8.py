"""Linear layers and experts with FP8 weights: one byte per weight, and float32 scales of blocks.

A forward multiplies by the weight in the model's dtype: FP8 times its scale, rounded once. Activations stay in that
dtype, where an engine rounds them to FP8 too; so no row can depend on the numbers of another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

FP8 = torch.float8_e4m3fn
SCALE = "weight_scale"
"""Name of the scales in ``Fp8Linear``."""

Block = tuple[int, int]
"""Rows and columns of a weight that have one scale. The last block of an axis may be smaller."""

ROWS, COLUMNS = -2, -1
"""Axes of a weight."""

_LARGEST = torch.finfo(FP8).max


def grid_of(shape: tuple[int, ...], block: Block) -> Block:
    """Return how many scales a weight ``[..., rows, columns]`` has along each axis."""
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def quantized(weight: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in FP8 with its scales, float32: the largest number of each block becomes the largest of FP8."""
    *others, rows, columns = weight.shape
    # Zeros fill the last blocks, and change no largest number.
    padded = functional.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    (above, beside), (height, width) = grid_of(weight.shape, block), block
    largest = padded.view(*others, above, height, beside, width).abs().amax((-3, -1))
    # A block of zeros has no largest number to divide by.
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    numbers = weight.float() / _spread(scale, block, weight.shape)
    return numbers.clamp(-_LARGEST, _LARGEST).to(FP8), scale


def dequantized(weight: torch.Tensor, scale: torch.Tensor, block: Block, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight times its scales in ``dtype``, rounded once from float32 or wider, as transformers 5 does."""
    wide = torch.promote_types(dtype, torch.float32)
    return (weight.to(wide) * _spread(scale.to(wide), block, weight.shape)).to(dtype)


def _spread(scale: torch.Tensor, block: Block, shape: torch.Size) -> torch.Tensor:
    """Repeat scales for the numbers of their blocks; along an axis with a single one they broadcast."""
    for axis, extent in zip((-2, -1), block, strict=True):
        if scale.shape[axis] > 1:
            # The last block of an axis may be smaller.
            scale = scale.repeat_interleave(extent, axis).narrow(axis, 0, shape[axis])
    return scale


class Fp8Weight(nn.Module):
    """An FP8 weight with its scales.

    :param weight: ``float8_e4m3fn[..., rows, columns]``.
    :param scale: ``float32``, of the shape that ``grid_of`` says.
    :param dtype: that the weight is multiplied in. Wider inputs meet the same numbers, as in verification.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, block: Block, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.block, self.dtype = block, dtype

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight that is multiplied by, ``[..., rows, columns]``."""
        return dequantized(self.weight, self.weight_scale, self.block, self.dtype).to(dtype)

    def unit(self, axis: int) -> int:
        """Return how many rows (axis -2) or columns (-1) have one scale and stay together; 1 where all have it."""
        return self.block[axis] if self.weight_scale.shape[axis] > 1 else 1

    def cut(self, axis: int, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return these rows (axis -2) or columns (-1), in memory of their own, with the scales of these blocks."""
        scale = self.weight_scale.detach()
        if scale.shape[axis] > 1:
            first, last = place.start // self.unit(axis), place.stop // self.unit(axis)
            scale = scale.narrow(axis, first, last - first)
        # Cloned below: a view would keep the whole weight in memory.
        weight = self.weight.detach().narrow(axis, place.start, place.stop - place.start)
        return weight.clone(), scale.clone()


class Fp8Linear(Fp8Weight):
    """A linear layer with an FP8 weight ``[out_features, in_features]``."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, block: Block, dtype: torch.dtype
    ) -> None:
        super().__init__(weight, scale, block, dtype)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear, block: Block) -> Fp8Linear:
        """Quantize a linear layer, on any device, ``meta`` included."""
        return cls(*quantized(linear.weight.detach(), block), linear.bias, block, linear.weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self.matrix(inputs.dtype), self.bias)

    def part(self, axis: int, place: slice) -> Fp8Linear:
        """Return these rows (axis -2) or columns (-1), whole units of them."""
        # Columns are inputs: their partial sums are added over ranks, and the bias belongs to each output.
        bias = self.bias[place].clone() if axis == ROWS and self.bias is not None else self.bias
        return Fp8Linear(*self.cut(axis, place), bias, self.block, self.dtype)


class Fp8Experts(Fp8Weight):
    """The FP8 weights of one projection of all experts, ``[experts, parts, rows, columns]``.

    Gate and up are two parts: a block has no rows of both.
    """

    @classmethod
    def of(cls, whole: torch.Tensor, parts: int, block: Block) -> Fp8Experts:
        """Quantize ``[experts, parts * rows, columns]``, on any device, ``meta`` included."""
        experts, rows, columns = whole.shape
        split = whole.detach().view(experts, parts, rows // parts, columns)
        return cls(*quantized(split, block), block, whole.dtype)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what the library multiplies by, ``[experts, parts * rows, columns]``."""
        return super().matrix(dtype).flatten(1, 2)

    def part(self, axis: int, place: slice) -> Fp8Experts:
        """Return these rows (axis -2) or columns (-1) of every part, whole units of them."""
        return Fp8Experts(*self.cut(axis, place), self.block, self.dtype)


class DequantizedExperts:
    """The experts of a layer as the library's functions read them: with weights in a dtype that can be multiplied."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.matrix(self._dtype) if isinstance(value, Fp8Experts) else value
