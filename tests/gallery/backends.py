"""Mutants that are backends: healthy ones with one thing overridden, each in the module of its class."""

from __future__ import annotations

from gallery import baked, capacity, padding
from gallery.coupled_rows import COUPLED_BACKENDS
from gallery.drafting import DRAFTING_BACKENDS
from gallery.lived import LIVED_MUTANTS
from gallery.pool_backends import POOL_BACKENDS
from gallery.scored import SCORED_MUTANTS
from gallery.wide import WIDE_MUTANTS

_MORE = WIDE_MUTANTS + LIVED_MUTANTS + SCORED_MUTANTS + POOL_BACKENDS + COUPLED_BACKENDS + DRAFTING_BACKENDS

MUTANTS = padding.MUTANTS + capacity.MUTANTS + baked.MUTANTS + _MORE
"""Classes D, E and F; K, L, M and P as far as backends go."""
