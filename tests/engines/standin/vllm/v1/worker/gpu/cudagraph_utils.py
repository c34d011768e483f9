"""Graph managers: they capture what ``capture_sizes`` of the configuration says."""

import enum
from dataclasses import dataclass


class CUDAGraphMode(enum.Enum):
    """vLLM's modes."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def __bool__(self):
        return self is not CUDAGraphMode.NONE


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    """What a graph or an eager step runs."""

    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1


class CudaGraphManager:
    """Captures decodes FULL and mixed batches PIECEWISE, as its mode says; dispatches to the next size."""

    def __init__(
        self,
        vllm_config,
        device,
        cudagraph_mode,
        decode_query_len,
        lora_capture_cases=None,
        varlen_decode=False,
        ubatch_runner=None,
    ):
        self.vllm_config, self.cudagraph_mode, self.decode_query_len = vllm_config, cudagraph_mode, decode_query_len
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.graphs = {}
        self._graphs_captured = False
        self._init_candidates()

    def _init_candidates(self):
        full, piecewise = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
        descs = {full: [], piecewise: []}
        width = self.decode_query_len
        for size in sorted(self.vllm_config.compilation_config.cudagraph_capture_sizes, reverse=True):
            if self.cudagraph_mode in (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE):
                reqs = size // width
                if 0 < reqs <= self.max_num_reqs and size % width == 0:
                    descs[full].append(BatchExecutionDescriptor(full, size, reqs, width))
            if self.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE:
                descs[piecewise].append(BatchExecutionDescriptor(piecewise, size, None))
        self._capture_descs = {mode: found for mode, found in descs.items() if found}

    def needs_capture(self):
        return len(self._capture_descs) > 0

    def capture(self, create_forward_fn, progress_bar_desc="Capturing CUDA graphs"):
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            for desc in self._capture_descs.get(mode, ()):
                create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
                create_forward_fn(desc, warmup=False)(mode)
                self.graphs[desc] = object()
        self._graphs_captured = True

    def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len=None, num_ubatches=1):
        if self._graphs_captured:
            for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
                for desc in reversed(self._capture_descs.get(mode, ())):
                    uniform = desc.uniform_token_count in (None, uniform_token_count)
                    if desc.num_tokens >= num_tokens and uniform and (desc.num_reqs or num_reqs) >= num_reqs:
                        return desc
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs, num_active_loras=num_active_loras)

    def run_fullgraph(self, desc):
        assert desc in self.graphs
        self.vllm_config.log.append(("replay", desc))


class ModelCudaGraphManager(CudaGraphManager):
    """The target's."""

    def capture(self, model, progress_bar_desc="Capturing CUDA graphs"):
        super().capture(lambda desc, warmup: lambda mode: None, progress_bar_desc)
