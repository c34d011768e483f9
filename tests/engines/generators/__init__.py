"""Seeded generators of engines' command lines and batches, for tests, recorders and oracles."""
