"""The error for input that vLLM accepts and this emulation does not cover."""

from __future__ import annotations

from capture_planner.engines.parsing import unfollowed
from capture_planner.errors import NotEmulated

REASON = "vLLM accepts it, but its graphs are not emulated"


def not_emulated(flag: str, subject: str, remedy: str, *inside: str | int, reason: str = REASON) -> NotEmulated:
    """Return the error for ``subject`` of a flag; ``inside`` is the place in its JSON value, if any."""
    return unfollowed(flag, f"{reason}: {subject}" if subject else reason, remedy, *inside)
