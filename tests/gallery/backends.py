"""Mutants that are backends: healthy ones with one thing overridden, each in the module of its class."""

from __future__ import annotations

from gallery import baked, capacity, padding

MUTANTS = padding.MUTANTS + capacity.MUTANTS + baked.MUTANTS
"""Classes D, E and F."""
