"""Dispatch over data-parallel ranks: here one rank, which dispatches twice, as vLLM does with several."""

from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CUDAGraphMode


def dispatch_cg_and_sync_dp(
    cudagraph_manager,
    num_reqs,
    num_tokens,
    uniform_token_count,
    dp_size,
    dp_rank,
    max_query_len=None,
    need_eager=False,
    num_active_loras=0,
    parallel_config=None,
    allow_ubatching=False,
    uniform_decode=False,
    allow_skip_drafts=False,
    dp_sync_state=None,
):
    """Return the descriptor, and no state."""
    eager = BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs, num_active_loras=num_active_loras)
    if need_eager:
        return eager, None
    arguments = (num_reqs, num_tokens, uniform_token_count)
    first = cudagraph_manager.dispatch(*arguments, num_active_loras=num_active_loras, max_query_len=max_query_len)
    if dp_size == 1:
        return first, None
    second = cudagraph_manager.dispatch(*arguments, num_active_loras=num_active_loras, max_query_len=max_query_len)
    return (second if first.cg_mode else eager), None
