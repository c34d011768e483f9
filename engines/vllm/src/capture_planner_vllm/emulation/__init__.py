"""What one release of vLLM captures and dispatches, from its command line; needs no vLLM."""
