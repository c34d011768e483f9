"""Strategies: specs, machines, backends, plans and batches, small but with their extremes.

What a strategy gives is always valid, unless its name says otherwise. Most fields are drawn by their types
(``values.by_type``); one whose values depend on others is given where its record is drawn.
"""
