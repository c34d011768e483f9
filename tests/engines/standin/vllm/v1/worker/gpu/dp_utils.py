"""Dispatch over data-parallel ranks: the others' columns of the vector are those of ``PEERS``, or as this rank's."""

import torch

from vllm.distributed.parallel_state import get_dp_group
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
    """Return the descriptor, and the summed vector as the state."""
    eager = BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs, num_active_loras=num_active_loras)
    if need_eager:
        return eager, None
    arguments = (num_reqs, num_tokens, uniform_token_count)
    first = cudagraph_manager.dispatch(*arguments, num_active_loras=num_active_loras, max_query_len=max_query_len)
    if dp_size == 1 or dp_sync_state is not None:
        return first, dp_sync_state
    vector = torch.zeros(7, dp_size, dtype=torch.int32)
    own = (num_tokens, first.cg_mode.value, uniform_token_count or 0, max_query_len or -1, 0, num_reqs, 0)
    vector[:, dp_rank] = torch.tensor(own, dtype=torch.int32)
    get_dp_group().cpu_all_reduce_(vector)
    if not int(vector[1].min()):
        return eager, vector
    return cudagraph_manager.dispatch(
        num_reqs,
        int(vector[0].max()),
        uniform_token_count if len(set(vector[2].tolist())) == 1 else None,
        num_active_loras=num_active_loras,
        max_query_len=max_query_len,
    ), vector
