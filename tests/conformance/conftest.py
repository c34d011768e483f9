"""Makes the backends of these tests importable."""
