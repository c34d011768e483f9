"""What vLLM counts of its compiler and its captures."""

from types import SimpleNamespace

compilation_counter = SimpleNamespace(num_cudagraph_captured=0)
