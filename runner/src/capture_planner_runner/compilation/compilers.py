"""Compilers of the pieces of a forward."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from capture_planner_runner.ranks.peers import Place

if TYPE_CHECKING:
    from capture_planner_runner.compilation.pieces import Compiler, Function

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Where Inductor reads the folder of its caches from, each time that it needs it."""

OPTIONS: dict[str, bool | int] = {
    # A timing decides nothing: each start has the same kernels, bits and fingerprints.
    "deterministic": True,
    "triton.autotune_pointwise": False,
    # A model has a dozen kernels: to start a process for each core takes longer than to compile them.
    "compile_threads": 1,
}
"""Options of Inductor, by their names in ``torch._inductor.config``."""


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


def compiler_for(device: torch.device, place: Place) -> Compiler:
    """Return Inductor on a GPU. Elsewhere operators are run as they are: Inductor's code for a CPU calls none."""
    if device.type != "cuda":
        return operators
    if place.size > 1:
        keep_apart(place.rank)
    return inductor


def keep_apart(rank: int) -> None:
    """Let this process, one rank of several, keep what it compiles from here on in a folder of its own.

    In a folder that ranks share, one may load the code of another one's GPU (pytorch#188332), or kernels of which two
    wrote the files at once (pytorch#92664).
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    shared, own = Path(cache_dir()), f"rank-{rank}"
    if shared.name != own:
        os.environ[CACHE] = str(shared / own)
