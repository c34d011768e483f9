"""The graph manager of drafters."""

from dataclasses import dataclass, replace

from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, CUDAGraphMode


@dataclass(frozen=True)
class SpeculatorBatchDescriptor(BatchExecutionDescriptor):
    """With the length of the chain."""

    num_speculative_tokens: int = 0


class SpeculatorCudaGraphManager(CudaGraphManager):
    """Of draft prefills and draft decodes."""

    def specialize_spec_tokens(self, desc, num_speculative_tokens):
        if desc.cg_mode != CUDAGraphMode.FULL or desc in self.graphs:
            return desc
        desc = SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=num_speculative_tokens)
        return desc if desc in self.graphs else replace(desc, cg_mode=CUDAGraphMode.NONE)

    def capture(self, forward_fn, progress_bar_desc="Capturing CUDA graphs", lengths=()):
        if lengths:
            self._capture_descs = {
                mode: [
                    SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=k) for desc in descs for k in lengths
                ]
                for mode, descs in self._capture_descs.items()
            }
        # Candidates stay as they are: only the keys of graphs have a length.
        plain = {mode: [self._plain(desc) for desc in descs] for mode, descs in self._capture_descs.items()}
        super().capture(lambda desc, warmup: lambda mode: None, progress_bar_desc)
        self._capture_descs = plain

    def _plain(self, desc):
        fields = {name: value for name, value in vars(desc).items() if name != "num_speculative_tokens"}
        return BatchExecutionDescriptor(**fields)
