"""Capture: sessions at start, graphs on first use, and the variants of a plan that follow from them."""
