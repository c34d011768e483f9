"""What can be said of a plan without running it: diff, coverage, explanations, lint."""
