"""Part of what replaces vLLM in tests."""
