"""Which kernels a backend is asked for: small ones where it has them, else those that libraries have."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from capture_planner.conformance.scene import Scene, Shape
from capture_planner.conformance.stage import Stage, Tested
from capture_planner.errors import BackendError, RunError
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.records.backend import Attention
from capture_planner.records.environment import DeviceKind

SMALL = tuple(
    Shape(
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=4,
        page_size=size,
        longest=longest,
        windowed=windowed,
    )
    for dtype, heads, kv_heads, size, longest, windowed in (
        ("float64", 2, 1, 4, 24, False),
        ("float32", 2, 2, 3, 17, False),
        ("float64", 4, 2, 1, 12, True),
    )
)
"""For a backend without kernels: any width will do, and the smallest shows the most."""

KERNELS = tuple(
    Shape(dtype=dtype, heads=heads, kv_heads=2, head_dim=64, page_size=size, longest=160, windowed=windowed)
    for dtype, heads, size, windowed in (
        ("bfloat16", 4, 16, False),
        ("float16", 4, 16, False),
        ("bfloat16", 4, 64, False),
        ("float32", 4, 16, False),
        ("bfloat16", 8, 16, False),
        ("bfloat16", 4, 16, True),
    )
)
"""What attention libraries have compiled: 64 wide, pages of 16 and 64."""

CANDIDATES = (SMALL, KERNELS)


@attrs.frozen
class Refused:
    """A shape that a backend does not run here."""

    shape: Shape
    reason: str


def usable_shapes(
    tested: Tested, wanted: Sequence[Shape] = ()
) -> tuple[tuple[Shape, ...], tuple[Refused, ...]]:
    """Return the shapes that the backend runs: of ``wanted``, or of the first candidates of which it runs any.

    Raises ``RunError`` with the reasons where it runs none.
    """
    refused: list[Refused] = []
    for candidates in (wanted,) if wanted else CANDIDATES:
        usable = []
        for shape in candidates:
            reason = _refusal(tested, shape)
            if reason is None:
                usable.append(shape)
            else:
                refused.append(Refused(shape, reason))
        if usable:
            return tuple(usable), tuple(refused)
    reasons = "; ".join(dict.fromkeys(each.reason for each in refused))
    raise RunError(
        f"the backend {tested.backend!r} runs no graph here that it could be tested with: {reasons}; "
        "name a shape that it runs, or test it on a machine that it is made for"
    )


def _refusal(tested: Tested, shape: Shape) -> str | None:
    """Return why a backend does not run a shape, in its own words; None where it does."""
    scene = Scene(shape=shape, mode=GraphMode.NONE, layers=1, size_tokens=(16,), size_reqs=(3,))
    spec = scene.spec(tested.backend)
    attention = Attention.of(spec, Role.TARGET, layers=1, window=shape.window)
    support = tested.registry[tested.backend].support(Role.TARGET, attention, tested.environment)
    if support.level is GraphSupport.NEVER:
        return support.reason
    if tested.environment.device.kind is DeviceKind.CUDA and shape.dtype == "float64":
        return "float64 on a GPU shows nothing that float32 does not"
    try:
        with Stage(tested, scene):
            return None
    except BackendError as error:
        # What a backend refuses it says itself; what breaks in it is for the suite to find.
        return None if error.__cause__ is not None else str(error)
    except Exception:  # This too: the shape is used, and what broke is a finding with its case.
        return None
