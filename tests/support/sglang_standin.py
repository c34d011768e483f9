"""A stand-in for SGLang: modules, classes and functions that the plugin hooks, without a GPU or a model.

``installed(monkeypatch, **settings)`` puts it into ``sys.modules``. Its functions have the parameters that the plugin
checks, ``seam.APPLY`` and ``seam.OBSERVE``; ``oracle/run_sglang_apply.py`` checks the same tables against the wheel.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
import types
from collections import namedtuple
from enum import Enum
from types import SimpleNamespace
from typing import Any

ShapeKey = namedtuple("ShapeKey", "size variant_label", defaults=(None,))
Capture = namedtuple("Capture", "runner memory_phase memory_usage_gb capture_time")
Mode = Enum("Mode", "DECODE EXTEND IDLE TARGET_VERIFY DRAFT_EXTEND_V2")
HookType = Enum("HookType", "BEFORE AFTER AROUND")


class ForwardMode:
    """One of SGLang's forward modes."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def __getattr__(self, name: str) -> Any:
        return lambda: self._mode is Mode[name.removeprefix("is_").upper()]


class FullBackend:
    """Keeps the keys of what was captured."""

    def __init__(self) -> None:
        self._graphs: dict[ShapeKey, int] = {}
        self.replayed: list[ShapeKey] = []

    def replay_session(self) -> Any:
        return contextlib.nullcontext()

    def replay(self, key: ShapeKey, batch: Any) -> None:
        self.replayed.append(key)


class HookRegistry:
    """SGLang's registry, as far as its hooks are of three kinds."""

    def __init__(self, find: Any) -> None:
        self.find = find
        self.hooks: dict[str, list[tuple[HookType, Any]]] = {}

    def register(self, target: str, hook: Any, hook_type: HookType) -> None:
        self.hooks.setdefault(target, []).append((hook_type, hook))

    def apply_hooks(self) -> None:
        for target, hooks in self.hooks.items():
            owner, name = target.rpartition(".")[::2]
            function = getattr(self.find(owner), name)
            for kind, hook in hooks:
                function = wrapped(function, kind, hook)
            setattr(self.find(owner), name, function)


def wrapped(function: Any, kind: HookType, hook: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(function, *args, **kwargs)
        if kind is HookType.BEFORE:
            hook(*args, **kwargs)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        hook(result, *args, **kwargs)
        return result

    return wrapper


def installed(monkeypatch: Any, **settings: Any) -> types.SimpleNamespace:
    """Put the stand-in into ``sys.modules``; return its parts. ``settings`` replace those of ``context``."""
    context = resolved(**settings)
    parts = SimpleNamespace(context=context, registry=None, logged=[])
    modules: dict[str, types.ModuleType] = {}

    def module(name: str, **values: Any) -> Any:
        for count in range(1, name.count(".") + 1):
            parent = ".".join(name.split(".")[:count])
            modules.setdefault(parent, types.ModuleType(parent)).__path__ = []
        made = modules.setdefault(name, types.ModuleType(name))
        for key, value in values.items():
            setattr(made, key, value)
            if isinstance(value, type):
                value.__module__, value.__qualname__ = name, key
        return made

    def find(path: str) -> Any:
        from capture_planner.engines.inside import resolve

        return resolve(path)

    parts.registry = HookRegistry(find)
    module("sglang.version", __version__="0.5.23")
    module("sglang.srt.runtime_context", **vars(context))
    module("sglang.srt.plugins.hook_registry", HookRegistry=parts.registry, HookType=HookType)
    module("sglang.srt.model_executor.forward_batch_info", ForwardMode=SimpleNamespace(EXTEND=ForwardMode(Mode.EXTEND)))
    runner = "sglang.srt.model_executor.runner"
    base = module(f"{runner}.base_cuda_graph_runner")

    def get_batch_sizes_to_capture(
        model_runner: Any, captured_req_width: int = 1, *, gathered_buffer_required: Any = None
    ) -> tuple[list[int], list[int]]:
        capture_bs = list(context.get_exec().graph.cuda_graph_config.decode.bs)
        most = model_runner.req_to_token_pool.size
        if max(capture_bs) > most:
            capture_bs.append(most)
        return sorted({size for size in capture_bs if size <= most}), []

    base.get_batch_sizes_to_capture = get_batch_sizes_to_capture

    class Runner:
        def fill(self, model_runner: Any, width: int) -> None:
            self.model_runner, self.captured_req_width, self.backend = model_runner, width, FullBackend()
            self.capture_bs, _ = base.get_batch_sizes_to_capture(model_runner, width)
            self.max_bs, self.bs = max(self.capture_bs), 0

        capture_one_shape: Any

        def capture(self) -> None:
            for size in reversed(self.capture_bs):
                self.capture_one_shape(size, None)

        def model_context(self) -> Any:
            return contextlib.nullcontext()

        def _make_graph_key(self, size: int, variant_label: Any = None) -> ShapeKey:
            return ShapeKey(size, variant_label)

        def _resolve_lora_variant(self, batch: Any) -> None:
            return None

        def _pad_to_bucket(self, size: int, buckets: list[int]) -> int:
            return buckets[bisect.bisect_left(buckets, size)]

        def can_run_graph(self, batch: Any) -> bool:
            return bool(batch.batch_size <= self.max_bs)

        def replay(self, batch: Any) -> None:
            self.bs = self._pad_to_bucket(batch.batch_size, self.capture_bs)
            self._replay_graph_key = self._make_graph_key(self.bs)

    class UniformRunner(Runner):
        def capture_one_shape(
            self,
            size: int,
            forward: Any,
            stream_idx: Any = None,
            variant_label: Any = None,
            attention_variant: Any = None,
        ) -> None:
            self.backend._graphs[self._make_graph_key(size)] = size

    class DecodeCudaGraphRunner(UniformRunner):
        def __init__(
            self,
            model_runner: Any,
            *,
            attn_backend: Any = None,
            speculative_num_steps: Any = None,
            speculative_num_draft_tokens: Any = None,
            record_nolora_graph: bool = False,
        ) -> None:
            self.fill(model_runner, context.get_spec().speculative_num_draft_tokens or 1)
            assert self.captured_req_width
            assert self.max_bs == self.capture_bs[-1]
            self.capture()

        def execute(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> str:
            self.replay(forward_batch)
            assert self._replay_graph_key in self.backend._graphs
            return "graph"

    class EAGLEDraftExtendCudaGraphRunner(UniformRunner):
        def __init__(
            self, eagle_worker: Any, *, draft_extend_attn_backend: Any = None, speculative_num_steps: Any = None
        ) -> None:
            self.fill(eagle_worker.draft_runner, context.get_spec().speculative_num_draft_tokens)
            assert self.captured_req_width
            assert self.max_bs == self.capture_bs[-1]
            self.capture()

        def execute(self, forward_batch: Any, select_index: Any) -> str:
            self.replay(forward_batch)
            assert self.bs in self.capture_bs
            return "graph"

    class EAGLEDraftCudaGraphRunner(UniformRunner):
        def __init__(
            self, eagle_worker: Any, *, draft_attn_backend: Any = None, speculative_num_steps: Any = None
        ) -> None:
            self.fill(eagle_worker.draft_runner, 1)
            assert self.captured_req_width
            assert self.max_bs == self.capture_bs[-1]
            self.capture()

        def execute(self, forward_batch: Any) -> str:
            self.replay(forward_batch)
            assert self.bs in self.capture_bs
            return "graph"

    class PrefillCudaGraphRunner(Runner):
        def __init__(self, model_runner: Any) -> None:
            self.model_runner, self.backend, self.capture_hidden_mode = model_runner, FullBackend(), 0
            self.backend.__class__ = type("BreakableBackend", (FullBackend,), {})
            self.capture_num_tokens, self.max_num_tokens = [16, 64], 64
            self.max_bs = model_runner.req_to_token_pool.size
            for size in (64, 16):
                self.capture_one_shape(size)

        def capture_one_shape(self, size: int, *, prefix_num_chunks: int = 0) -> None:
            self.backend._graphs[ShapeKey(size)] = size

        def can_run_graph(self, batch: Any) -> bool:
            size = len(batch.input_ids)
            return size <= 64 and self._pad_to_bucket(size, self.capture_num_tokens) <= 2 * size

        def _shape_key(self, size: int) -> ShapeKey:
            return ShapeKey(self._pad_to_bucket(size, self.capture_num_tokens))

        def execute(self, forward_batch: Any, **kwargs: Any) -> str:
            assert self._shape_key(len(forward_batch.input_ids)) in self.backend._graphs
            return "graph"

    class EagerRunner:
        def __init__(self, model_runner: Any) -> None:
            self.model_runner = model_runner

        def execute(self, forward_batch: Any, pp_proxy_tensors: Any = None, **kwargs: Any) -> str:
            mode = forward_batch.forward_mode
            return "decode" if mode.is_decode() else "idle" if mode.is_idle() else "extend"

    module(f"{runner}.decode_cuda_graph_runner", DecodeCudaGraphRunner=DecodeCudaGraphRunner)
    module(f"{runner}.prefill_cuda_graph_runner", PrefillCudaGraphRunner=PrefillCudaGraphRunner)
    module(f"{runner}.eager_runner", EagerRunner=EagerRunner)
    speculative = "sglang.srt.speculative"
    module(
        f"{speculative}.eagle_draft_extend_cuda_graph_runner",
        EAGLEDraftExtendCudaGraphRunner=EAGLEDraftExtendCudaGraphRunner,
    )
    module(f"{speculative}.eagle_draft_cuda_graph_runner", EAGLEDraftCudaGraphRunner=EAGLEDraftCudaGraphRunner)
    setup = module("sglang.srt.model_executor.model_runner_components.cuda_graph_setup")
    worker = module(f"{speculative}.eagle_worker_v2")

    def capture_decode_graph(*, model_runner: Any) -> Any:
        phase = "draft" if model_runner.is_draft_worker else "decode"
        return setup.GraphCapture(DecodeCudaGraphRunner(model_runner), phase, 0, 0)

    setup.GraphCapture, setup.capture_decode_graph = Capture, capture_decode_graph

    def _select_spec_graph_runner_cls(*, builtin_runner_cls: Any, oot_runner_cls: Any) -> Any:
        return builtin_runner_cls()

    class EagleDraftWorker:
        def __init__(self, draft_runner: Any) -> None:
            spec = context.get_spec()
            self.draft_runner, self.topk, self.speculative_num_steps = draft_runner, 1, spec.speculative_num_steps
            self.eager = EagerRunner(draft_runner)

        def draft_forward(self, forward_batch: Any) -> list[Any]:
            return [self.eager.execute(forward_batch) for _ in range(self.speculative_num_steps - 1) if self.topk]

    worker._select_spec_graph_runner_cls, worker.EagleDraftWorker = _select_spec_graph_runner_cls, EagleDraftWorker

    class SchedulerBatchResultProcessor:
        def _resolve_spec_v2_tokens(self, result: Any, batch: Any) -> None:
            result.num_correct_drafts_per_req_cpu = result.correct

    module(
        "sglang.srt.managers.scheduler_components.batch_result_processor",
        SchedulerBatchResultProcessor=SchedulerBatchResultProcessor,
    )

    class Scheduler:
        def __init__(self, server_args: Any, port_args: Any) -> None:
            spec, pool = context.get_spec(), SimpleNamespace(size=context.pool)
            common = {
                "req_to_token_pool": pool,
                "spec_algorithm": SimpleNamespace(is_speculative=lambda: bool(spec.speculative_algorithm)),
                "max_total_num_tokens": 4096,
                "page_size": 1,
                "lora_manager": None,
            }
            target = SimpleNamespace(is_draft_worker=False, **common)
            self.tp_worker = SimpleNamespace(model_runner=target)
            self.eager = EagerRunner(target)
            prefills = context.get_exec().graph.cuda_graph_config.prefill.backend != "disabled"
            self.prefill = PrefillCudaGraphRunner(target) if prefills else None
            self.target = setup.capture_decode_graph(model_runner=target).runner
            self.worker = self.extend = self.draft = None
            self.forward_ct, self.idled = 0, True
            if not spec.speculative_algorithm:
                return
            self.worker = EagleDraftWorker(SimpleNamespace(is_draft_worker=True, **common))
            if spec.speculative_num_steps > 1:
                self.draft = self.make(EAGLEDraftCudaGraphRunner)
            self.extend = self.make(EAGLEDraftExtendCudaGraphRunner)

        def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
            self.forward_ct += 1
            batch.forward_iter = self.forward_ct
            batch.after_idle_gap, self.idled = self.idled, False
            return batch.run()

        def process_batch_result(self, batch: Any, result: Any) -> None:
            batch.process()

        def make(self, kind: type) -> Any:
            chosen = worker._select_spec_graph_runner_cls(builtin_runner_cls=lambda: kind, oot_runner_cls=lambda: None)
            return None if chosen is None else chosen(self.worker)

    module("sglang.srt.managers.scheduler", Scheduler=Scheduler)
    parts.Scheduler, parts.Processor = Scheduler, SchedulerBatchResultProcessor
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, made)
    return parts


def resolved(
    *,
    sizes: tuple[int, ...] = (1, 2, 4, 8),
    pool: int = 64,
    running: int | None = None,
    algorithm: str | None = None,
    steps: int | None = None,
    topk: int | None = None,
    draft_tokens: int | None = None,
    prefill: str = "disabled",
    decode: str = "full",
) -> SimpleNamespace:
    """Return SGLang's module of resolved values."""
    graphs = SimpleNamespace(
        cuda_graph_config=SimpleNamespace(
            decode=SimpleNamespace(backend=decode, bs=list(sizes), max_bs=max(sizes)),
            prefill=SimpleNamespace(backend=prefill, bs=[16, 64], max_bs=64),
        ),
        disable_cuda_graph_padding=False,
    )
    spec = SimpleNamespace(
        speculative_algorithm=algorithm,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=draft_tokens,
        speculative_adaptive=False,
    )
    parallel = SimpleNamespace(attn_dp_size=1, tp_size=1, pp_size=1, dp_size=1, tp_rank=0, pp_rank=0)
    schedule = SimpleNamespace(max_running_requests=running, chunked_prefill_size=8192, max_prefill_tokens=8192)
    leaves = {"page_size": 1, "attention_backend": "triton", **vars(schedule), **vars(spec)}

    def config_leaf(name: str) -> Any:
        if name not in leaves:
            raise ValueError(f"{name!r} is not a config leaf")
        return leaves[name]

    def override(source: str, **fields: Any) -> None:
        vars(schedule).update(fields)

    whole = SimpleNamespace(override=override, config_leaf=config_leaf)
    return SimpleNamespace(
        pool=pool,
        get_context=lambda: whole,
        get_exec=lambda: SimpleNamespace(graph=graphs),
        get_spec=lambda: spec,
        get_parallel=lambda: parallel,
        get_schedule=lambda: schedule,
        get_lora=lambda: SimpleNamespace(enable_lora=False, max_loras_per_batch=8),
        get_server_args=lambda: SimpleNamespace(model_path="a-model"),
    )
