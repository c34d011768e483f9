"""Reports of runs, benches and the conformance suite, as sections and charts."""
