"""What makes functions of the pieces of a forward."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from capture_planner.runtime.compilation.pieces import Compiler, Function

OPTIONS: dict[str, bool | int] = {
    # A timing decides nothing: each start has the same kernels, bits and fingerprints.
    "deterministic": True,
    "triton.autotune_pointwise": False,
    # A model has a dozen kernels: to start a process for each core takes longer than to compile them.
    "compile_threads": 1,
}
"""What Inductor is told, by the names in ``torch._inductor.config``."""


def operators(module: fx.GraphModule, inputs: list[Any]) -> Function:
    """Run the operators one by one, as they were traced: recorded graphs see them."""
    return module


def inductor(module: fx.GraphModule, inputs: list[Any]) -> Function:
    """Compile with Inductor, for any T. Its caches on disk have what an earlier process compiled."""
    for node in module.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    with warnings.catch_warnings():
        # A hint that TF32 would be faster, though how float32 is rounded is not for the runner to decide; and what
        # torch says to its own modules.
        warnings.filterwarnings("ignore", "TensorFloat32", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor import standalone_compile  # takes seconds

        options = {"config_patches": dict(OPTIONS)}
        compiled: Function = standalone_compile(module, inputs, dynamic_shapes="from_graph", options=options)
    return compiled


def compiler_for(device: torch.device) -> Compiler:
    """Return Inductor on a GPU. Elsewhere operators are run as they are: Inductor's code for a CPU calls none."""
    return inductor if device.type == "cuda" else operators
