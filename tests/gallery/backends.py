"""Mutants that are backends: healthy ones with one thing overridden, each in the module of its class."""

from __future__ import annotations

from gallery import baked, capacity, coupled_rows, padding

MUTANTS = padding.MUTANTS + capacity.MUTANTS + baked.MUTANTS + coupled_rows.COUPLED_BACKENDS
"""Classes D, E, F and L."""
