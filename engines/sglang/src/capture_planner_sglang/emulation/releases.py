"""The releases of SGLang that are emulated, and those that a table has."""

from __future__ import annotations

from capture_planner.engines.releases import Releases
from capture_planner.planning.sizing.engine_lists import GiB

RELEASES = Releases("SGLang", __package__, "0.5.23")

has, tabled = RELEASES.has, RELEASES.value

# The tiers of handle_gpu_memory_settings (arg_groups/memory_hook.py).
_CLASSES = ((20, "16 GiB"), (35, "24 GiB"), (60, "48 GiB"), (90, "80 GiB"), (160, "141 GiB"))


def memory_class(memory: int) -> str:
    """Return the name that the table gives devices of so many bytes."""
    return next((name for below, name in _CLASSES if memory < below * GiB), "180 GiB")
