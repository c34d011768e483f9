"""Measured sizes and draft lengths: by a traffic and a profile, the table of graphs that costs least.

``choose`` gives the ladders of all roles their sizes, ``choose_schedule`` chooses draft lengths by batch size, and
``leave_to_first_use`` says which graphs are worth a capture at start. ``Prices`` and ``judge`` say what steps take
under any table, however it was chosen.
"""

from capture_planner.planning.measured.choice import MeasuredSizes, choose
from capture_planner.planning.measured.first_use import leave_to_first_use
from capture_planner.planning.measured.schedule import choose_schedule
from capture_planner.planning.measured.steps import (
    Answer,
    Judgement,
    PassCost,
    Prices,
    StepCost,
    Steps,
    every_size,
    judge,
    passes_of,
    percentile,
    steps_of,
)

__all__ = [
    "Answer",
    "Judgement",
    "MeasuredSizes",
    "PassCost",
    "Prices",
    "StepCost",
    "Steps",
    "choose",
    "choose_schedule",
    "every_size",
    "judge",
    "leave_to_first_use",
    "passes_of",
    "percentile",
    "steps_of",
]
