"""VllmSettings: the inputs of vLLM's graph managers, after flags, defaults and rewrites."""

from __future__ import annotations

import enum

import attrs

from capture_planner.engines.emulation import EncoderGraphs
from capture_planner.modes import GraphMode
from capture_planner.records.spec import Lora
from capture_planner_vllm.emulation.overlap import Overlap
from capture_planner_vllm.emulation.schedule import query_lens


class RunnerVersion(enum.StrEnum):
    """Which model runner drives the graphs."""

    V1 = "v1"
    V2 = "v2"


class DrafterKind(enum.StrEnum):
    """The kind of drafter, by its graphs under model runner V2."""

    NONE = "none"
    """No drafter, or one without graphs: n-gram, suffix, an independent draft model."""
    CHAIN = "chain"
    """EAGLE, and MTP of one module: a prefill of the target's mode, and decodes of one token."""
    MODULES = "modules"
    """MTP of several modules: one manager for all positions, of the target's mode without PIECEWISE."""
    PARALLEL = "parallel"
    """DFlash and DSpark: all positions in one pass, of FULL_DECODE_ONLY or NONE."""


@attrs.frozen(kw_only=True)
class VllmSettings:
    """Everything that decides which graphs vLLM captures and how it dispatches; sizes are in tokens."""

    runner: RunnerVersion
    sizes: tuple[int, ...]
    """``cudagraph_capture_sizes``, ascending; empty where nothing is captured."""
    max_size: int
    """``max_cudagraph_capture_size``: the last of the sizes, or 0."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    requested_mode: GraphMode
    """``cudagraph_mode`` of the flags or the optimization level."""
    configured_mode: GraphMode
    """``cudagraph_mode`` after all rewrites of the configuration, before backends are known."""
    mode: GraphMode
    """The target's mode once the attention backends are known."""
    drafted: tuple[int, ...] = attrs.field(repr=False)
    """Draft tokens of each batch size, as ``schedule.draft_tokens`` returns them; index 0 is unused."""
    draft_prefill_mode: GraphMode | None = None
    """The mode of the drafter's first position; None where no such manager exists."""
    draft_decode_mode: GraphMode | None = None
    """The mode of the drafter's later positions; None where no such manager exists."""
    drafter: DrafterKind = DrafterKind.NONE
    method: str | None = None
    """The speculative method as vLLM resolves its name; None without speculation."""
    num_speculative_tokens: int = 0
    schedule: tuple[tuple[int, int, int], ...] | None = None
    """``num_speculative_tokens_per_batch_size``: (first batch size, last batch size, K), as given."""
    draft_query_len: int = 0
    """Tokens of each request in a PARALLEL drafter's pass; 0 for the others."""
    draft_fused: bool = False
    """Whether a CHAIN drafter's decodes are one graph, as its backend refreshes metadata on the device."""
    lora_cases: tuple[int, ...] = (0,)
    """Adapter counts captured for, ascending; (0,) without adapters."""
    varlen: bool = False
    """Adaptive verification: decode graphs take any mix of query lengths up to 1 + K."""
    max_loras: int = 0
    """``--max-loras`` with ``--enable-lora``, else 0."""
    specialize_lora: bool = False
    """``--specialize-active-lora``: batches with fewer adapters look for graphs of their own."""
    compilation: str = "VLLM_COMPILE"
    """How the model is compiled: NONE, STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE or VLLM_COMPILE."""
    encoders: tuple[EncoderGraphs, ...] = ()
    """The graphs of a multimodal model's encoder; empty where it runs eager."""
    overlap: Overlap | None = None
    """Dual batch overlap of several data-parallel ranks; None: no batch is split."""
    async_scheduling: bool = True
    backend: str = ""
    """The target's attention backend, as vLLM names it."""

    @property
    def decode_query_lens(self) -> tuple[int, ...]:
        """All query lengths that decodes of the target can have, ascending."""
        return query_lens(self.drafted)

    @property
    def query_len(self) -> int:
        """The query length of a uniform decode batch: 1 + K."""
        return 1 + self.num_speculative_tokens


def lora_cases(max_loras: int, runner: RunnerVersion, *, separate: bool, specialize: bool) -> tuple[int, ...]:
    """Return the adapter counts captured for, ascending; (0,) without adapters.

    ``separate`` is ``cudagraph_specialize_lora``: without it, model runner V1 has no graphs for batches
    without adapters. ``specialize`` is ``--specialize-active-lora``, which captures powers of two
    only together with it.
    """
    if not max_loras:
        return (0,)
    cases = Lora(max_active=max_loras, specialize=separate and specialize).cases()
    return cases[-1:] if runner is RunnerVersion.V1 and not separate else cases
