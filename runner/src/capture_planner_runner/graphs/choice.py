"""Which graphs a device has."""

from __future__ import annotations

import torch

from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.graphs.recorded import RecordedGraphs


def grapher_for(device: torch.device, *, accounts: bool = True) -> Grapher:
    """Return what captures on a device; ``accounts``: and reads a GPU's memory around each capture."""
    if device.type == "cuda":
        from capture_planner_runner.graphs.cuda import CudaGraphs

        return CudaGraphs(device, accounts=accounts)
    return RecordedGraphs()
