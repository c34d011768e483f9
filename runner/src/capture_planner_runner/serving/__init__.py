"""A stream of requests: scheduling, speculation, KV cache, workloads."""
