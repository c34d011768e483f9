"""Made-up profiles of the shapes that measured ones have: affine, a staircase, and a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable

from capture_planner.modes import GraphMode, Role
from capture_planner.records.environment import Environment
from capture_planner.records.profile import CostCurve, GraphCost, Profile
from capture_planner.records.spec import Spec

TOKENS = (1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), 1536, 2048)
STAIRCASE = {1: 1.44, 8: 1.49, 64: 1.55, 128: 1.68, 192: 1.80, 256: 1.99, 272: 2.18, 384: 2.63, 512: 3.25}
"""Milliseconds of eight dense layers of an 8B shape on an H100, by tokens."""


def affine(tokens: int) -> float:
    """6 ms to read the weights, and 6 more for every 512 tokens."""
    return 6 + 6 * tokens / 512


def staircase(tokens: int) -> float:
    """Four and a half times the measured eight layers; tiles of 128 tokens above."""
    known = next((ms for size, ms in STAIRCASE.items() if size >= tokens), None)
    return 4.5 * (3.25 + (math.ceil(tokens / 128) - 4) * 0.75 if known is None else known)


def experts(tokens: int) -> float:
    """Padded rows are routed like real ones: each token reads its experts until all of 128 are read."""
    return 2.5 + 9 * (1 - (1 - 8 / 128) ** tokens) + 5 * tokens / 512


SHAPES: dict[str, Callable[[int], float]] = {"affine": affine, "staircase": staircase, "experts": experts}


def made_up(name: str, spec: Spec, environment: Environment) -> Profile:
    """Return a profile whose graphs take the time of a shape; a drafter has a twelfth of it, and eager 12 ms more."""
    shape, curves, graphs = SHAPES[name], [], []
    for role in spec.active_roles:
        part = 1 / 12 if role.is_drafter else 1
        launch = 1.0 if role.is_drafter else 12.0

        def curve(mode: GraphMode, more: float, part: float = part, role: Role = role) -> CostCurve:
            times = tuple(round(part * shape(tokens) + more, 6) for tokens in TOKENS)
            return CostCurve(role=role, mode=mode, tokens=TOKENS, milliseconds=times)

        curves += [curve(GraphMode.FULL, 0), curve(GraphMode.PIECEWISE, launch / 6), curve(GraphMode.NONE, launch)]
        graphs.append(GraphCost(role=role, mode=GraphMode.FULL, mib=8.0, driver_mib=4.0, seconds=0.08))
    return Profile(
        source="made up",
        date="2026-11-22T00:00:00Z",
        device=environment.device,
        model=spec.model,
        speculative=spec.speculative,
        curves=tuple(curves),
        graphs=tuple(graphs),
    )
