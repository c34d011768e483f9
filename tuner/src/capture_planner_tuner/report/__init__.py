"""Reports of tuning, comparisons and starts, as sections."""
