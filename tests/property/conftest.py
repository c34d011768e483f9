"""Makes ``reference`` importable under importlib import mode."""
