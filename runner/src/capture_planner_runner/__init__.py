"""Executes plans of capture-planner with torch: models, graphs, ranks, serving, bench and the conformance suite."""
