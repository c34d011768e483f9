"""Environment variables of vLLM."""

VLLM_MOE_SKIP_PADDING = True
