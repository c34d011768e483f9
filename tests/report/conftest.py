"""Makes ``ledgers`` importable under importlib import mode."""
