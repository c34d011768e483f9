"""vLLM's own way from a command line to the settings of its graph managers, run without a GPU.

What runs is the engine's code: its argument parser, ``AsyncEngineArgs.create_engine_config`` with all of
``VllmConfig.__post_init__``, the choice of the attention backend, each builder's graph support,
``get_attn_cg_support`` and ``resolve_cudagraph_mode_and_sizes``. Ours are the machine (capability, memory,
name, number of devices) and what vLLM would learn by importing a model's class.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs

from capture_planner.environment import Environment


def _sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"oracle_{name}", Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stubs, parts, architectures = _sibling("stubs"), _sibling("vllm_parts"), _sibling("vllm_architectures")

QUIET = {
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "",
}
RUNNER, BREAKABLE = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_BREAKABLE_CUDAGRAPH"
COMPILED = ("_C", "_C_cache_ops", "_C_custom_ar", "_moe_C", "_qutlass_C", "_rocm_C", "_C_utils")
"""Operators of the engine's compiled extensions, which are not loaded."""


@attrs.frozen
class Refused:
    """The engine's error, as it was raised."""

    kind: str
    reason: str


class VllmOracle:
    """The engine, imported once from ``wheel``; raises ``ImportError`` where it is not there."""

    def __init__(self, wheel: Path) -> None:
        os.environ.update(QUIET)
        for name in (RUNNER, BREAKABLE):
            os.environ.pop(name, None)
        self._wheel = wheel
        with stubs.installed(wheel, "vllm"):
            self._load()

    def _load(self) -> None:
        import torch
        import vllm.platforms
        import vllm.platforms.interface as interface

        # Shape functions for operators that are not there; nothing here runs one.
        torch.library.register_fake = lambda *names, **options: lambda function: function
        for name in COMPILED:
            setattr(torch.ops, name, stubs.StubModule(f"torch.ops.{name}"))

        class Booting(interface.Platform):  # type: ignore[misc]
            _enum = interface.PlatformEnum.CUDA
            device_name = device_type = "cuda"
            dispatch_key = "CUDA"

        vllm.platforms._current_platform = Booting()
        triton = stubs.StubModule("triton")
        triton.__version__ = "3.6.0"
        stubs.provide("vllm.triton_utils", HAS_TRITON=True, triton=triton)
        from vllm.platforms.cuda import NonNvmlCudaPlatform

        class Machine(NonNvmlCudaPlatform):  # type: ignore[misc]
            capability = (9, 0)
            memory = multiprocessors = 0
            name = ""

            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> Any:
                return interface.DeviceCapability(*cls.capability)

            @classmethod
            def get_device_total_memory(cls, device_id: int = 0) -> int:
                return cls.memory

            @classmethod
            def get_device_name(cls, device_id: int = 0) -> str:
                return cls.name

            @classmethod
            def num_compute_units(cls, device_id: int = 0) -> int:
                return cls.multiprocessors

            @classmethod
            def device_count(cls) -> int:
                return 64

            @classmethod
            def is_fully_connected(cls, device_ids: list[int]) -> bool:
                return True

        torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
            multi_processor_count=Machine.multiprocessors
        )
        self._machine = Machine
        vllm.platforms._current_platform = Machine()
        import vllm.config.parallel
        import vllm.config.vllm as config
        import vllm.engine.arg_utils as arg_utils
        import vllm.model_executor.models.registry as registry
        import vllm.utils.deep_gemm
        import vllm.utils.flashinfer
        from vllm.entrypoints.common.cli_args import make_arg_parser
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.attention.backends import fa_utils, flash_attn, flashinfer
        from vllm.v1.worker.gpu import attn_utils

        for module in (vllm.utils.flashinfer, flashinfer):
            if hasattr(module, "has_nvidia_artifactory"):
                module.has_nvidia_artifactory = lambda: True
        architectures.stand_in(stubs)
        registry._LazyRegisteredModel.inspect_model_cls = parts.model_info(registry, architectures)
        parser = FlexibleArgumentParser(prog="vllm")
        commands = parser.add_subparsers(dest="subparser")
        self.serve = make_arg_parser(commands.add_parser("serve"))
        self.parser, self._args, self._context = parser, arg_utils.AsyncEngineArgs, UsageContext
        self._config, self._flash_attn, self._fa_utils = config, flash_attn, fa_utils
        self._attn_utils = attn_utils
        parts.import_speculators()
        import vllm.config.speculative as speculative

        # A package beside vLLM; its decoding has no graphs.
        speculative.has_arctic_inference = lambda: True
        self._support = parts.flash_attention_support(flash_attn)

    @contextlib.contextmanager
    def _on(self, environment: Environment, variables: dict[str, str]) -> Iterator[None]:
        machine = self._machine
        device = environment.device
        machine.capability, machine.memory, machine.name = device.sm, device.memory, device.name
        machine.multiprocessors = device.multiprocessors or 0
        self._forget()
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in (*variables, RUNNER, BREAKABLE):
                os.environ.pop(name, None)

    def _forget(self) -> None:
        """Empty what the engine keeps for the life of a process; each configuration is a new one."""
        for module in (
            "platforms.cuda",
            "v1.attention.selector",
            "utils.flashinfer",
            "utils.deep_gemm",
            "v1.attention.backends.fa_utils",
            "v1.attention.backends.flashinfer",
        ):
            for value in vars(sys.modules[f"vllm.{module}"]).values():
                if callable(getattr(type(value), "cache_clear", None)):
                    value.cache_clear()

    def parse(self, command: Sequence[str]) -> Any:
        """Return the engine's namespace of ``vllm serve COMMAND``; raises ``SystemExit`` or ``ValueError``."""
        with stubs.installed(self._wheel, "vllm"):
            return self.parser.parse_args(["serve", *command])

    def configure(self, command: Sequence[str]) -> Any:
        """Return the engine's ``VllmConfig``."""
        namespace = self.parse(command)
        if namespace.model_tag is not None:
            namespace.model = namespace.model_tag
        args = self._args.from_cli_args(namespace)
        return args.create_engine_config(usage_context=self._context.OPENAI_API_SERVER)

    def answer(
        self, command: Sequence[str], environment: Environment, variables: dict[str, str] | None = None
    ) -> dict[str, Any] | Refused:
        """Return what the engine ends up with, as plain data, or its refusal."""
        with self._on(environment, variables or {}), stubs.installed(self._wheel, "vllm"):
            errors = io.StringIO()
            try:
                with contextlib.redirect_stderr(errors):
                    return self._answer(command)
            except SystemExit:
                return Refused("SystemExit", errors.getvalue().partition("error: ")[2].strip())
            except Exception as error:
                return Refused(type(error).__name__, str(error))

    def _answer(self, command: Sequence[str]) -> dict[str, Any]:
        config = self.configure(command)
        compilation, scheduler = config.compilation_config, config.scheduler_config
        found: dict[str, Any] = {
            "runner": "v2" if config.use_v2_model_runner else "v1",
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_model_len": config.model_config.max_model_len,
            "K": config.num_speculative_tokens,
            "configured": "",
            "compile": compilation.mode.name,
            "async": bool(scheduler.async_scheduling),
        }
        from vllm.config import set_current_vllm_config
        from vllm.v1.worker.gpu.lora_utils import get_lora_capture_cases

        speculative = config.speculative_config
        found["method"] = speculative.method if speculative else None
        schedule = speculative.num_speculative_tokens_per_batch_size if speculative else None
        found["schedule"] = [list(entry) for entry in schedule] if schedule else None
        if config.use_v2_model_runner:
            found["lora_cases"] = get_lora_capture_cases(config.lora_config, compilation)
        else:
            found["lora_cases"] = self._legacy_lora_cases(config)
        with set_current_vllm_config(config):
            self._resolve(config, found)
        found["sizes"] = list(compilation.cudagraph_capture_sizes)
        found["max_size"] = compilation.max_cudagraph_capture_size
        return found

    @staticmethod
    def _legacy_lora_cases(config: Any) -> list[int]:
        """Ask the legacy dispatcher which adapter counts it captures for."""
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

        lora = config.lora_config
        read = SimpleNamespace(
            vllm_config=config,
            compilation_config=config.compilation_config,
            specialize_lora_count=False if lora is None else lora.specialize_active_lora,
        )
        return list(CudagraphDispatcher._get_lora_cases(read))

    @staticmethod
    def _legacy_draft_modes(config: Any, mode: Any) -> list[list[Any]]:
        """Have a drafter of model runner V1 make its keys; return the mode that it makes them for."""
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        speculative = config.speculative_config
        if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
            return []
        asked: list[Any] = []
        dispatcher = SimpleNamespace(initialize_cudagraph_keys=asked.append)
        read = SimpleNamespace(speculative_config=speculative, cudagraph_dispatcher=dispatcher)
        SpecDecodeBaseProposer.initialize_cudagraph_keys(read, mode)
        return [[0, asked[0].name]]

    def _draft_group(self, config: Any) -> Any:
        from vllm.config import set_current_vllm_config

        speculative = config.speculative_config
        independent = speculative.uses_draft_model()
        read = SimpleNamespace(
            speculative_config=speculative,
            vllm_config=config,
            draft_model_config=speculative.draft_model_config,
        )
        if not config.use_v2_model_runner:
            from vllm.v1.spec_decode import draft_model, llm_base_proposer

            kind = draft_model.DraftModelProposer if independent else llm_base_proposer.SpecDecodeBaseProposer
            with parts.super_of(kind, read) as self_:
                draft = kind._create_draft_vllm_config(self_)
        elif independent:
            from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone

            standalone.get_model = lambda vllm_config, **options: vllm_config
            draft = standalone.StandaloneARSpeculator.load_draft_model(read, None, set())
        elif speculative.use_dflash():
            draft = parts.dflash_configuration(config)
        else:
            draft = speculative.apply_draft_overrides(config)
        # The loaders take the draft's model beside the configuration.
        draft = copy.copy(draft)
        draft.model_config = speculative.draft_model_config
        with set_current_vllm_config(draft):
            return self._group(draft, "draft")

    def _group(self, config: Any, layer: str) -> Any:
        """Return the attention group of one layer, with the engine's backend and builder."""
        from vllm.model_executor.layers.attention.chunked_local_attention import (
            create_chunked_local_attention_backend,
        )
        from vllm.v1.attention.selector import get_attn_backend
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

        model, cache = config.model_config, config.cache_config
        # As the layers do it when they are made.
        scheme = getattr(config.quant_config, "kv_cache_scheme", None)
        if scheme is not None and cache.cache_dtype == "auto" and not model.use_mla:
            cache.cache_dtype = "fp8"
        options = {"num_heads": model.get_num_attention_heads(config.parallel_config)}
        if not model.use_mla:
            options = {
                "has_sink": model.architecture == "GptOssForCausalLM",
                "use_mm_prefix": model.is_mm_prefix_lm,
                "has_sliding_window": model.get_sliding_window() is not None,
                "use_per_head_quant_scales": scheme is not None and scheme.get("strategy") == "attn_head",
            }
        backend = get_attn_backend(
            model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=model.use_mla, **options
        )
        builder = backend.get_builder_cls()
        if builder.__module__ == self._flash_attn.__name__:
            # The class asks when its module is imported; here, one import serves many machines.
            builder._cudagraph_support = eval(
                self._support, {**vars(self._flash_attn), **vars(self._fa_utils)}
            )
        chunk = model.attention_chunk_size
        if chunk is not None:
            builder = create_chunked_local_attention_backend(backend, chunk).get_builder_cls()
        kv_heads = model.get_num_kv_heads(config.parallel_config)
        kind = MLAAttentionSpec if model.use_mla else FullAttentionSpec
        spec = kind(
            block_size=16,
            num_kv_heads=kv_heads,
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
        )
        return parts.group(backend, builder, spec, layer)

    def _resolve(self, config: Any, found: dict[str, Any]) -> None:
        from vllm.platforms import current_platform

        # The worker asks when it starts.
        current_platform.check_if_supports_dtype(config.model_config.dtype)
        target = self._group(config, "target")
        groups = [[target, *parts.recurrent_groups(config)]]
        speculative = config.speculative_config
        drafts = speculative is not None and speculative.uses_draft_kv_cache()
        if drafts:
            groups.append([self._draft_group(config)])
        found["backend"] = target.backend.get_name()
        support = self._attn_utils.get_attn_cg_support(groups, config)
        found["support"] = support.min_cg_support.name
        piecewise = bool(os.environ.get(BREAKABLE) == "1" or int(config.compilation_config.mode) == 3)
        found["varlen"] = self._adapts(config, groups, piecewise) if drafts else False
        if speculative is not None and speculative.num_speculative_tokens_per_batch_size is not None:
            from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

            # The scheduler and the graph managers build it at their start.
            build_dynamic_sd_schedule_lookup(
                speculative.num_speculative_tokens_per_batch_size,
                config.scheduler_config.max_num_seqs,
                config.num_speculative_tokens,
            )
        found["configured"] = config.compilation_config.cudagraph_mode.name
        mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(
            support.min_cg_support,
            support.min_cg_attn_backend,
            1 + config.num_speculative_tokens,
            use_v2_model_runner=config.use_v2_model_runner,
            max_num_reqs=config.scheduler_config.max_num_seqs,
            piecewise_capture_available=piecewise,
        )
        found["mode"] = mode.name
        if config.use_v2_model_runner:
            found["draft"] = self._draft_modes(config, groups, mode)
        else:
            found["draft"] = self._legacy_draft_modes(config, mode)

    def _adapts(self, config: Any, groups: Any, piecewise: bool) -> bool:
        """Run the engine's own checks of adaptive verification, and its choice of the mode."""
        from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

        if not config.speculative_config.enable_adaptive_verification:
            return False
        adaptive.AdaptiveVerificationManager = lambda *parts, **options: True
        made = adaptive.maybe_create_adaptive_verification_manager(
            enable_adaptive_verification=True,
            attn_groups=groups,
            req_states=SimpleNamespace(num_speculative_steps=config.num_speculative_tokens),
            query_start_loc=None,
            num_bonus_tokens=1,
            max_total_logits=0,
            vllm_config=config,
            target_layer_names={"target", "recurrent"},
        )
        compilation = config.compilation_config
        compilation.cudagraph_mode = adaptive.resolve_adaptive_cudagraph_mode(
            compilation.cudagraph_mode, piecewise_capture_available=piecewise
        )
        return bool(made)

    def _give_support(self, speculator: Any, config: Any, groups: Any) -> None:
        """Give a DFlash speculator what its ``__init__`` and ``set_attn`` find out."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

        speculator.vllm_config = parts.without_context(config)
        speculator.num_query_per_req = 1 + config.num_speculative_tokens
        draft = config.speculative_config.draft_model_config.hf_config
        speculator.requires_non_causal = dflash_has_any_non_causal(draft)
        own = speculator.attn_vllm_config
        with set_current_vllm_config(own):
            speculator.attn_cg_support = self._attn_utils.get_attn_cg_support(groups, own)

    def _draft_modes(self, config: Any, groups: Any, mode: Any) -> list[list[Any]]:
        """Return (query length, mode) of the managers that the engine's speculator makes, in its order."""
        from vllm.v1.worker.gpu.spec_decode import init_speculator
        from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
        from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as modules
        from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as chain

        if config.speculative_config is None:
            return []
        made: list[list[Any]] = []

        def manager(vllm_config: Any, device: Any, mode: Any, decode_query_len: int) -> None:
            made.append([decode_query_len, mode.name])

        dflash.DFlashCudaGraphManager = chain.SpeculatorCudaGraphManager = modules.SpeculatorCudaGraphManager = manager
        for kind in (DraftModelSpeculator, ngram.NgramGPUSpeculator, *parts.subclasses(DraftModelSpeculator)):
            if "__init__" in vars(kind):
                kind.__init__ = parts.unmade
        speculator = init_speculator(config, None, None)
        speculator.vllm_config, speculator.device = config, None
        speculator.num_speculative_steps = config.num_speculative_tokens
        if config.speculative_config.use_dflash():
            self._give_support(speculator, config, groups[1:])
        speculator.init_cudagraph_manager(mode)
        return made
