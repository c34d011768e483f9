"""Recorded graphs of small programs."""

import torch

from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.graphs.recorded import RecordedGraphs

GRAPHS: Grapher = RecordedGraphs()


def same(one, other):
    """Whether two tensors have the same bits, NaN included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
