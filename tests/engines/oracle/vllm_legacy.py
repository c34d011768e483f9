"""vLLM's own legacy dispatcher, answering in the form of ``testing.engines.vllm_managers.answers``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engines.generators.vllm_managers import Case, Configuration, Rows, summary
from support.files import module_at

standins = module_at(Path(__file__).with_name("vllm_standins.py"))
FirstAllReduce = standins.FirstAllReduce

CONTEXT = SimpleNamespace()
"""Stands for the engine's forward context, of which there is one."""


class Legacy:
    """One configuration under the legacy dispatcher."""

    def __init__(self, engine: Any, found: Configuration) -> None:
        self.found = found
        self.module = engine.modules["vllm.v1.cudagraph_dispatcher"]
        modes = engine.modules["vllm.config.compilation"].CUDAGraphMode
        self.mode = modes[found.mode.value]
        compilation = SimpleNamespace(
            cudagraph_capture_sizes=list(found.sizes),
            max_cudagraph_capture_size=found.max_size,
            cudagraph_mode=self.mode,
            is_attention_compiled_piecewise=lambda: True,
            compile_sizes=None,
            cudagraph_specialize_lora=found.capture_fewer,
        )
        lora = (
            SimpleNamespace(max_loras=found.max_loras, specialize_active_lora=found.specialize_lora)
            if found.max_loras
            else None
        )
        k = found.num_speculative_tokens
        config = SimpleNamespace(
            compilation_config=compilation,
            num_speculative_tokens=k,
            lora_config=lora,
            scheduler_config=SimpleNamespace(max_num_seqs=found.max_num_seqs),
        )
        if self.mode.decode_mode() == modes.FULL and k > 0:
            round_up = engine.modules["vllm.utils.math_utils"].round_up
            adjust = engine.piece(
                "vllm.config.compilation",
                "adjust_cudagraph_sizes_for_spec_decode",
                "CompilationConfig",
                round_up=round_up,
            )
            adjust(compilation, 1 + k)
        self.target = self.module.CudagraphDispatcher(config)
        self.target.initialize_cudagraph_keys(self.mode, 1 + k)
        self.split: set[int] = set()
        self.is_decode = engine.piece("vllm.v1.worker.gpu_model_runner", "_is_uniform_decode", "GPUModelRunner")
        config.parallel_config = self.parallel = standins.parallel(found.overlap)
        config.observability_config = SimpleNamespace(cudagraph_metrics=False)
        self.config, self.ranks = config, engine.modules["vllm.v1.worker.dp_utils"]
        self.ranks.should_skip_dp_coordination = lambda: False
        scope = {
            "CUDAGraphMode": modes,
            "BatchDescriptor": engine.modules["vllm.forward_context"].BatchDescriptor,
            "coordinate_batch_across_dp": self.ranks.coordinate_batch_across_dp,
        }
        name = "_determine_batch_execution_and_padding"
        self.execution = engine.piece("vllm.v1.worker.gpu_model_runner", name, "GPUModelRunner", **scope)
        self.drafting = engine.piece("vllm.v1.spec_decode.llm_base_proposer", name, "SpecDecodeBaseProposer", **scope)
        self.split = self._split(engine, modes)
        self.drafter = None
        if found.drafter == "chain":
            initialize = engine.piece(
                "vllm.v1.spec_decode.llm_base_proposer",
                "initialize_cudagraph_keys",
                "SpecDecodeBaseProposer",
                CUDAGraphMode=modes,
            )
            # The drafter is asked without adapters, and keeps the adapter cases that it has no use for.
            self.drafter = self.module.CudagraphDispatcher(config)
            proposer = SimpleNamespace(
                speculative_config=SimpleNamespace(enforce_eager=False), cudagraph_dispatcher=self.drafter
            )
            initialize(proposer, self.mode)

    def _split(self, engine: Any, modes: Any) -> set[int]:
        """Let the engine's runner capture, and return the numbers of tokens whose graph is of microbatches."""
        utils = engine.modules["vllm.v1.worker.ubatch_utils"]
        scope = {
            "CUDAGraphMode": modes,
            "check_ubatch_thresholds": utils.check_ubatch_thresholds,
            "is_global_first_rank": lambda: False,
            "torch": SimpleNamespace(accelerator=SimpleNamespace(synchronize=lambda: None)),
        }
        capture = engine.piece("vllm.v1.worker.gpu_model_runner", "_capture_cudagraphs", "GPUModelRunner", **scope)
        split: set[int] = set()

        def note(desc: Any, *, allow_microbatching: bool, **others: Any) -> None:
            split.update([desc.num_tokens] if allow_microbatching else [])

        runner = SimpleNamespace(
            parallel_config=self.parallel,
            vllm_config=self.config,
            _warmup_and_capture=note,
            maybe_remove_all_loras=lambda config: None,
            lora_config=None,
        )
        for mode, descs in self.target.get_capture_descs():
            capture(runner, descs, mode)
        self.modes = modes
        scope = {
            "get_forward_context": lambda: CONTEXT,
            "get_offloader": lambda: SimpleNamespace(sync_prev_onload=lambda: None),
            "CUDAGraphMode": modes,
            "DPMetadata": SimpleNamespace(make=lambda *a: None),
            "torch": SimpleNamespace(
                tensor=lambda *a, **k: None, int32=None, cuda=SimpleNamespace(current_stream=lambda: None)
            ),
        }
        self.wrapper = engine.piece("vllm.v1.worker.gpu_ubatch_wrapper", "__call__", "UBatchWrapper", **scope)
        return split

    def _replayed(self, mode: Any, desc: Any, splits: bool) -> tuple[Any, Any]:
        """Return the mode in which the engine's wrapper of the model really runs the batch."""
        if self.found.overlap is None:
            return mode, desc
        parts, none = self.parallel.num_ubatches, self.modes.NONE
        # Of the parts only their sum counts.
        whole = [SimpleNamespace(num_tokens=desc.num_tokens), *[SimpleNamespace(num_tokens=0)] * (parts - 1)]
        vars(CONTEXT).update(
            batch_descriptor=desc,
            cudagraph_runtime_mode=mode,
            ubatch_slices=whole if splits else None,
            attn_metadata=None,
            slot_mapping=None,
            is_padding=None,
            dp_metadata=CONTEXT,
        )
        graph = SimpleNamespace(cudagraph=SimpleNamespace(replay=lambda: None), outputs=mode)
        wrapper = SimpleNamespace(
            cudagraphs=dict.fromkeys(self.split, graph),
            runnable=lambda **inputs: none if mode.name == "FULL" else mode,
            cudagraph_wrapper=lambda **inputs: mode,
            vllm_config=self.config,
            sm_control=contextlib.nullcontext(),
            _make_ubatch_metadata=lambda **given: None,
            _run_ubatches=lambda metadata, model: none,
        )
        inputs = dict.fromkeys(("input_ids", "positions", "intermediate_tensors", "inputs_embeds"))
        return self.wrapper(wrapper, **inputs), desc

    def _alone(self, rows: Rows, loras: int) -> list[list[Any]]:
        """Return the answers of one rank, or where batches are split of one of two that run the same."""
        if self.found.overlap is None:
            return self._batch(rows, loras)
        return self._step([(rows, loras)] * 2)[0]

    def answers(self, case: Case) -> dict[str, Any]:
        graphs = {"target": summary(self._graphs(self.target))}
        if self.drafter is not None:
            # It is captured as it is asked: without adapters, whatever keys it was given.
            rows = [row for row in self._graphs(self.drafter) if row[5] == 0]
            graphs |= {role: summary(rows) for role in ("draft_prefill", "draft_decode")}
        return {
            "graphs": graphs,
            "batches": [self._alone(rows, loras) for rows, loras in case.batches],
            "steps": [self._step(step) for step in case.steps],
        }

    def _graphs(self, dispatcher: Any) -> list[list[Any]]:
        return [self._graph(mode, desc) for mode, descs in dispatcher.get_capture_descs() for desc in descs]

    def _graph(self, mode: Any, desc: Any) -> list[Any]:
        width = 1 + self.found.num_speculative_tokens if desc.uniform else None
        parts = self.parallel.num_ubatches if desc.num_tokens in self.split and mode.name == "FULL" else 1
        return [mode.name[0], desc.num_tokens, desc.num_reqs, width, None, desc.num_active_loras, None, parts]

    def _batch(self, rows: Rows, loras: int) -> list[list[Any]]:
        tokens = sum(count for count, _ in rows)
        is_decode = self.is_decode(
            max_num_scheduled_tokens=max(count for count, _ in rows),
            uniform_decode_query_len=1 + self.found.num_speculative_tokens,
            num_tokens=tokens,
            num_reqs=len(rows),
        )
        found = [
            self._row(
                *self.target.dispatch(
                    num_tokens=tokens, uniform_decode=is_decode, has_lora=loras > 0, num_active_loras=loras
                )
            )
        ]
        if self.drafter is not None:
            found += [self._row(*self.drafter.dispatch(count)) for count in (tokens, len(rows))]
        return found

    def _row(self, mode: Any, desc: Any) -> list[Any]:
        if not mode:
            return ["N", desc.num_tokens]
        kind, tokens, reqs, width, _, loras, _, _ = self._graph(mode, desc)
        return [kind, tokens, reqs, width, loras]

    def _step(self, step: Sequence[tuple[Rows, int]]) -> list[list[list[Any]]]:
        """Let every rank ask twice in each pass: to be heard, and with what all have said."""
        passes = [self._target_pass] + ([self._draft_pass(0), self._draft_pass(1)] if self.drafter else [])
        self.parallel.data_parallel_size = len(step)
        ranks: list[list[list[Any]]] = [[] for _ in step]
        for asks in passes:
            said: list[torch.Tensor] = []
            total: list[torch.Tensor] = []

            def reduced(tensor: torch.Tensor, group: Any, said: Any = said, total: Any = total) -> None:
                if not total:
                    said.append(tensor.clone())
                    raise FirstAllReduce
                tensor.copy_(total[0])

            self.ranks.dist = SimpleNamespace(all_reduce=reduced)
            self.ranks._get_device_and_group = lambda config: ("cpu", None)
            self.ranks.PIN_MEMORY = False
            for rank, (rows, loras) in enumerate(step):
                self.parallel.data_parallel_rank = rank
                with contextlib.suppress(FirstAllReduce):
                    asks(rank, rows, loras)
            total.append(torch.stack(said).sum(0).to(torch.int32))
            for rank, (rows, loras) in enumerate(step):
                self.parallel.data_parallel_rank = rank
                ranks[rank].append(asks(rank, rows, loras))
        self.parallel.data_parallel_size, self.parallel.data_parallel_rank = 1, 0
        return ranks

    def _target_pass(self, rank: int, rows: Rows, loras: int) -> list[Any]:
        width = 1 + self.found.num_speculative_tokens
        is_idle = not rows
        rows, loras = (((width, False),), 0) if is_idle else (rows, loras)
        runner = SimpleNamespace(
            uniform_decode_query_len=width,
            _is_uniform_decode=self.is_decode,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            cudagraph_dispatcher=self.target,
            vllm_config=self.config,
            parallel_config=self.parallel,
        )
        found = self.execution(
            runner,
            num_tokens=sum(count for count, _ in rows),
            num_reqs=len(rows),
            num_scheduled_tokens_np=None,
            max_num_scheduled_tokens=max(count for count, _ in rows),
            allow_microbatching=True,
            force_uniform_decode=True if is_idle else None,
            force_has_lora=loras > 0,
            force_num_active_loras=loras,
        )
        return self._row(*self._replayed(found[0], found[1], found[2]))

    def _draft_pass(self, position: int) -> Any:
        def asks(rank: int, rows: Rows, loras: int) -> list[Any]:
            width = 1 + self.found.num_speculative_tokens
            tokens = sum(count for count, _ in rows) if position == 0 else len(rows)
            given: list[Any] = []
            drafter: Any = self.drafter

            class Noting:
                def dispatch(self, *args: Any, **options: Any) -> Any:
                    given.append(drafter.dispatch(*args, **options))
                    return given[-1]

            proposer = SimpleNamespace(cudagraph_dispatcher=Noting(), vllm_config=self.config, dp_rank=rank)
            self.drafting(proposer, tokens if rows else width)
            return self._row(*given[-1])

        return asks
