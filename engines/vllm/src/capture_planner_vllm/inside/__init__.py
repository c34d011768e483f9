"""What runs inside vLLM: a plan is applied, and what ran is observed."""
