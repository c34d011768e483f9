"""The error for input that vLLM accepts and this emulation does not cover."""

from __future__ import annotations

from capture_planner.engines.parsing import unfollowed
from capture_planner.errors import NotEmulated

REASON = "vLLM accepts it, but its graphs are not emulated"
OBSERVE = "start vLLM with CAPTURE_PLANNER_OBSERVE=FOLDER, which writes what it captures"


def not_emulated(
    flag: str, subject: str, remedy: str, *inside: str | int, reason: str = REASON, place: str = ""
) -> NotEmulated:
    """Return the error for ``subject`` of a flag.

    :param inside: the place in its JSON value, if any.
    :param place: where vLLM decides it: a file of the release.
    """
    says = f"{reason}: {subject}" if subject else reason
    return unfollowed(flag, f"{says}; {place} decides" if place else says, f"{remedy}, or {OBSERVE}", *inside)
