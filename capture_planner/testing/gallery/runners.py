"""Mutants of the runner and of dispatch: each has one public bug, under a backend that is healthy."""

from __future__ import annotations

from capture_planner.testing.gallery.core import Mutant
from capture_planner.testing.gallery.runner_dispatch import DISPATCH_MUTANTS
from capture_planner.testing.gallery.runner_padding import PADDING_MUTANTS
from capture_planner.testing.gallery.runner_state import STATE_MUTANTS

MUTANTS: tuple[Mutant, ...] = DISPATCH_MUTANTS + PADDING_MUTANTS + STATE_MUTANTS
