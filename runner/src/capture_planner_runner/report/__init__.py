"""Reports of runs and benches, as sections and charts."""
