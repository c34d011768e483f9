"""Tests of the emulated engines."""
