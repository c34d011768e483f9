"""vLLM's own way from a command line to the settings of its graph managers, run without a GPU.

What runs is the engine's code: its argument parser, ``AsyncEngineArgs.create_engine_config`` with all of
``VllmConfig.__post_init__``, the choice of the attention backend, each builder's graph support,
``get_attn_cg_support`` and ``resolve_cudagraph_mode_and_sizes``. Ours are the machine (capability, memory,
name, number of devices) and what vLLM would learn by importing a model's class.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from capture_planner.records.environment import Environment
from engines.generators.vllm_models import MODELS
from support.files import module_at

_HERE = Path(__file__).parent

stubs, parts = module_at(_HERE / "stubs.py"), module_at(_HERE / "vllm_parts.py")
architectures, groups_ = module_at(_HERE / "vllm_architectures.py"), module_at(_HERE / "vllm_groups.py")
vllm_encoders = module_at(_HERE / "vllm_encoders.py")

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
class EngineRefusal:
    """The engine's error, as it was raised."""

    kind: str
    reason: str


class VllmOracle(groups_.Groups):  # type: ignore[misc,name-defined]
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
        self._provide_triton()
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
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.attention.backends import fa_utils, flash_attn, flashinfer
        from vllm.v1.worker.gpu import attn_utils

        for module in (vllm.utils.flashinfer, flashinfer):
            if hasattr(module, "has_nvidia_artifactory"):
                module.has_nvidia_artifactory = lambda: True
        # Packages of the release's image.
        vllm.utils.flashinfer.has_flashinfer = lambda: True
        for name in ("has_flashinfer_sm90_nope_mla", "has_flashinfer_sparse_mla_sm120"):
            if hasattr(vllm.utils.flashinfer, name):
                setattr(vllm.utils.flashinfer, name, lambda: True)
        architectures.stand_in(stubs)
        architectures.require(registry, [name for each in MODELS.values() for name in each["architectures"]])
        registry._LazyRegisteredModel.inspect_model_cls = parts.model_info(registry, architectures)
        parser = FlexibleArgumentParser(prog="vllm")
        commands = parser.add_subparsers(dest="subparser")
        serve = parts.moved("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
        self.serve = serve.make_arg_parser(commands.add_parser("serve"))
        self.parser, self._args, self._context = parser, arg_utils.AsyncEngineArgs, UsageContext
        self._config, self._flash_attn, self._fa_utils = config, flash_attn, fa_utils
        self._attn_utils = attn_utils
        parts.import_speculators()
        import vllm.config.speculative as speculative

        # A package beside vLLM; its decoding has no graphs.
        speculative.has_arctic_inference = lambda: True
        self._support = parts.flash_attention_support(flash_attn)

    def _provide_triton(self) -> None:
        """Answer imports of Triton: here none of its kernels runs."""
        triton = stubs.StubModule("triton")
        triton.__version__ = "3.6.0"
        stubs.provide("vllm.triton_utils", HAS_TRITON=True, triton=triton)

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
    ) -> dict[str, Any] | EngineRefusal:
        """Return what the engine ends up with, as plain data, or its refusal."""
        with self._on(environment, variables or {}), stubs.installed(self._wheel, "vllm"):
            errors = io.StringIO()
            try:
                with contextlib.redirect_stderr(errors):
                    return self._answer(command)
            except SystemExit:
                return EngineRefusal("SystemExit", errors.getvalue().partition("error: ")[2].strip())
            except Exception as error:
                return EngineRefusal(type(error).__name__, str(error))

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
        ranks = config.parallel_config
        if ranks.use_ubatching and ranks.data_parallel_size > 1:
            thresholds = (ranks.dbo_decode_token_threshold, ranks.dbo_prefill_token_threshold)
            found["overlap"] = [ranks.num_ubatches, *thresholds]
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
        encoder = vllm_encoders.budgets(config, found["mode"])
        return found if encoder is None else found | {"encoder": encoder}

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

    def _resolve(self, config: Any, found: dict[str, Any]) -> None:
        from vllm.platforms import current_platform

        # The worker asks when it starts.
        current_platform.check_if_supports_dtype(config.model_config.dtype)
        parts.check_adapters(config, architectures)
        target = self._group(config, "target")
        groups = [[target, *parts.recurrent_groups(config), *parts.indexer_groups(config)]]
        if config.model_config.is_encoder_decoder:
            groups[0].append(self._group(config, "cross", "encoder_decoder"))
        speculative = config.speculative_config
        drafts = speculative is not None and speculative.uses_draft_kv_cache()
        if drafts:
            draft = self._draft_group(config)
            groups.append([draft, *(parts.indexer_groups(config) if draft.backend.is_sparse() else [])])
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
        if not config.use_v2_model_runner:
            from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

            # The runner makes it when it starts, and its keys once the mode is resolved.
            dispatcher = CudagraphDispatcher(config)
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
            dispatcher.initialize_cudagraph_keys(mode, 1 + config.num_speculative_tokens)
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
            target_layer_names={"target", "recurrent", "indexer"},
        )
        compilation = config.compilation_config
        compilation.cudagraph_mode = adaptive.resolve_adaptive_cudagraph_mode(
            compilation.cudagraph_mode, piecewise_capture_available=piecewise
        )
        return bool(made)
