"""Commands that execute and measure on this machine."""
