"""Graphs and eager forwards side by side."""
