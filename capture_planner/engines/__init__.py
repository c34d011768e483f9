"""Engines as they plan and dispatch today: emulated from their own flags, checked, and fed with plans."""
