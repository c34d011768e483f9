"""vLLM's own capture and replay under a plan, on a machine without the engine, with a tiny model.

What runs is the wheel's: ``ModelCudaGraphManager`` with its ``capture`` and its buffers, ``run_fullgraph``, the
wrappers of PIECEWISE graphs (of torch.compile and breakable), dummy batches and input buffers, and for drafters
``TargetDependentARSpeculator``: its ``capture``, ``propose`` and passes. CUDA graphs record operators and run them
again (``cuda_graphs``). The model's numbers are small integers in float64, so that every sum is exact, in any order:
outputs are equal or wrong. They depend on the token, its position, its request and its adapter.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.modes import Role
from capture_planner.records.batch_space import decode_tiers
from capture_planner.records.plan import Plan
from capture_planner_vllm.emulation.export import plan_sizes
from capture_planner_vllm.inside import hooks
from support.files import module_at

HERE = Path(__file__).parent
loading = module_at(HERE / "vllm_loading.py")
graphs = module_at(HERE / "cuda_graphs.py")
tiny = module_at(HERE / "vllm_tiny.py")
drafting = module_at(HERE / "vllm_drafting.py")
GPU, AUTOREGRESSIVE = loading.GPU, loading.AUTOREGRESSIVE
WRAPPERS = (f"{GPU}.input_batch", "vllm.compilation.cuda_graph", "vllm.compilation.breakable_cudagraph")
"""Loaded whole, in addition to what the other oracles load."""
VOCABULARY, WIDTH = tiny.VOCABULARY, tiny.WIDTH
STEPS = 12
"""Batches that are run of each plan."""


@attrs.frozen
class Step:
    """One batch: tokens of each request, and whether it has prompts."""

    lengths: tuple[int, ...]
    has_prompt: bool
    loras: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def uniform(self) -> int | None:
        """The query length of a uniform decode."""
        return self.lengths[0] if not self.has_prompt and len(set(self.lengths)) == 1 else None


class World:
    """One plan in vLLM's own modules, captured."""

    def __init__(self, modules: dict[str, Any], plan: Plan | None, shape: Plan, seed: int) -> None:
        """Capture.

        :param plan: what the plugin applies; None: vLLM's own lists.
        :param shape: the deployment: its limits, mode, drafts and adapters.
        :param seed: of what a plan does not say: the rank of a pipeline, breakable graphs, profiling.
        """
        draw = random.Random(seed)
        self.modules, self.plan, self.shape = modules, plan, shape
        self.modes = modules["vllm.config.compilation"].CUDAGraphMode
        self.is_last, self.aux = draw.random() < 0.8 or shape.speculative is not None, draw.random() < 0.5
        self.is_breakable = draw.random() < 0.5
        self.forward, self.active_loras = tiny.Forward(), 0
        self.order: list[Any] = []
        self.profiles = draw.random() < 0.3
        self.config = self._config()
        self._install()
        limits = shape.limits
        input_batch = modules[f"{GPU}.input_batch"]
        self.buffers = input_batch.InputBuffers(limits.max_num_reqs, limits.max_num_tokens, torch.device("cpu"))
        self.adapters = torch.zeros(limits.max_num_tokens, dtype=torch.float64)
        self.rows = torch.zeros(limits.max_num_tokens, dtype=torch.float64)
        self.draft_rows = torch.full((limits.max_num_tokens,), 3.0, dtype=torch.float64)
        self.target = self.pieces(tiny.Target(self, 1))
        self.eager = tiny.Target(self, 1)
        for _ in range(2 if self.profiles else 1):
            profiling = self.profiles and not self.order
            self.order.clear()
            self.manager = self._manager()
            if profiling:
                self.manager._max_full_descs_to_capture, self.manager._capture_mem_samples = 2, []
            self._capture()
            self.speculator = None if shape.speculative is None else drafting.speculator(self, is_eager=False)
            for wrapped in self._wrappers() if profiling else ():
                wrapped.clear_all_graphs()
            if profiling:
                self.order.append(None)
        self.order = [desc for desc in self.order if desc is not None]
        self.eager_speculator = None if shape.speculative is None else drafting.speculator(self, is_eager=True)

    def _wrappers(self) -> list[Any]:
        found = self.modules
        return [
            found["vllm.compilation.cuda_graph"].CUDAGraphWrapper,
            found["vllm.compilation.breakable_cudagraph"].BreakableCUDAGraphWrapper,
        ]

    def _config(self) -> Any:
        shape, drafts = self.shape, self.shape.speculative
        dynamic = drafts is not None and bool(drafts.ranges)
        sizes = plan_sizes(self.plan, shape.limits.max_num_tokens) if self.plan is not None else _own_sizes(shape)
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_seqs=shape.limits.max_num_reqs, max_num_batched_tokens=shape.limits.max_num_tokens
            ),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes, default=0)
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1, enable_dbo=False),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            model_config=SimpleNamespace(max_model_len=1 << 20),
            speculative_config=drafts
            and SimpleNamespace(
                method=drafts.method.value,
                num_speculative_tokens=drafts.num_tokens,
                num_speculative_tokens_per_batch_size=[list(tier) for tier in decode_tiers(shape)] if dynamic else None,
                uses_dynamic_speculative_decoding=lambda: dynamic,
            ),
            num_speculative_tokens=0 if drafts is None else drafts.num_tokens,
        )

    def _install(self) -> None:
        """Put the stand-ins into the wheel's modules."""
        anything = tiny.Anything()
        drafters = self.modules[f"{AUTOREGRESSIVE}.speculator"]
        table = self.modules[hooks.MANAGERS]
        for name in (hooks.MANAGERS, f"{AUTOREGRESSIVE}.speculator", *WRAPPERS[1:]):
            module = self.modules[name]
            module.torch = graphs.Torch()
            module.set_forward_context = self.forward.entered
            module.get_forward_context = lambda: self.forward.current
            module.is_forward_context_available = lambda: self.forward.current is not None
            module.validate_cudagraph_capturing_enabled = lambda: None
            module.current_platform = anything
            module.compilation_counter = SimpleNamespace(num_cudagraph_captured=0)
            module.capture_pool = lambda pool, config: nullcontext(pool)
            module.get_offloader = lambda: anything
            module.weak_ref_tensors = module.weak_ref_tensor = lambda tensors: tensors
            module.BatchDescriptor = self.modules["vllm.forward_context"].BatchDescriptor
            module.current_stream = lambda: None
        table.logger = SimpleNamespace(debug=lambda *words: self.order.append(words[2]))
        table.graph_capture = lambda device: nullcontext()
        table.is_global_first_rank = lambda: False
        table.get_pp_group = lambda: SimpleNamespace(is_first_rank=True, is_last_rank=self.is_last)
        table.IntermediateTensors = tiny.Tensors
        table.has_compiled_submodule = lambda model: True
        table.is_breakable_cudagraph_enabled = lambda: self.is_breakable
        table.build_slot_mappings_by_layer = drafters.build_slot_mappings_by_layer = lambda *a, **k: {}
        for name, stand_in in (
            ("prepare_prefill_inputs", drafting.prepare_prefill_inputs),
            ("prepare_decode_inputs", drafting.prepare_decode_inputs),
            ("update_draft_inputs", drafting.update_draft_inputs),
        ):
            setattr(drafters, name, stand_in)
        hooks.current_plan = lambda: self.plan

    def pieces(self, model: Any) -> Any:
        return model.breakable() if self.is_breakable else model.compiled()

    def _manager(self) -> Any:
        mode = self.modes[self.shape.role(Role.TARGET).mode.name]
        cases = [0] if self.shape.lora is None else list(self.shape.lora.cases())
        width = 1 + self.config.num_speculative_tokens
        return self.modules[hooks.MANAGERS].ModelCudaGraphManager(self.config, None, mode, width, cases)

    def _capture(self) -> None:
        if not self.manager.needs_capture():
            return
        state = SimpleNamespace(prepare_dummy_inputs=lambda reqs, tokens: {}, prepare_attn=self.prepare_attn)
        self.manager.capture(
            self.target, state, self.buffers, None, self.blocks(), [], None,
            has_lora=self.shape.lora is not None, use_aux_hidden_state_outputs=self.aux, lora_capture_hook=self._loras,
        )  # fmt: skip
        self._loras(0, 0, 0)

    def _loras(self, active: int, num_reqs: int, num_tokens: int) -> None:
        self.active_loras = active
        self.adapters[:num_tokens] = 1.0

    @staticmethod
    def blocks() -> Any:
        return SimpleNamespace(
            cp_size=1,
            get_dummy_block_tables=lambda reqs: (),
            get_dummy_slot_mappings=lambda tokens: (),
            compute_slot_mappings=lambda *words: (),
            input_block_tables=tiny.Anything(),
            gather_block_tables=lambda *a, **k: None,
        )

    def prepare_attn(self, input_batch: Any, *others: Any, **named: Any) -> dict[str, Any]:
        """Write the attention metadata of a batch to its buffer: the request of each token."""
        self.rows.zero_()
        start = 0
        for index, tokens in enumerate(input_batch.num_scheduled_tokens):
            self.rows[start : start + tokens] = index % 13 + 1
            start += tokens
        return {"rows": self.rows}

    def steps(self, draw: random.Random) -> Iterator[Step]:
        """Yield random batches: uniform decodes of every length that is scheduled, and mixed ones."""
        limits, drafts = self.shape.limits, self.shape.speculative
        adapters = 0 if self.shape.lora is None else self.shape.lora.max_active
        for _ in range(STEPS):
            loras = draw.randint(0, adapters)
            reqs = draw.randint(1, limits.max_num_reqs)
            length = 1 + (0 if drafts is None else drafts.draft_tokens(reqs))
            if draw.random() < 0.6 and reqs * length <= limits.max_num_tokens:
                yield Step((length,) * reqs, has_prompt=False, loras=min(loras, reqs))
                continue
            reqs = min(reqs, limits.max_num_tokens)
            lengths = [1] * reqs
            for _ in range(draw.randint(0, limits.max_num_tokens - reqs)):
                lengths[draw.randrange(reqs)] += 1
            yield Step(tuple(lengths), has_prompt=True, loras=min(loras, reqs))

    def differences(self, seed: int) -> Iterator[str]:
        """Run random batches; yield where an output or a draft is not that of eager steps, or a graph is missing."""
        draw = random.Random(seed)
        with torch.inference_mode():
            for step in self.steps(draw):
                ids = torch.tensor([draw.randrange(VOCABULARY) for _ in range(step.tokens)], dtype=torch.int32)
                yield from self._step(step, ids)

    def _step(self, step: Step, ids: torch.Tensor) -> Iterator[str]:
        ranks = self.modules[f"{GPU}.dp_utils"]
        longest = None if step.has_prompt else max(step.lengths)
        desc, _ = ranks.dispatch_cg_and_sync_dp(
            self.manager, len(step.lengths), step.tokens, step.uniform, 1, 0,
            max_query_len=longest, num_active_loras=step.loras,
        )  # fmt: skip
        batch = self._batch(step, ids, desc)
        metadata = self.prepare_attn(batch)
        self.active_loras = step.loras
        self.adapters.zero_()
        self.adapters[: step.tokens] = 1.0 if step.loras else 0.0
        padded = self._run(self.target, self.manager, desc, metadata, step)
        theirs = self._tensors(padded, step.tokens)
        eager = self.modules[hooks.MANAGERS].BatchExecutionDescriptor(self.modes.NONE, step.tokens, len(step.lengths))
        ours = self._tensors(self._run(self.eager, self.manager, eager, metadata, step), step.tokens)
        if any(not torch.equal(one, other) for one, other in zip(theirs, ours, strict=True)):
            yield f"{step} on {desc}: the target's outputs are not those of an eager step"
        self.active_loras = 0
        if self.speculator is not None:
            hidden = ours[0]
            drafts = [
                self._propose(each, batch, step, metadata, hidden, is_eager=is_eager).clone()
                for each, is_eager in ((self.speculator, False), (self.eager_speculator, True))
            ]
            if not torch.equal(*drafts):
                yield f"{step}: drafts are {drafts[0].tolist()}, and eager {drafts[1].tolist()}"

    def _batch(self, step: Step, ids: torch.Tensor, desc: Any) -> Any:
        """Write a batch to the input buffers, padded as its graph is."""
        tokens = max(step.tokens, desc.num_tokens)
        ends = np.cumsum(step.lengths)
        self.buffers.input_ids.zero_()
        self.buffers.positions.zero_()
        self.buffers.input_ids[: step.tokens] = ids
        self.buffers.positions[: step.tokens] = torch.arange(step.tokens) * 3 % 29
        self.buffers.seq_lens.zero_()
        self.buffers.seq_lens[: len(step.lengths)] = torch.tensor(step.lengths, dtype=torch.int32)
        return SimpleNamespace(
            num_reqs=len(step.lengths),
            num_tokens=step.tokens,
            num_tokens_after_padding=tokens,
            num_scheduled_tokens=np.array(step.lengths),
            seq_lens_cpu_upper_bound=torch.tensor(step.lengths),
            seq_lens=self.buffers.seq_lens[: len(step.lengths)],
            idx_mapping=torch.arange(len(step.lengths)),
            decode_graph_eligible=not step.has_prompt,
            last=torch.tensor(ends - 1),
            input_ids=self.buffers.input_ids[:tokens],
            positions=self.buffers.positions[:tokens],
        )

    def _run(self, model: Any, manager: Any, desc: Any, metadata: Any, step: Step) -> Any:
        """Run a batch as the model runner does."""
        if desc.cg_mode is self.modes.FULL:
            return manager.run_fullgraph(desc)
        inputs = {
            "input_ids": self.buffers.input_ids[: desc.num_tokens],
            "positions": self.buffers.positions[: desc.num_tokens],
        }
        descriptor = self.modules["vllm.forward_context"].BatchDescriptor(
            num_tokens=desc.num_tokens, has_lora=self.shape.lora is not None, num_active_loras=desc.num_active_loras
        )
        context = self.forward.entered(
            metadata, self.config, cudagraph_runtime_mode=desc.cg_mode, batch_descriptor=descriptor
        )
        with context:
            if desc.cg_mode is self.modes.PIECEWISE:
                before = self._pieces_captured()
                output = manager.run_pw_graph(model, inputs)
                assert self._pieces_captured() == before, f"{desc} was captured by a step, not at the start"
                return output
            return model(**inputs)

    def _pieces_captured(self) -> int:
        wrapped, broken = (list(each._all_instances) for each in self._wrappers())
        return sum(len(each.concrete_cudagraph_entries) for each in wrapped) + sum(len(each.entries) for each in broken)

    def _tensors(self, output: Any, tokens: int) -> list[torch.Tensor]:
        if isinstance(output, tiny.Tensors):
            return [tensor[:tokens].clone() for tensor in output.tensors.values()]
        hidden, aux = output if isinstance(output, tuple) else (output, [])
        return [tensor[:tokens].clone() for tensor in (hidden, *aux)]

    def _propose(self, found: Any, batch: Any, step: Step, metadata: Any, hidden: Any, *, is_eager: bool) -> Any:
        padded = torch.zeros(batch.num_tokens_after_padding, WIDTH, dtype=torch.float64)
        padded[: step.tokens] = hidden
        found.draft_tokens.zero_()
        drafts = self.shape.speculative
        assert drafts is not None
        nothing = torch.zeros(1)
        before = self._pieces_captured()
        tokens = found.propose(
            batch, metadata, {}, padded, None, nothing, nothing, nothing, nothing, nothing, nothing,
            is_profile=is_eager, num_speculative_tokens=drafts.draft_tokens(len(step.lengths)),
        )  # fmt: skip
        assert self._pieces_captured() == before, f"{step}: a draft prefill was captured by a step"
        return tokens

    def rows_differ(self) -> Iterator[str]:
        """Yield where buffers have no room for a graph, or graphs were captured in another order than they stand."""
        manager = self.manager
        listed = [
            desc for mode in (self.modes.PIECEWISE, self.modes.FULL) for desc in manager._capture_descs.get(mode, ())
        ]
        if self.order[: len(listed)] != listed:
            yield f"captured {self.order[: len(listed)]} for {listed}"
        largest = max((desc.num_tokens for desc in listed), default=0)
        held = manager.hidden_states if self.is_last else manager.intermediate_tensors
        tensors = [] if held is None else self._tensors(held, 1 << 30)
        if listed and (not tensors or min(len(tensor) for tensor in tensors) < largest):
            yield f"buffers of {[tuple(tensor.shape) for tensor in tensors]} for {largest} tokens"


def _own_sizes(shape: Plan) -> list[int]:
    """Return sizes as vLLM's own, up to its default bound."""
    width = 1 + (0 if shape.speculative is None else shape.speculative.num_tokens)
    most = min(shape.limits.max_num_reqs * width * 2, shape.limits.max_num_tokens)
    return sorted({size for size in (1, 2, 4, *range(8, most + 1, 8)) if size <= most})


@contextmanager
def engine(folder: Path | str) -> Iterator[dict[str, Any]]:
    """Load the engine's modules from an unpacked wheel, with the plugin's hooks in them."""
    with loading.loaded(Path(folder)) as modules:
        for name in WRAPPERS:
            spec = importlib.util.spec_from_file_location(name, Path(folder) / (name.replace(".", "/") + ".py"))
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(modules[name])
        table = modules[hooks.MANAGERS]
        batches = modules[f"{GPU}.input_batch"]
        table.InputBatch, table.InputBuffers, table.set_dummy_context = batches.InputBatch, batches.InputBuffers, None
        broken = modules["vllm.compilation.breakable_cudagraph"].BreakableCUDAGraphWrapper
        table.BreakableCUDAGraphWrapper = broken
        batches.random_uuid = lambda: "0"
        hooks.apply_to_managers(table)
        gc.disable()  # as the engine does while it captures; else it collects before each graph
        try:
            yield modules
        finally:
            gc.enable()


def compare(modules: dict[str, Any], plan: Plan, seed: int, *, own: bool) -> Sequence[str]:
    """Return what differs of a plan from eager steps.

    :param own: compare vLLM's own lists for the same deployment with eager steps too, which validates the stand-ins.
    """
    found = []
    for applied in (plan, None) if own else (plan,):
        under = "vLLM's own lists" if applied is None else "the plan"
        try:
            world = World(modules, applied, plan, seed)
            found += [f"under {under}: {text}" for text in (*world.rows_differ(), *world.differences(seed))]
        except Exception as error:
            found.append(f"under {under}: {type(error).__name__}: {error}")
    return found
