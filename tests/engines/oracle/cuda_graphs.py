"""A CUDA graph on a CPU: it records the operators that run under its capture, and runs them again on the same storage.

As on a device, the host's decisions are those of the capture: a replay runs no line of Python, reads its inputs where
they lay then, and writes its outputs to where they lay then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

Step = tuple[Callable[..., Any], Any, Any, Any]


class _Recording(TorchDispatchMode):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, result))
        return result


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._steps: list[Step] = []
        self._mode: _Recording | None = None
        self.captured = False

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """Record from here on."""
        assert not self.captured
        self._mode = _Recording(self._steps)
        self._mode.__enter__()

    def capture_end(self) -> None:
        """Record no more."""
        assert self._mode is not None
        self._mode.__exit__(None, None, None)
        self._mode, self.captured = None, True

    def replay(self) -> None:
        """Run every operator again, into the outputs of the capture."""
        assert self.captured
        for func, args, kwargs, outputs in self._steps:
            if not func._schema.is_mutable and _shares_storage(outputs, (args, kwargs)):
                continue  # a view of storage that is written elsewhere
            found = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue  # it has written in place
            for old, new in zip(_tensors(outputs), _tensors(found), strict=True):
                old.copy_(new)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def _shares_storage(outputs: Any, inputs: Any) -> bool:
    held = {tensor.untyped_storage().data_ptr() for tensor in _tensors(inputs)}
    return any(tensor.untyped_storage().data_ptr() in held for tensor in _tensors(outputs))


@contextmanager
def graph(captured: Graph, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Stands for ``torch.cuda.graph``."""
    captured.capture_begin()
    try:
        yield
    finally:
        captured.capture_end()


class Torch:
    """Stands for torch in an engine's module: torch itself, but for its devices."""

    cuda = SimpleNamespace(CUDAGraph=Graph, graph=graph, Stream=object)
    accelerator = SimpleNamespace(
        synchronize=lambda: None, empty_cache=lambda: None, get_memory_info=lambda: (1 << 30, 1 << 30)
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
