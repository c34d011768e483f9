"""The command that tests a backend."""
