"""The loop of an operator: observe an engine, tune its graphs, launch it under a plan, and compare what it ran."""
