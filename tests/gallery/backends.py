"""Mutants that are backends: healthy ones with one thing overridden, each in the module of its class."""

from __future__ import annotations

from gallery import baked, capacity, padding
from gallery.lived import LIVED_MUTANTS
from gallery.scored import SCORED_MUTANTS
from gallery.wide import WIDE_MUTANTS

MUTANTS = padding.MUTANTS + capacity.MUTANTS + baked.MUTANTS + WIDE_MUTANTS + LIVED_MUTANTS + SCORED_MUTANTS
"""Classes D, E and F."""
