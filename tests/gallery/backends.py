"""Mutants that are backends: healthy ones with one thing overridden, each in the module of its class."""

from __future__ import annotations

from gallery import baked, capacity, padding, pool_backends

MUTANTS = padding.MUTANTS + capacity.MUTANTS + baked.MUTANTS + pool_backends.POOL_BACKENDS
"""Classes D, E and F; K, M and P as far as backends go."""
