"""Kernel shapes to test: small ones if the backend has them, else those that libraries compile."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from capture_planner.errors import BackendError, CaptureError, GuardError, RunError
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention
from capture_planner.records.environment import DeviceKind
from capture_planner_conformance.failure import origins
from capture_planner_conformance.scene import Arrive, RunBatch, Scene, Shape
from capture_planner_conformance.stage import Subject
from capture_planner_conformance.steps import run_step

SMALL = tuple(
    Shape(dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=4, page_size=size, longest=longest, windowed=windowed)
    for dtype, heads, kv_heads, size, longest, windowed in (
        ("float64", 2, 1, 4, 24, False),
        ("float32", 2, 2, 3, 17, False),
        ("float64", 4, 2, 1, 12, True),
        ("float32", 4, 2, 4, 20, True),
        ("float32", 2, 1, 2, 140, False),
    )
)
"""For a backend without compiled kernels, in the order of their size; the last has more than 64 keys and 256 pages."""

KERNELS = tuple(
    Shape(dtype=dtype, heads=heads, kv_heads=2, head_dim=64, page_size=size, longest=longest, windowed=windowed)
    for dtype, heads, size, longest, windowed in (
        ("bfloat16", 4, 16, 160, False),
        ("float16", 4, 16, 160, False),
        ("bfloat16", 4, 64, 160, False),
        ("float32", 4, 16, 160, False),
        ("bfloat16", 8, 16, 160, False),
        ("bfloat16", 4, 16, 160, True),
        ("bfloat16", 4, 16, 1040, False),
    )
)
"""Shapes that attention libraries compile: heads of 64, pages of 16 and 64."""

CANDIDATES = (SMALL, KERNELS)


@attrs.frozen
class RefusedShape:
    """A shape that a backend does not run on this machine."""

    shape: Shape
    reason: str


@attrs.frozen
class RefusedFeature:
    """A feature of scenes that a backend does not run."""

    name: str
    reason: str


def usable_features(
    subject: Subject, shape: Shape, wanted: Sequence[str] | None = None
) -> tuple[tuple[str, ...], tuple[RefusedFeature, ...]]:
    """Return which of the ``wanted`` features the backend runs, and which it refuses, by one decode of each.

    Without ``wanted`` they are all of its scenes'. A support of NEVER is a refusal, and so is an error of its own. Any
    other error is a bug: the feature is used, and the search reports it.
    """
    usable, refused = [], []
    for name, feature in subject.stage.scene_type.features.items():
        if wanted is not None and name not in wanted:
            continue
        reason = None
        if feature.may_be_refused:
            # The first value is without the feature, and the last has most of it.
            reason = _feature_refusal(subject, subject.stage.scene_type(shape=shape, **{name: feature.values[-1]}))
        if reason is None:
            usable.append(name)
        else:
            refused.append(RefusedFeature(feature.name, reason))
    return tuple(usable), tuple(refused)


def _never(subject: Subject, scene: Scene) -> str | None:
    """Return the backend's reason to support no graph of a scene's target; None if it supports some."""
    attention = Attention.of(scene.spec(subject.backend), Role.TARGET, layers=1, window=scene.shape.window)
    support = subject.registry[subject.backend].support(Role.TARGET, attention, subject.environment)
    return support.reason if support.level is GraphSupport.NEVER else None


def _feature_refusal(subject: Subject, scene: Scene) -> str | None:
    if (reason := _never(subject, scene)) is not None:
        return reason
    try:
        with subject.stage(subject, scene) as stage:
            for step in (Arrive(prompt=2, computed=2), RunBatch(rows=((0, 1, 0),))):
                run_step(stage, step)
    except Exception as error:
        raised = origins(error)[-1]
        # These two are RunErrors too, but they are findings and not refusals.
        is_own = isinstance(raised, (BackendError, RunError)) and not isinstance(raised, (CaptureError, GuardError))
        return str(raised) if is_own else None
    return None


def usable_shapes(subject: Subject, wanted: Sequence[Shape] = ()) -> tuple[tuple[Shape, ...], tuple[RefusedShape, ...]]:
    """Return the shapes that the backend runs, and those that it refuses.

    Candidates are ``wanted``, or the first of ``CANDIDATES`` of which it runs any. Raises ``RunError`` with the
    reasons if it runs none.
    """
    refused: list[RefusedShape] = []
    for candidates in (wanted,) if wanted else tuple(_longer(each, subject) for each in CANDIDATES):
        usable = []
        for shape in candidates:
            reason = _refusal(subject, shape)
            if reason is None:
                usable.append(shape)
            else:
                refused.append(RefusedShape(shape, reason))
        if usable:
            return tuple(usable), tuple(refused)
    reasons = "; ".join(dict.fromkeys(each.reason for each in refused))
    raise RunError(
        f"the backend {subject.backend!r} runs no shape on this machine that it could be tested with: {reasons}; "
        "name a shape that it runs, or test it on a machine that it supports"
    )


def _longer(candidates: tuple[Shape, ...], subject: Subject) -> tuple[Shape, ...]:
    """Return candidates that reach past the keys at which the backend says that its kernels change."""
    longest = max(subject.kernel_sizes.num_keys, default=0) + 8  # keys on both sides of the change
    widest = max(candidates, key=lambda shape: shape.longest)
    return (*candidates, replace(widest, longest=longest)) if longest > widest.longest else candidates


def _refusal(subject: Subject, shape: Shape) -> str | None:
    """Return the backend's reason not to run a shape; None if it runs it."""
    # Without graphs, since only `reserve` is asked.
    scene = subject.stage.scene_type(shape=shape, mode=GraphMode.NONE, layers=1, size_tokens=(16,), size_reqs=(3,))
    if (reason := _never(subject, scene)) is not None:
        return reason
    if subject.environment.device.kind is DeviceKind.CUDA and shape.dtype == "float64":
        return "float64 on a GPU shows nothing that float32 does not"
    try:
        with subject.stage(subject, scene):
            return None
    except BackendError as error:
        # Its own refusal has no cause; any other error is a bug, for the suite to find.
        return None if error.__cause__ is not None else str(error)
    except Exception:  # A bug too: the shape is used, and the search reports it with a case.
        return None
