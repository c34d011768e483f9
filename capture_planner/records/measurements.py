"""Measurements: the traffic and the profile that measured sizes are chosen by."""

from __future__ import annotations

import attrs

from capture_planner.records.profile import Profile
from capture_planner.records.traffic import Traffic


@attrs.frozen(kw_only=True)
class Measurements:
    """What planning may know of a load and of a machine."""

    profile: Profile
    traffic: Traffic | None = None
    """None: not known; the policy default then goes by times alone."""
    source: str = ""
    """Where the profile comes from, in words, with how near it is; for decisions."""
