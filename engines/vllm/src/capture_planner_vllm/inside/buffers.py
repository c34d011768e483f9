"""Buffers that vLLM allocates by its first forward of a capture, at the size of the largest graph.

``ModelCudaGraphManager.capture`` (vllm/v1/worker/gpu/cudagraph_utils.py, 0.33) allocates what its full graphs return,
hidden states and intermediate tensors, by the first warm-up: of the largest PIECEWISE graph, where there is one. In
vLLM's own lists no graph is larger. A plan may have a larger decode, whose output would not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

CreateForward = Callable[..., Callable[[Any], Any]]
"""vLLM's ``CreateForwardFn``: (descriptor, warmup) to the forward that is captured."""


def largest_first(original: Callable[..., None]) -> Callable[..., None]:
    """Let ``CudaGraphManager.capture`` warm up its largest graph before any other, where it would not do so itself.

    The warm-up is the one that vLLM runs for that graph later: by its own function, in its own context.
    """

    @functools.wraps(original)
    def capture(manager: Any, create_forward_fn: CreateForward, *args: Any, **kwargs: Any) -> None:
        original(manager, _warming_up(manager, create_forward_fn), *args, **kwargs)

    return capture


def _warming_up(manager: Any, create_forward: CreateForward) -> CreateForward:
    """Return a manager's function that at its first call runs the warm-up of the largest graph too."""
    every = [desc for listed in manager._capture_descs.values() for desc in listed]
    largest = [max(every, key=lambda desc: desc.num_tokens)] if every else []

    @functools.wraps(create_forward)
    def create(desc: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        while largest:
            first = largest.pop()
            # Where vLLM begins with the largest itself, a second warm-up would only take time.
            if first.num_tokens > desc.num_tokens:
                # NONE runs it eager, as vLLM does in its own warm-up.
                create_forward(first, *args, **kwargs)(type(desc.cg_mode).NONE)
        return create_forward(desc, *args, **kwargs)

    return create
