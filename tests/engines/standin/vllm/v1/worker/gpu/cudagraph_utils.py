"""Graph managers: they capture what ``capture_sizes`` of the configuration says."""

import enum
from dataclasses import dataclass

from vllm.compilation.cuda_graph import CUDAGraphWrapper, Graph
from vllm.v1.worker import workspace


class Platform:
    """Has one pool for all graphs."""

    _global_graph_pool = (0, 0)
    _handles = 0

    def graph_pool_handle(self):
        Platform._handles += 1
        return (0, Platform._handles)

    def get_global_graph_pool(self):
        return Platform._global_graph_pool


current_platform = Platform()


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
        self.pool = current_platform.get_global_graph_pool()
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
                assert desc not in self.graphs
                create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
                create_forward_fn(desc, warmup=False)(mode)
                self.graphs[desc] = Graph(desc.num_tokens, self.pool)
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


def make_dummy(buffers):
    """Write dummy inputs: all rows are padding."""
    buffers.input_ids.zero_()
    buffers.is_padding.fill_(True)


def rows_of(buffers, num_tokens):
    """Return how many of so many rows count as tokens, and how many ids they have."""
    real = ~buffers.is_padding[:num_tokens]
    return num_tokens, int(real.sum()), len(set(buffers.input_ids[:num_tokens].tolist()))


class ModelCudaGraphManager(CudaGraphManager):
    """The target's: its pieces are captured by wrappers, and its outputs go to a buffer of the first forward's size."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden_states, self.aux_hidden_states = None, []
        self.pieces = [CUDAGraphWrapper(self.pool) for _ in range(2)]
        self.seen = []
        """The rows of each run that captures nothing."""

    def capture(self, model, input_buffers, progress_bar_desc="Capturing CUDA graphs"):
        self.buffers = input_buffers

        def create_forward(desc, warmup):
            make_dummy(input_buffers)

            def forward(mode):
                if desc.num_tokens in self.vllm_config.broken:
                    raise RuntimeError("CUDA out of memory")
                workspace.require(min(desc.num_tokens, self.vllm_config.workspace))
                if mode is CUDAGraphMode.PIECEWISE:
                    if desc.num_tokens in self.pieces[0].concrete_cudagraph_entries:
                        self.seen.append(rows_of(input_buffers, desc.num_tokens))
                    for piece in self.pieces:
                        piece(desc.num_tokens)
                elif self.hidden_states is None:
                    self.hidden_states = bytearray(desc.num_tokens)
                else:
                    assert len(self.hidden_states) >= desc.num_tokens

            return forward

        super().capture(create_forward, progress_bar_desc)

    def run_fullgraph(self, desc):
        super().run_fullgraph(desc)
        self.seen.append(rows_of(self.buffers, desc.num_tokens))
