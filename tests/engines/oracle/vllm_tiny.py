"""A tiny model and drafter for vLLM's own capture code, and what stands for the parts of vLLM that decide nothing.

Numbers are small integers in float64, so that every sum is exact, in any order. Outputs depend on the token, its
position, its request and its adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

VOCABULARY, WIDTH = 64, 4


class Anything:
    """Stands for what is called and decides nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False


class Tensors:
    """Stands for ``IntermediateTensors``."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @classmethod
    def empty_like(cls, other: Tensors) -> Tensors:
        return cls({name: torch.empty_like(tensor) for name, tensor in other.tensors.items()})

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.tensors[key]
        return Tensors({name: tensor[key] for name, tensor in self.tensors.items()})


class Forward:
    """Stands for vLLM's forward context."""

    def __init__(self) -> None:
        self.current: Any = None

    @contextmanager
    def entered(self, attn_metadata: Any, config: Any, **values: Any) -> Iterator[None]:
        before = self.current
        mode = values.get("cudagraph_runtime_mode")
        self.current = SimpleNamespace(
            attn_metadata=attn_metadata, cudagraph_runtime_mode=mode, batch_descriptor=values.get("batch_descriptor")
        )
        try:
            yield
        finally:
            self.current = before


class Layers(torch.nn.Module):
    """An embedding, attention, and a linear layer; attention is a break of PIECEWISE graphs."""

    def __init__(self, world: Any, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.table = torch.randint(-4, 5, (VOCABULARY, WIDTH), generator=draw).double()
        self.weight = torch.randint(-2, 3, (WIDTH, WIDTH), generator=draw).double()
        self.world = world
        self.first: Any = self._first
        self.last: Any = self._last
        self.attention: Any = self._attention

    def compiled(self) -> Layers:
        """Wrap the parts around attention, as torch.compile's backend does."""
        wrapper = self.world.modules["vllm.compilation.cuda_graph"].CUDAGraphWrapper
        mode = self.world.modes.PIECEWISE
        self.first, self.last = (wrapper(part, self.world.config, mode) for part in (self._first, self._last))
        return self

    def breakable(self) -> Layers:
        """Let attention break a capture."""
        self.attention = self.world.modules["vllm.compilation.breakable_cudagraph"].eager_break_during_capture(
            self._attention
        )
        return self

    def _first(self, ids: torch.Tensor, positions: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.table[ids.long() % VOCABULARY] + positions.double()[:, None] % 7
        if hidden is not None:
            found = found + hidden % 11
        if self.world.active_loras:  # kernels of adapters run only where there are some
            found = found + self.world.adapters[: len(ids), None]
        return found, torch.empty_like(found)

    def _attention(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        rows = self.world.forward.current.attn_metadata["rows"]
        out.copy_(hidden * 2 + rows[: len(hidden), None])

    def _last(self, attended: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(attended, self.weight) % 1000

    def run(self, ids: torch.Tensor, positions: torch.Tensor, hidden: Any = None) -> torch.Tensor:
        found, out = self.first(ids, positions, hidden)
        self.attention(found, out)
        last: torch.Tensor = self.last(out)
        return last


class Target(Layers):
    """The target, on the last rank of a pipeline or before it, with or without auxiliary hidden states."""

    def forward(self, input_ids: Any = None, positions: Any = None, **others: Any) -> Any:
        output = self.run(input_ids, positions)
        if not self.world.is_last:
            return Tensors({"hidden": output, "residual": output + 1})
        return (output, [output + 1, output * 2]) if self.world.aux else output


class Drafter(Layers):
    """The drafter, which reads the target's hidden states."""

    def forward(self, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any = None) -> Any:
        return self.run(input_ids, positions, hidden_states)
