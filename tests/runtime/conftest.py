"""Makes ``worlds`` and ``probe`` of the property tests importable under importlib import mode."""
