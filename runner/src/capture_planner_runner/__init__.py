"""Executes plans of capture-planner with torch: models, graphs, ranks, serving and bench."""
