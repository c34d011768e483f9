"""Models that a plan is executed on: Hugging Face causal language models, and drafters for them."""
