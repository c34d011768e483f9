"""One launch of SGLang for the oracle: its runners, made without a GPU, and what they answer."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from support.files import module_at

_HERE = Path(__file__).parent
drafts, scheduling = module_at(_HERE / "sglang_drafts.py"), module_at(_HERE / "sglang_scheduling.py")


class Launch:
    """One launch: SGLang's runners over a resolved record."""

    def __init__(self, m: Any, record: Any, models: Any) -> None:
        self.m, self.models = m, models
        m.context.publish(record, role="scheduler", ranks=m.context.SpawnRanks(world_rank=0, gpu_id=0))
        m.experts.initialize_moe_config()
        self.record = record
        self.schedule, self.spec = m.context.get_schedule(), m.context.get_spec()
        self.parallel, self.graph = m.context.get_parallel(), m.context.get_exec().graph
        self.algorithm = m.spec.SpeculativeAlgorithm.from_string(self.spec.speculative_algorithm)
        self.view = m.memory.resolving_view(record)
        self.config = m.memory.model_config_of(record)
        self.context = self.config.context_len
        self.draft = drafts.config(m, record, self.algorithm)
        self.pool = scheduling.pool(self)
        self.lora = self._lora_manager()
        with self.parallel.override(tp_group=None):
            self.runners = self._capture()

    def _lora_manager(self) -> Any:
        if not self.view.enable_lora:
            return None
        manager = object.__new__(self.m.lora.LoRAManager)
        kind = self.m.lora_backends.get_backend_from_name(self.view.lora_backend)
        manager.lora_backend = object.__new__(kind)
        manager.lora_backend.is_moe_lora = False
        vars(manager.lora_backend).update(prefill_cuda_graph_max_bs=None, prefill_cuda_graph_max_tokens=None)
        manager.attn_dp_enabled = self.parallel.attn_dp_enabled
        return manager

    def _model_runner(self, draft: bool) -> Any:
        runner = object.__new__(self.m.model_runner.ModelRunner)
        own = self.draft if draft else self.config
        model = self.models.skeleton(own.hf_config.architectures[0])
        config = types.SimpleNamespace(
            context_len=self.context,
            is_multimodal=not draft and self.config.is_multimodal,
            is_encoder_decoder=not draft and self.config.is_encoder_decoder,
            hf_config=own.hf_config,
        )
        layers = getattr(getattr(model, "model", None), "layers", ())
        vars(runner).update(
            server_args=self.record,
            device="cuda",
            gpu_id=0,
            is_draft_worker=draft,
            is_generation=draft or self.config.is_generation,
            spec_algorithm=self.algorithm,
            req_to_token_pool=types.SimpleNamespace(size=self.pool),
            model_config=config,
            lora_manager=None if draft else self.lora,
            model=model,
            layer_info=types.SimpleNamespace(start_layer=0, end_layer=len(layers)),
        )
        return runner

    def _capture(self) -> dict[tuple[Role, str], Any]:
        """Run SGLang's own choice of runners, with runners that write shapes down."""
        setup, worker = self.m.setup, self.m.worker
        setup.PrefillCudaGraphRunner = self._prefill_runner
        found: dict[tuple[Role, str], Any] = {}
        target = self._model_runner(draft=False)
        target._decode_cuda_graph_runner_cls = lambda: self._decode_runner
        setup.current_platform = types.SimpleNamespace(get_graph_runner_cls=lambda: self._decode_runner)
        eager = types.SimpleNamespace(runner=None)

        def chosen(capture: Any) -> Any:
            return None if capture.runner is eager else capture.runner

        found[Role.TARGET, "prefill"] = chosen(setup.capture_prefill_graph(model_runner=target, eager_runner=eager))
        found[Role.TARGET, "decode"] = chosen(setup.capture_decode_graph(model_runner=target))
        if not (self.algorithm.is_eagle() or self.algorithm.is_standalone()):
            return found
        draft = self._model_runner(draft=True)
        if self.m.setup.check_cuda_graph_backend("prefill", "breakable"):
            capture = setup.capture_prefill_graph(model_runner=draft, eager_runner=eager, force_for_draft_worker=True)
            found[Role.DRAFT_PREFILL, "prefill"] = chosen(capture)
        self._name_draft_classes()
        decodes, extends = drafts.backends(self.m, self.spec, self.draft)
        drafter = object.__new__(worker.EagleDraftWorker)
        vars(drafter).update(
            draft_runner=draft,
            target_worker=types.SimpleNamespace(device="cuda"),
            device="cuda",
            gpu_id=0,
            topk=self.spec.speculative_eagle_topk,
            speculative_num_steps=self.spec.speculative_num_steps,
            speculative_num_draft_tokens=self.spec.speculative_num_draft_tokens,
            speculative_algorithm=self.algorithm,
            draft_attn_backend=decodes,
            draft_extend_attn_backend=extends,
            _specialized_graph_memory_usage={},
            _specialized_graph_time_usage={},
        )
        drafter._capture_cuda_graphs()
        found[Role.DRAFT_DECODE, "decode"] = drafter.cuda_graph_runner
        found[Role.DRAFT_PREFILL, "decode"] = drafter.cuda_graph_runner_for_draft_extend
        return found

    def _name_draft_classes(self) -> None:
        """Let the worker make runners that write shapes down."""
        worker = self.m.worker
        worker.EAGLEDraftCudaGraphRunner = lambda w: self._draft_runner(w, self.m.draft, "draft_decode")
        worker.EAGLEDraftExtendCudaGraphRunner = lambda w: self._draft_runner(w, self.m.extend, "draft_extend")

    def _backend(self, name: str) -> Any:
        kind = self.m.breakable.BreakableCudaGraphBackend if name == "breakable" else self.m.full.FullCudaGraphBackend
        backend = object.__new__(kind)
        backend._graphs = {}
        return backend

    def _decode_runner(self, model_runner: Any) -> Any:
        return self.fill_decode_runner(object.__new__(self.m.decode.DecodeCudaGraphRunner), model_runner)

    def fill_decode_runner(self, runner: Any, model_runner: Any) -> Any:
        """Set the fields of the target's runner, which its constructor reads from the same functions."""
        m = self.m
        width = model_runner.decode_num_tokens_per_req()
        mlp, attention = type(runner).decode_graph_gather_requirements(model_runner)
        gathered = mlp or attention
        capture_bs, compile_bs = m.base.get_batch_sizes_to_capture(
            model_runner, width, gathered_buffer_required=gathered
        )
        vars(runner).update(
            model_runner=model_runner,
            captured_req_width=width,
            capture_bs=capture_bs,
            compile_bs=compile_bs,
            record_nolora_graph=_records_base_graphs(m, model_runner),
            require_mlp_sync=self.parallel.attn_dp_enabled or gathered,
            require_mlp_tp_gather=mlp,
            ragged_verify_mode=False,
            attention_graph_variants=None,
            is_encoder_decoder=False,
            enable_two_batch_overlap=m.context.get_exec().overlap.enable_two_batch_overlap,
            is_dllm=False,
            dllm_config=None,
        )
        self._common(runner)
        return runner

    def _draft_runner(self, worker: Any, module: Any, phase: str) -> Any:
        """A drafter's runner, with the fields that its constructor reads from the same functions."""
        kind = (
            module.EAGLEDraftExtendCudaGraphRunner
            if phase == "draft_extend"
            else self.m.draft.EAGLEDraftCudaGraphRunner
        )
        return self.fill_draft_runner(object.__new__(kind), worker, module, phase)

    def fill_draft_runner(self, runner: Any, worker: Any, module: Any, phase: str) -> Any:
        """Set the fields of a drafter's runner."""
        capture_bs, _ = module.get_batch_sizes_to_capture(worker.draft_runner)
        vars(runner).update(
            model_runner=worker.draft_runner,
            capture_bs=capture_bs,
            compile_bs=[],
            captured_req_width=module.resolve_num_tokens_per_req(phase=phase),
            require_mlp_tp_gather=module.require_mlp_tp_gather(),
            require_mlp_sync=module.require_mlp_sync(),
            record_nolora_graph=False,
            attention_graph_variants=None,
        )
        self._common(runner)
        return runner

    def _common(self, runner: Any) -> None:
        runner.disable_padding = self.graph.disable_cuda_graph_padding
        runner.max_bs = max(runner.capture_bs)
        runner.enable_pdmux = False
        runner.backend = self._backend(self.graph.cuda_graph_config.decode.backend)

        def capture(size: int, forward: Any, stream: Any = None, variant: Any = None, *_: Any) -> None:
            key = runner._make_graph_key(size, stream, variant)
            runner.backend._graphs[key] = size

        runner.capture_one_shape = capture
        runner._set_profile_trace_tag = lambda *_: None
        runner.model_runner.model_context = contextlib.nullcontext
        runner._capture_one_stream()

    def _prefill_runner(self, model_runner: Any) -> Any:
        m, config = self.m, self.graph.cuda_graph_config.prefill
        runner = object.__new__(m.prefill.PrefillCudaGraphRunner)
        tokens = m.prefill.get_prefill_num_tokens_to_capture(config.bs)
        whole = config.backend == "full"
        slots = config.full_prefill_max_req if whole else 1
        if whole:
            self._prepare_whole_prefill()
        vars(runner).update(
            model_runner=model_runner,
            prefill_backend_name=config.backend,
            capture_num_tokens=tokens,
            max_num_tokens=max(tokens),
            max_bs=self.pool,
            max_context_size=config.max_context_size,
            max_seq_len=config.max_seq_len,
            enable_cp_bcg_capture=False,
            _qwen_bcg_hc_sidechannel=False,
            _qwen_bcg_mtp_draft=False,
            _is_full_backend=whole,
            _fa4_prefill=False,
            _capture_req_slots=slots,
            _capture_lora=model_runner.lora_manager is not None,
            enable_lora=model_runner.lora_manager is not None,
            prefer_eager_mixed_prefill=False,
            has_mha_companion_layers=False,
            _capture_chunked_prefix=False,
            capture_hidden_mode=m.batches.CaptureHiddenMode.FULL,
            captured=[],
        )
        if model_runner.lora_manager is not None:
            backend = model_runner.lora_manager.lora_backend
            backend.prefill_cuda_graph_max_bs = slots if whole else min(runner.max_num_tokens, self.pool)
            backend.prefill_cuda_graph_max_tokens = runner.max_num_tokens
        runner.backend = self._backend(config.backend)

        def capture(size: int, **_: Any) -> None:
            runner.captured.append(size)
            runner.backend._graphs[m.decode.ShapeKey(size=size)] = size

        runner.capture_one_shape = capture
        runner._capture_one_stream()
        return runner

    def _prepare_whole_prefill(self) -> None:
        """Ask the two attention backends that may refuse a prefill inside a graph."""
        chosen = self.view.prefill_attention_backend or self.view.attention_backend
        mode = self.m.batches.ForwardMode.EXTEND
        if chosen == "triton":
            backend = object.__new__(self.m.triton_attention.TritonAttnBackend)
            backend._apply_cuda_graph_metadata(None, 1, None, None, mode, None)
        elif chosen == "trtllm_mha":
            backend = object.__new__(self.m.trtllm_attention.TRTLLMHAAttnBackend)
            one = types.SimpleNamespace(batch_size=1, forward_mode=mode, spec_info=None)
            backend.init_forward_metadata_out_graph(one)

    def answers(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Return sizes, graphs by role in order of capture, and an answer per batch, as plain data."""
        config = self.graph.cuda_graph_config
        graphs: dict[str, list[list[Any]]] = {}
        for (role, phase), runner in self.runners.items():
            rows = graphs.setdefault(role.value, [])
            if runner is None:
                continue
            if phase == "decode":
                rows += [self._decode_row(runner, key) for key in runner.backend._graphs]
            else:
                rows += [self._prefill_row(runner, size) for size in runner.captured]
        return {
            "decode": [config.decode.backend, config.decode.max_bs, list(config.decode.bs)],
            "prefill": [config.prefill.backend, config.prefill.max_bs],
            "chunk": self.schedule.chunked_prefill_size,
            "requests": self.schedule.max_running_requests,
            "pool": self.pool,
            "page": self.view.page_size,
            "attention": self.view.attention_backend,
            "draft": None if self.algorithm.is_none() else drafts.sizes(self.spec),
            "graphs": graphs,
            "answers": [self._answer(batch) for batch in batches],
        }

    def _loras(self, runner: Any, label: Any = None) -> int:
        if runner.model_runner.lora_manager is None or label == "nolora":
            return 0
        return int(self.view.max_loras_per_batch)

    def _decode_row(self, runner: Any, key: Any) -> list[Any]:
        mode = "FULL" if type(runner.backend).__name__.startswith("Full") else "PIECEWISE"
        width = runner.captured_req_width
        return [mode, key.size * width, key.size, width, self._loras(runner, key.variant_label)]

    def _prefill_row(self, runner: Any, size: int) -> list[Any]:
        whole = runner._is_full_backend
        slots = runner._capture_req_slots if whole else None
        return ["FULL" if whole else "PIECEWISE", size, slots, None, self._loras(runner)]

    def _answer(self, batch: Batch) -> list[Any] | str | None:
        if (batch.role, "decode") not in self.runners:
            return "no role"
        speculative = not self.algorithm.is_none()
        width = batch.uniform_query_len
        decode = width is not None if speculative else width == 1
        if decode or batch.role is Role.DRAFT_DECODE:
            return self._answer_decode(batch, width)
        return self._answer_prefill(batch)

    def buckets(self, ranks: Sequence[Sequence[int]]) -> list[int | None] | None:
        """Return the size that all ranks of attention DP replay, for each list of their request counts."""
        runner = self.runners[Role.TARGET, "decode"]
        if runner is None or not self.parallel.attn_dp_enabled or not runner.require_mlp_tp_gather:
            return None
        return [self._bucket(runner, counts) for counts in ranks]

    def _bucket(self, runner: Any, counts: Sequence[int]) -> int | None:
        forward = types.SimpleNamespace(
            replace_embeds=None,
            spec_info=None,
            batch_size=counts[0],
            original_global_num_tokens_cpu=list(counts),
            can_run_decode_cuda_graph=True,
            can_run_tbo=scheduling.splits(self, max(counts)),
            lora_ids=None,
            input_ids=torch.empty(counts[0] * runner.captured_req_width, device="meta"),
        )
        if not runner.can_run_graph(forward):
            return None
        return int(runner._pad_to_bucket(runner._max_dp_batch_size(forward), runner.capture_bs))

    def _answer_decode(self, batch: Batch, width: int | None) -> list[Any] | None:
        runner = self.runners[batch.role, "decode"]
        if runner is None or width is None:
            return None
        ids = None if self.lora is None else ["a" if batch.active_loras else None] * batch.num_reqs
        spec = None if self.algorithm.is_none() else types.SimpleNamespace(num_tokens_per_req=width)
        ranks = [batch.num_reqs] * self.parallel.num_dp_ranks
        forward = types.SimpleNamespace(
            replace_embeds=None,
            spec_info=spec,
            sampling_info=None,
            batch_size=batch.num_reqs,
            seq_lens=torch.empty(batch.num_reqs, device="meta"),
            input_ids=torch.empty(batch.num_tokens, device="meta"),
            original_global_num_tokens_cpu=ranks,
            can_run_decode_cuda_graph=True,
            can_run_tbo=scheduling.splits(self, batch.num_reqs),
            can_run_dp_draft_cuda_graph=True,
            lora_ids=ids if batch.role is Role.TARGET else None,
        )
        if not runner.can_run_graph(forward):
            return None
        size = runner._pad_to_bucket(batch.num_reqs, runner.capture_bs)
        label = runner._resolve_lora_variant(forward) if batch.role is Role.TARGET else None
        key = runner._make_graph_key(size, None, label)
        assert key in runner.backend._graphs, key
        return self._decode_row(runner, key)

    def _answer_prefill(self, batch: Batch) -> list[Any] | None:
        runner = self.runners.get((batch.role, "prefill"))
        if runner is None:
            return None
        extend = self.m.batches.ForwardMode.EXTEND
        ranks = self.parallel.num_dp_ranks if self.parallel.attn_dp_enabled else None
        forward = types.SimpleNamespace(
            global_num_tokens_cpu=[batch.num_tokens] * ranks if ranks else None,
            can_run_dp_prefill_cuda_graph=True,
            batch_size=batch.num_reqs,
            input_ids=range(batch.num_tokens),
            extend_num_tokens=batch.num_tokens,
            input_embeds=None,
            replace_embeds=None,
            extend_prefix_lens_cpu=[0] * batch.num_reqs,
            **dict.fromkeys(("forward_mode", "global_forward_mode"), extend),
            capture_hidden_mode=self.m.batches.CaptureHiddenMode.NULL,
            return_logprob=False,
            seq_lens_cpu=[batch.query_len or -(-batch.num_tokens // batch.num_reqs)] * batch.num_reqs,
            contains_mm_inputs=lambda: False,
        )
        if not runner.can_run_graph(forward):
            return None
        return self._prefill_row(runner, runner._pad_to_bucket(batch.num_tokens, runner.capture_num_tokens))


def _records_base_graphs(m: Any, model_runner: Any) -> bool:
    """Whether decodes without adapters have graphs of their own; 0.5.22 has them for no backend."""
    asks = getattr(m.decode, "_lora_backend_skips_inactive", None)
    return asks is not None and bool(asks(model_runner))
