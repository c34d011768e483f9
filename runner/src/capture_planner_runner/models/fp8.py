"""Linear layers with FP8 weights: one byte per weight, and float32 scales of blocks.

A forward multiplies by the weight in the model's dtype: FP8 times its scale, rounded once. Activations stay in that
dtype, where an engine rounds them to FP8 too; so no row can depend on the numbers of another one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

FP8 = torch.float8_e4m3fn
SCALE = "weight_scale"
"""Name of the scales in ``Fp8Linear``."""

Block = tuple[int, int]
"""Rows and columns of a weight that have one scale. The last block of an axis may be smaller."""

_LARGEST = torch.finfo(FP8).max


def grid_of(shape: tuple[int, ...], block: Block) -> Block:
    """Return how many scales a weight has along each axis."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def quantized(weight: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in FP8 with its scales, float32: the largest number of each block becomes the largest of FP8."""
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    (above, beside), (height, width) = grid_of(weight.shape, block), block
    largest = padded.view(above, height, beside, width).abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    numbers = weight.float() / _spread(scale, block, weight.shape)
    return numbers.clamp(-_LARGEST, _LARGEST).to(FP8), scale


def dequantized(weight: torch.Tensor, scale: torch.Tensor, block: Block, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight times its scales in ``dtype``, rounded once from float32 or wider, as transformers 5 does."""
    wide = torch.promote_types(dtype, torch.float32)
    return (weight.to(wide) * _spread(scale.to(wide), block, weight.shape)).to(dtype)


def _spread(scale: torch.Tensor, block: Block, shape: torch.Size) -> torch.Tensor:
    """Repeat scales for the numbers of their blocks; along an axis with a single one they broadcast."""
    for axis, extent in enumerate(block):
        if scale.shape[axis] > 1:
            scale = scale.repeat_interleave(extent, axis).narrow(axis, 0, shape[axis])
    return scale


class Fp8Linear(nn.Module):
    """A linear layer with an FP8 weight.

    :param weight: ``float8_e4m3fn[out_features, in_features]``.
    :param scale: ``float32``, of the shape that ``grid_of`` says.
    :param dtype: that the weight is multiplied in. Wider inputs meet the same numbers, as in verification.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, block: Block, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.block, self.dtype = block, dtype

    @classmethod
    def of(cls, linear: nn.Linear, block: Block) -> Fp8Linear:
        """Quantize a linear layer, on any device, ``meta`` included."""
        return cls(*quantized(linear.weight.detach(), block), linear.bias, block, linear.weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self.matrix(inputs.dtype), self.bias)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight that is multiplied by, ``[out_features, in_features]``."""
        return dequantized(self.weight, self.weight_scale, self.block, self.dtype).to(dtype)

    def unit(self, axis: int) -> int:
        """Return how many rows (axis 0) or columns (axis 1) have one scale and stay together; 1 where all have it."""
        return self.block[axis] if self.weight_scale.shape[axis] > 1 else 1

    def part(self, axis: int, place: slice) -> Fp8Linear:
        """Return these rows (axis 0) or columns (axis 1), whole units of them, in memory of their own."""
        scale = self.weight_scale.detach()
        if scale.shape[axis] > 1:
            first, last = place.start // self.unit(axis), place.stop // self.unit(axis)
            scale = scale.narrow(axis, first, last - first)
        weight = self.weight.detach().narrow(axis, place.start, place.stop - place.start)
        bias = self.bias[place].clone() if axis == 0 and self.bias is not None else self.bias
        return Fp8Linear(weight.clone(), scale.clone(), bias, self.block, self.dtype)
