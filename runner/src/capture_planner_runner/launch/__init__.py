"""Launch: what a run is asked for, what is refused, and how a plan and a model become a runner and a report."""
