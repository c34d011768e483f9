"""Strategies: specs, machines, backends, plans, batches and files, small but with their extremes.

What a strategy gives is always valid, unless its name says otherwise. A field that joins a record
joins its strategy here; ``tests/test_strategies.py`` fails until it does.
"""
