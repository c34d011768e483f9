"""Which graphs a device has."""

from __future__ import annotations

import torch

from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.graphs.recorded import RecordedGraphs


def grapher_for(device: torch.device, *, accounts: bool = True, dumps: bool = False) -> Grapher:
    """Return what captures on a device.

    :param accounts: read a GPU's memory around each capture.
    :param dumps: capture so that graphs can be dumped; recorded ones always can.
    """
    if device.type == "cuda":
        from capture_planner.runtime.graphs.cuda import CudaGraphs

        return CudaGraphs(device, accounts=accounts, dumps=dumps)
    return RecordedGraphs()
