"""Commands that execute, measure and test on this machine."""
