"""vLLM's own attention backends as backends of capture-planner."""
