"""Executing a plan: the only part of the core that uses torch."""
