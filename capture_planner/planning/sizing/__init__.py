"""Capture-size tables: ladders by policy, minimax, and what a budget leaves of them."""

from capture_planner.planning.sizing.budget import fit, total
from capture_planner.planning.sizing.ladder import Ladder
from capture_planner.planning.sizing.minimax import fewest, minimax, worst_ratio
from capture_planner.planning.sizing.policies import Context, decode_sizes, mixed_sizes

__all__ = ["Context", "Ladder", "decode_sizes", "fewest", "fit", "minimax", "mixed_sizes", "total", "worst_ratio"]
