"""Measured sizes and draft lengths: by a traffic and a profile, the table of graphs that costs least.

``choose`` gives the ladders of all roles their sizes, ``choose_schedule`` chooses draft lengths by batch size, and
``leave_to_first_use`` says which graphs are worth a capture at start. ``steps`` says what steps take under any table,
however it was chosen.
"""

from typing import TYPE_CHECKING

from capture_planner.lazy import lazy_names

if TYPE_CHECKING:
    from capture_planner.planning.measured.choice import choose
    from capture_planner.planning.measured.first_use import leave_to_first_use
    from capture_planner.planning.measured.schedule import choose_schedule

__all__ = ["choose", "choose_schedule", "leave_to_first_use"]

__getattr__, __dir__ = lazy_names(
    __name__, {"choice": ("choose",), "first_use": ("leave_to_first_use",), "schedule": ("choose_schedule",)}
)
