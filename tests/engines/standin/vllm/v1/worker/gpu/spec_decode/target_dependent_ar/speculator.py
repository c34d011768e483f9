"""A drafter that depends on the target: a draft prefill, then draft decodes."""

import numpy as np

from vllm.v1.worker.gpu.cudagraph_utils import CUDAGraphMode
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager


class TargetDependentARSpeculator:
    """Makes its managers and captures them, and dispatches a draft prefill and, at K > 1, a draft decode."""

    def __init__(self, vllm_config, fused):
        self.vllm_config, self.supports_decode_metadata_update = vllm_config, fused
        self.num_speculative_steps = vllm_config.num_speculative_tokens
        self.attn_groups = []
        self.prefill_cudagraph_manager = self.decode_cudagraph_manager = None

    def init_cudagraph_manager(self, cudagraph_mode):
        width = self.num_speculative_steps + 1
        self.prefill_cudagraph_manager = SpeculatorCudaGraphManager(self.vllm_config, None, cudagraph_mode, width)
        decodes = CUDAGraphMode.FULL_DECODE_ONLY if cudagraph_mode else CUDAGraphMode.NONE
        self.decode_cudagraph_manager = SpeculatorCudaGraphManager(self.vllm_config, None, decodes, 1)

    def capture(self):
        self.prefill_cudagraph_manager.capture(None)
        if self.num_speculative_steps > 1:
            lengths = self.vllm_config.chain_lengths if self.supports_decode_metadata_update else ()
            self.decode_cudagraph_manager.capture(None, lengths=lengths)

    def propose(self, num_reqs, num_tokens_padded, uniform, num_speculative_tokens, ranks=None):
        dp_size = self.vllm_config.parallel_config.data_parallel_size
        across = {"dp_size": dp_size, "dp_rank": 0, "dp_sync_state": ranks}
        uniform = None if uniform is None else np.int64(uniform)  # vLLM's drafters take a maximum by numpy
        answers = {}
        desc, _ = dispatch_cg_and_sync_dp(
            self.prefill_cudagraph_manager, num_reqs, num_tokens_padded, uniform, **across
        )
        answers["draft_prefill"] = desc
        if num_speculative_tokens > 1:
            desc, _ = dispatch_cg_and_sync_dp(
                self.decode_cudagraph_manager, num_reqs, num_reqs, uniform_token_count=1, **across
            )
            answers["draft_decode"] = self.decode_cudagraph_manager.specialize_spec_tokens(desc, num_speculative_tokens)
        return answers
