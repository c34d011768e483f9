"""Tuning: an engine as it is, next to the plan that measurements choose."""
