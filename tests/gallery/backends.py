"""Mutants that are backends: healthy ones with one thing overridden, each in the module of its class."""

from __future__ import annotations

from gallery import baked, capacity, padding
from gallery.coupled_rows import COUPLED_BACKENDS
from gallery.drafting import DRAFTING_BACKENDS
from gallery.lived import LIVED_MUTANTS
from gallery.pool_backends import POOL_BACKENDS
from gallery.scored import SCORED_MUTANTS
from gallery.wide import WIDE_MUTANTS
from gallery.windows import WINDOW_MUTANTS

_MORE = WIDE_MUTANTS + LIVED_MUTANTS + SCORED_MUTANTS + WINDOW_MUTANTS
_PARTS = POOL_BACKENDS + COUPLED_BACKENDS + DRAFTING_BACKENDS

MUTANTS = padding.MUTANTS + capacity.MUTANTS + baked.MUTANTS + _MORE + _PARTS
"""Classes D, E and F; K, L, M, P and R as far as backends go."""
