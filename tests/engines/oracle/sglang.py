"""SGLang 0.5.23's own functions, from an unpacked wheel: its parser, its rules, its runners' choices.

Needs msgspec besides what the tests need. Everything that a GPU would do is left out: runners are made
without their constructors, and "capturing" a shape writes its key down. Which shapes are captured, in
which order, and which batch may replay one, is asked of SGLang's own methods.

Two things stand for a machine: ``torch.cuda`` answers as a machine with a device would, and the KV pool is
as large as --max-total-tokens allows, or large enough.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import logging
import os
import re
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers  # noqa: F401  (loaded before the finder: it looks for optional packages)

from capture_planner.records.batch import Batch
from capture_planner.records.environment import Environment
from support.files import module_at

_HERE = Path(__file__).parent


stubs, launching = module_at(_HERE / "stubs.py"), module_at(_HERE / "sglang_launch.py")
reading = module_at(_HERE / "sglang_models.py")

_ABSENT = ("sglang.kernels", "sglang.srt.layers.quantization", "sglang.srt.layers.attention.deepseek_v4_backend")
"""Compiled kernels, whose import needs a compiler, and attention that no graph depends on."""
_CHUNKS = "sglang.kernels.ops.attention.fla.chunk_delta_h"
"""The kernel whose chunks of linear attention are a fact of pages."""


_MODULES = {
    "memory": "arg_groups.memory_hook",
    "attention": "layers.attention.flashattention_backend",
    "registry": "layers.attention.attention_registry",
    "triton_attention": "layers.attention.triton_backend",
    "trtllm_attention": "layers.attention.trtllm_mha_backend",
    "flashinfer": "layers.attention.flashinfer_backend",
    "sparse": "layers.attention.dsa_backend",
    "flashinfer_mla": "layers.attention.flashinfer_mla_backend",
    "flashmla": "layers.attention.flashmla_backend",
    "trtllm_mla": "layers.attention.trtllm_mla_backend",
    "cutedsl_mla": "layers.attention.cutedsl_mla_backend",
    "configs": "configs.model_config",
    "hybrids": "configs.hybrid_arch",
    "vision": "arg_groups.model_overrides.qwen3_vl",
    "lora_backends": "lora.backend.lora_registry",
    "lora": "lora.lora_manager",
    "pools": "mem_cache.kv_cache_configurator",
    "batches": "model_executor.forward_batch_info",
    "model_runner": "model_executor.model_runner",
    "setup": "model_executor.model_runner_components.cuda_graph_setup",
    "base": "model_executor.runner.base_cuda_graph_runner",
    "decode": "model_executor.runner.decode_cuda_graph_runner",
    "prefill": "model_executor.runner.prefill_cuda_graph_runner",
    "breakable": "model_executor.runner_backend.breakable_cuda_graph_backend",
    "full": "model_executor.runner_backend.full_cuda_graph_backend",
    "context": "runtime_context",
    "server_args": "server_args",
    "drafts": "speculative.draft_utils",
    "draft": "speculative.eagle_draft_cuda_graph_runner",
    "extend": "speculative.eagle_draft_extend_cuda_graph_runner",
    "worker": "speculative.eagle_worker_v2",
    "overlap": "batch_overlap.two_batch_overlap",
    "common": "utils.common",
    "experts": "layers.moe.utils",
    "spec": "speculative.spec_info",
}
"""The engine's modules that are asked, below ``sglang.srt``."""


class Sglang:
    """The engine, imported once for a process."""

    def __init__(self, wheel: Path | str) -> None:
        torch.cuda.is_available = lambda: True
        torch.version.cuda = "12.9"
        torch.cuda.device_count = lambda: 8
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.get_device_name = lambda *_: "a device"
        properties = types.SimpleNamespace(total_memory=80 << 30, major=9, minor=0, multi_processor_count=132)
        torch.cuda.get_device_properties = lambda *_: properties
        sys.modules["dill"] = types.SimpleNamespace(dumps=lambda _: b"", loads=None)  # type: ignore[assignment]
        self._open = stubs.installed(wheel, "sglang")
        self._open.__enter__()
        logging.disable(logging.CRITICAL)
        self.models = reading.Models(wheel)
        importlib.import_module("sglang")
        for name in _ABSENT:
            module = stubs.StubModule(name)
            module.__path__ = []
            sys.modules[name] = module
        constants = Path(wheel, "sglang", *_CHUNKS.split(".")[1:]).with_suffix(".py")
        chunk = re.search(r"^CHUNK_SIZE = (\d+)", constants.read_text(encoding="utf-8"), re.MULTILINE)
        stubs.provide(_CHUNKS, CHUNK_SIZE=int(chunk[1]) if chunk else None)
        self._import()

    def _import(self) -> None:
        found = {name: importlib.import_module(f"sglang.srt.{path}") for name, path in _MODULES.items()}
        self.m = types.SimpleNamespace(**found)
        decode, prefill = self.m.decode, self.m.prefill
        for module in (decode, prefill, self.m.setup, self.m.worker):
            for name in ("get_available_gpu_memory", "log_info_on_rank0"):
                if hasattr(module, name):
                    setattr(module, name, lambda *_, **__: 0.0)
        for module in (decode, prefill):
            module.tqdm = types.SimpleNamespace(tqdm=_Bar)
        decode.torch_compile_decoration = types.SimpleNamespace(patch_model=lambda *_, **__: contextlib.nullcontext())
        self._keep_what_no_launch_changes()

    def _keep_what_no_launch_changes(self) -> None:
        """Build once what SGLang builds for each launch: its parser of each device, and the fields of its records."""
        fields, add = msgspec.structs.fields, self.m.server_args.ServerArgs.add_cli_args
        kept = functools.cache(fields)
        msgspec.structs.fields = lambda kind: kept(kind) if isinstance(kind, type) else fields(kind)

        @functools.cache
        def parser(capability: tuple[int, int]) -> argparse.ArgumentParser:
            found = argparse.ArgumentParser(prog="sglang serve")
            add(found)
            return found

        self.m.server_args.argparse = types.SimpleNamespace(
            **vars(argparse) | {"ArgumentParser": lambda **_: parser(torch.cuda.get_device_capability())}
        )
        self.m.server_args.ServerArgs.add_cli_args = staticmethod(lambda _: None)
        logging.basicConfig = lambda **_: None

    @contextlib.contextmanager
    def _machine(self, environment: Environment) -> Iterator[None]:
        major, minor = environment.device.sm
        memory = environment.device.memory / (1 << 20)
        for module in (self.m.memory, self.m.vision):
            module.get_device_memory_capacity = lambda device: memory
        self.m.vision.is_sm90_supported = lambda: major == 9
        torch.cuda.get_device_capability = lambda *_: (major, minor)
        self.m.registry.get_device_capability = lambda *_: (major, minor)
        facts = {
            "is_cuda": True,
            "is_hip": False,
            "is_sm90": major == 9,
            "is_sm100": major == 10,
            "is_sm100_or_sm110": major in (10, 11),
            "is_sm110": major == 11,
            "is_sm120": major == 12,
            "is_blackwell": major >= 10,
            "is_hopper_with_cuda_12_3": major == 9,
            "has_flashinfer": True,
        }
        kept = dict(os.environ)
        with self.m.context.override_platform(**facts):
            try:
                yield
            finally:
                os.environ.clear()
                os.environ.update(kept)

    def resolve(self, command: Sequence[str], environment: Environment) -> Any:
        """Return SGLang's record after its parser, its rules and its last check."""
        with self._machine(environment), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                record = self.m.server_args.prepare_server_args(list(command))
                logging.disable(logging.CRITICAL)
                record.resolve_once()
                record.check_server_args()
            except SystemExit:
                raise ValueError(said.getvalue().strip().splitlines()[-1]) from None
        return record

    def _create_attention(self, record: Any) -> None:
        """Run SGLang's creator of fa3 where it is one of the launch's backends: it may refuse the device."""
        view = self.m.memory.resolving_view(record)
        halves = (view.prefill_attention_backend, view.decode_attention_backend)
        if "fa3" not in {half or view.attention_backend for half in halves}:
            return
        whole, attention = self.m.attention.FlashAttentionBackend, self.m.attention
        attention.FlashAttentionBackend = lambda runner: None
        try:
            latent = self.m.memory.use_mla_backend(record)
            self.m.registry.create_flashattention_v3_backend(types.SimpleNamespace(use_mla_backend=latent))
        finally:
            attention.FlashAttentionBackend = whole

    def ask(
        self,
        command: Sequence[str],
        environment: Environment,
        batches: Sequence[Batch],
        ranks: Sequence[Sequence[int]] = (),
    ) -> dict[str, Any]:
        """Return what SGLang captures and how it answers batches, or why it refuses the command.

        ``ranks`` are request counts of attention-DP ranks, asked together.
        """
        try:
            record = self.resolve(command, environment)
            with self._machine(environment):
                self._create_attention(record)
                launch = launching.Launch(self.m, record, self.models)
                return launch.answers(batches) | {"buckets": launch.buckets(ranks)}
        except Exception as error:
            _check_own(error)
            return {"refused": f"{type(error).__name__}: {error}"[:200]}


def _check_own(error: Exception) -> None:
    """Raise an error that is not SGLang's: of this oracle, of a stub, or for want of a device."""
    *_, last = traceback.walk_tb(error.__traceback__)
    place = Path(last[0].f_code.co_filename)
    mine = place.parent == _HERE and not isinstance(error, launching.scheduling.Refusal | ValueError)
    lacking = any(word in str(error) for word in ("_Permissive", "Stub", "SimpleNamespace' object", "Pools' object"))
    if mine or lacking or place.parts[-3:-1] == ("torch", "cuda"):
        raise error


class _Bar(list):  # type: ignore[type-arg]
    def set_description(self, text: str) -> None:
        pass
