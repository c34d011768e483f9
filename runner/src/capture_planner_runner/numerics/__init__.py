"""Comparisons of numbers: graphs with eager forwards, and served tokens with the model in a higher precision."""
