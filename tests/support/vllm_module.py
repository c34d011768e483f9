"""The parts of vLLM 0.33 that the plugin touches, small enough to read: same names, parameters and rules.

``run_vllm_apply.py`` compares names, parameters and fields with the wheel's. Every call of ``vllm_modules`` makes new
classes, because the plugin wraps their methods.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch_space import decode_tiers
from capture_planner.records.plan import Plan

CONFIG = "vllm.config.vllm"
MANAGERS = "vllm.v1.worker.gpu.cudagraph_utils"
DRAFTERS = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils"


class CUDAGraphMode(enum.Enum):
    """vLLM's modes; those of two values have decodes and mixed batches apart."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE


def _managers() -> ModuleType:
    @dataclass(frozen=True)
    class BatchExecutionDescriptor:
        cg_mode: Any
        num_tokens: int
        num_reqs: int | None
        uniform_token_count: int | None = None
        max_query_len: int | None = None
        num_active_loras: int = 0
        num_ubatches: int = 1

    class CudaGraphManager:
        def __init__(
            self,
            vllm_config: Any,
            device: Any,
            cudagraph_mode: CUDAGraphMode,
            decode_query_len: int,
            lora_capture_cases: list[int] | None = None,
            varlen_decode: bool = False,
            ubatch_runner: Any = None,
        ) -> None:
            self.vllm_config, self.cudagraph_mode = vllm_config, cudagraph_mode
            self.compilation_config = vllm_config.compilation_config
            self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
            self.decode_query_len, self.varlen_decode = decode_query_len, varlen_decode
            self.ubatch_runner = ubatch_runner
            self.lora_capture_cases = lora_capture_cases or [0]
            cases = sorted(case for case in self.lora_capture_cases if case > 0)
            self._max_lora_case = cases[-1] if cases else 0
            self._lora_dispatch_map = {
                n: next(case for case in cases if case >= n) for n in range(1, self._max_lora_case + 1)
            }
            self.graphs: dict[Any, Callable[[], None]] = {}
            self._graphs_captured = False
            self._candidates: dict[tuple[int, int], list[Any]] = {}
            self._capture_descs: dict[CUDAGraphMode, list[Any]] = {}
            self._init_candidates()

        def _init_candidates(self) -> None:
            """Fill the tables by vLLM's own list: here, one PIECEWISE graph per size."""
            sizes = self.compilation_config.cudagraph_capture_sizes if self.cudagraph_mode else []
            for size in sorted(sizes, reverse=True):
                desc = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, size, None)
                self._capture_descs.setdefault(desc.cg_mode, []).append(desc)
                self._candidates |= {(tokens, 0): [desc] for tokens in range(1, size + 1)}

        def capture(self, create_forward_fn: Any, progress_bar_desc: str = "Capturing CUDA graphs") -> None:
            """Run each forward, as a warm-up and for the graph, in vLLM's order: PIECEWISE before FULL."""
            for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
                for desc in self._capture_descs.get(mode, ()):
                    assert desc not in self.graphs
                    create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
                    forward = create_forward_fn(desc, warmup=False)
                    given = CUDAGraphMode.PIECEWISE if mode is CUDAGraphMode.PIECEWISE else CUDAGraphMode.NONE
                    forward(given)
                    self.graphs[desc] = partial(forward, given)
            self._graphs_captured = True

        def run_fullgraph(self, desc: Any) -> Any:
            """Run a captured forward again, on the same storage."""
            assert desc.cg_mode is CUDAGraphMode.FULL
            self.graphs[desc]()

        def dispatch(
            self,
            num_reqs: int,
            num_tokens: int,
            uniform_token_count: int | None,
            num_active_loras: int,
            max_query_len: int | None = None,
            num_ubatches: int = 1,
        ) -> Any:
            """Return the first compatible candidate, as vLLM does."""
            case = num_active_loras
            if case > 0 and self._lora_dispatch_map:
                case = self._lora_dispatch_map.get(case, self._max_lora_case)
            for desc in self._candidates.get((num_tokens, case), ()) if self._graphs_captured else ():
                if (
                    desc.uniform_token_count in (None, uniform_token_count)
                    and (desc.max_query_len is None or desc.max_query_len >= (max_query_len or 1 << 30))
                    and (desc.num_reqs is None or desc.num_reqs >= num_reqs)
                    and desc.num_tokens >= num_tokens
                    and desc.num_active_loras == case
                    and desc.num_ubatches == num_ubatches
                ):
                    return desc
            return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs, num_active_loras=case)

    class ModelCudaGraphManager(CudaGraphManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.hidden_states: torch.Tensor | None = None

        def capture(  # type: ignore[override]
            self,
            model: Any,
            model_state: Any,
            input_buffers: Any,
            intermediate_tensors: Any,
            block_tables: Any,
            attn_groups: Any,
            kv_cache_config: Any,
            pcp_manager: Any = None,
            has_lora: bool = False,
            use_aux_hidden_state_outputs: bool = False,
            lora_capture_hook: Any = None,
            progress_bar_desc: str = "Capturing CUDA graphs",
        ) -> None:
            """Capture a model, whose output goes to a buffer of the size that the first forward had."""

            def create_forward_fn(desc: Any, warmup: bool) -> Callable[[CUDAGraphMode], None]:
                tokens = desc.num_tokens

                def forward(mode: CUDAGraphMode) -> None:
                    output = model(input_ids=input_buffers.input_ids[:tokens])
                    if mode is CUDAGraphMode.PIECEWISE:
                        return
                    if self.hidden_states is None:
                        self.hidden_states = torch.empty_like(output)
                    self.hidden_states[:tokens] = output

                return forward

            super().capture(create_forward_fn, progress_bar_desc)

        def run_fullgraph(self, desc: Any) -> Any:
            """Replay, and return the rows of the graph."""
            super().run_fullgraph(desc)
            assert self.hidden_states is not None
            return self.hidden_states[: desc.num_tokens]

    return _module(MANAGERS, BatchExecutionDescriptor, CudaGraphManager, ModelCudaGraphManager)


def _drafters(managers: ModuleType) -> ModuleType:
    descriptor: Any = managers.BatchExecutionDescriptor

    @dataclass(frozen=True)
    class SpeculatorBatchDescriptor(descriptor):  # type: ignore[misc]
        num_speculative_tokens: int = 0

    class SpeculatorCudaGraphManager(managers.CudaGraphManager):  # type: ignore[misc,name-defined]
        def specialize_spec_tokens(self, desc: Any, num_speculative_tokens: int) -> Any:
            """Return the graph of the chain that is drafted, or an eager answer."""
            if desc.cg_mode is not CUDAGraphMode.FULL or desc in self.graphs:
                return desc
            desc = SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=num_speculative_tokens)
            return desc if desc in self.graphs else replace(desc, cg_mode=CUDAGraphMode.NONE)

        def capture(
            self,
            forward_fn: Any,
            model_state: Any,
            input_buffers: Any,
            block_tables: Any,
            attn_groups: Any,
            kv_cache_config: Any,
            progress_bar_desc: str = "Capturing CUDA graphs",
            specialize_spec_tokens: bool = False,
        ) -> None:
            """Capture; each graph for every draft length where the backend runs chains."""
            if specialize_spec_tokens:
                lengths = sorted({k for *_, k in self.vllm_config.tiers} - {0, 1}, reverse=True)
                self._capture_descs: dict[CUDAGraphMode, list[Any]] = {
                    mode: [
                        SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=k)
                        for desc in descs
                        for k in lengths
                    ]
                    for mode, descs in self._capture_descs.items()
                }
            super().capture(
                lambda desc, warmup: lambda mode: forward_fn(desc.num_reqs, desc.num_tokens, None, None, None, mode),
                progress_bar_desc,
            )

    return _module(DRAFTERS, SpeculatorBatchDescriptor, SpeculatorCudaGraphManager)


def _config() -> ModuleType:
    @dataclass
    class VllmConfig:
        compilation_config: Any
        scheduler_config: Any
        speculative_config: Any = None
        num_speculative_tokens: int = 0
        tiers: Any = ()
        use_v2_model_runner: bool = True
        model_config: Any = field(default_factory=lambda: SimpleNamespace(enforce_eager=False))
        parallel_config: Any = field(default_factory=lambda: SimpleNamespace(enable_dbo=False))
        cache_config: Any = field(default_factory=lambda: SimpleNamespace(use_kda_recoverssm=False))

        def _set_cudagraph_sizes(self) -> None:
            """Fill in the sizes that the command did not give: here, 1 and 512."""
            compilation = self.compilation_config
            if compilation.cudagraph_capture_sizes is None:
                compilation.cudagraph_capture_sizes = [1, 512]
            compilation.max_cudagraph_capture_size = max(compilation.cudagraph_capture_sizes, default=0)

        def _get_v2_model_runner_unsupported_features(self) -> list[str]:
            return ["a feature"]

    return _module(CONFIG, VllmConfig)


def _module(name: str, *classes: type) -> ModuleType:
    module = ModuleType(name)
    for each in classes:
        each.__module__, each.__qualname__ = name, each.__name__
        setattr(module, each.__name__, each)
    return module


@contextmanager
def vllm_modules() -> Iterator[dict[str, Any]]:
    """Put new modules into ``sys.modules`` while the context lasts, and give them by name."""
    managers = _managers()
    modules = {MANAGERS: managers, DRAFTERS: _drafters(managers), CONFIG: _config()}
    with mock.patch.dict("sys.modules", modules):
        yield modules


def config_for(modules: dict[str, Any], plan: Plan) -> Any:
    """Return the configuration of a vLLM that was started for a plan, before its sizes are set."""
    speculative, dynamic = plan.speculative, plan.speculative is not None and bool(plan.speculative.schedule)
    tiers = [list(tier) for tier in decode_tiers(plan)] if dynamic else None
    return modules[CONFIG].VllmConfig(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=None,
            max_cudagraph_capture_size=None,
            cudagraph_mode=CUDAGraphMode[plan.role(Role.TARGET).mode.name],
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=plan.limits.max_num_reqs, max_num_batched_tokens=plan.limits.max_num_tokens
        ),
        speculative_config=speculative
        and SimpleNamespace(
            method=speculative.method.value,
            num_speculative_tokens=speculative.num_tokens,
            num_speculative_tokens_per_batch_size=tiers,
            uses_dynamic_speculative_decoding=lambda: dynamic,
        ),
        num_speculative_tokens=0 if speculative is None else speculative.num_tokens,
        tiers=tiers or (),
    )


def manager_for(modules: dict[str, Any], config: Any, plan: Plan, role: Role, mode: GraphMode | None = None) -> Any:
    """Make a role's manager as vLLM's runner and drafter do, in the role's own mode or another."""
    theirs = CUDAGraphMode[(mode or plan.role(role).mode).name]
    if role is Role.TARGET:
        cases = [0] if plan.lora is None else list(plan.lora.cases())
        return modules[MANAGERS].ModelCudaGraphManager(config, None, theirs, 1 + config.num_speculative_tokens, cases)
    width = 1 + config.num_speculative_tokens if role is Role.DRAFT_PREFILL else 1
    return modules[DRAFTERS].SpeculatorCudaGraphManager(config, None, theirs, width)


def capture(manager: Any, *, chains: bool = False) -> list[Any]:
    """Capture as the runner or the drafter does; return the descriptors in order."""
    if hasattr(manager, "specialize_spec_tokens"):
        manager.capture(lambda *words: None, *[None] * 5, specialize_spec_tokens=chains)
    else:
        tokens = manager.vllm_config.scheduler_config.max_num_batched_tokens
        buffers = SimpleNamespace(input_ids=torch.arange(tokens))
        manager.capture(model, None, buffers, *[None] * 4)
        manager.input_buffers = buffers
    return list(manager.graphs)


def model(input_ids: torch.Tensor) -> torch.Tensor:
    """Return hidden states in which each token can be told from the others."""
    return torch.stack([input_ids, input_ids * input_ids + 1], dim=1)
