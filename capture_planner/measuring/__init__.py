"""What engines really run: recorded while they serve."""
