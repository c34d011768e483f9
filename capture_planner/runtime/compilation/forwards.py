"""The forwards of one body: compiled where they can be, and as they are where they cannot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from capture_planner.errors import RunError
from capture_planner.runtime.compilation.pieces import CompiledForward, Compiler, compiled
from capture_planner.runtime.compilation.trace import traced
from capture_planner.runtime.models.protocols import Attend, Weight

Inputs = Mapping[str, torch.Tensor]
Forward = Callable[..., Sequence[torch.Tensor]]
"""Called with an ``Attend``, a variant and inputs by name."""

ROWS: Mapping[str, int | None] = {"positions": -1, "active": None}
"""Which dimension of an input is a row for each token; 0 of all that are not named here."""


class NotCompiled(RunError):
    """A forward cannot be compiled; the message says why."""


Shared = dict[Hashable, CompiledForward]
"""Compiled forwards that runners of the same networks share, by network, variant and kinds of inputs."""


class Forwards:
    """The compiled forwards of one body by variant: of a target for so many active adapters, of a drafter by module.

    A variant is compiled once, for any number of rows; one that is not runs as it is. Nothing is compiled by a call.
    """

    def __init__(self) -> None:
        self.compiled: dict[int, CompiledForward] = {}

    def run(self, forward: Forward, attend: Attend, variant: int, inputs: Inputs) -> Sequence[torch.Tensor]:
        """Run one variant; ``forward`` is what it was compiled from."""
        found = self.compiled.get(variant)
        return forward(attend, variant, **inputs) if found is None else found(attend, inputs)

    def compile(
        self,
        forward: Forward,
        network: Hashable,
        variant: int,
        inputs: Inputs,
        weights: Iterable[Weight],
        compiler: Compiler,
        shared: Shared,
    ) -> int:
        """Compile one variant for inputs like these; return how many kinds of pieces were compiled.

        What ``shared`` has is not compiled again. Raises ``NotCompiled`` with the reason where it cannot be.
        """
        kinds = {name: (tensor, _dimension(name, tensor)) for name, tensor in inputs.items()}
        key = (network, variant, compiler, *((name, _kind(*each)) for name, each in sorted(kinds.items())))
        if key in shared:
            self.compiled[variant] = shared[key]
            return 0
        try:
            trace = traced(lambda attend, **given: forward(attend, variant, **given), kinds, weights)
            self.compiled[variant] = shared[key] = compiled(trace, compiler)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler and of a model's own code, anything
            message = " ".join(str(error).split())[:300]
            name = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
            raise NotCompiled(f"{name}{message}") from error
        return self.compiled[variant].kinds


def _kind(tensor: torch.Tensor, rows: int | None) -> Hashable:
    extents = tuple(size for index, size in enumerate(tensor.shape) if index != rows)
    return tensor.dtype, tensor.device, tensor.ndim, rows, extents


def _dimension(name: str, tensor: torch.Tensor) -> int | None:
    dimension = ROWS.get(name, 0)
    return dimension if dimension is None else dimension % tensor.ndim
