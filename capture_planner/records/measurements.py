"""Measurements: the traffic and the profile that measured sizes are chosen by."""

from __future__ import annotations

import attrs

from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.records.profile import Profile
from capture_planner.records.traffic import Traffic

Graphs = tuple[tuple[Role, Entry], ...]
"""Graphs of a deployment, each with its role."""


@attrs.frozen(kw_only=True)
class Measurements:
    """What planning may know of a load and of a machine."""

    profile: Profile
    traffic: Traffic | None = None
    """Load; None: not known, and the policy default goes by times alone."""
    source: str = ""
    """Where the profile comes from, in words, with how near it is; for decisions."""
    today: Graphs = ()
    """Graphs that there are: measured sizes are theirs where that costs nearly nothing. Empty: round sizes."""
