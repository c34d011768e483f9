"""What a scene can have in addition to plain attention: which of it a backend runs, and what is never tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from capture_planner.conformance.scene import Scene

FEATURES: Mapping[str, tuple[Any, ...]] = {
    "softcap": (False, False, True),
    "sinks": (False, False, True),
    "sharp": (False, False, True),
    "fp8": (False, False, False, True),
    "recurrent": (False, False, True),
    "coupled": (False, False, True),
    "compiled": (False, False, True),
    "loras": (0, 0, 0, 0, 0, 1, 2),
    "ranks": (1, 1, 1, 1, 2, 4),
    "beyond": (0, 0, 0, 1, 3),
    "lazy": (False, False, False, True),
}
"""Fields of a ``Scene``, each with the values to draw from; the first one is without the feature."""

SCORING = ("softcap", "sinks", "sharp", "fp8")
"""Those that a backend may refuse; the others are the runner's."""

NAMES = {
    "softcap": "soft capping",
    "sinks": "attention sinks",
    "sharp": "another scale",
    "fp8": "a KV cache in fp8",
    "recurrent": "recurrent layers",
    "coupled": "coupled rows",
    "compiled": "compiled models",
    "loras": "LoRA",
    "ranks": "sequence parallelism",
    "beyond": "entries beyond the limits",
    "lazy": "captures on first use",
    "window": "sliding windows",
    "varying": "decodes of varying lengths",
}


def features_of(scene: Scene) -> Iterator[str]:
    """Yield the names of the features of a scene."""
    for name, values in FEATURES.items():
        if getattr(scene, name) != values[0]:
            yield NAMES[name]
    if scene.drafts:
        yield str(scene.drafter)
        if scene.varying:
            yield NAMES["varying"]
    if scene.shape.windowed:
        yield NAMES["window"]
