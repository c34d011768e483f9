"""What stands in for the parts of vLLM that need a device or a model's own code."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


@contextlib.contextmanager
def super_of(kind: type, parts: SimpleNamespace) -> Iterator[Any]:
    """Yield an object of ``kind`` that was never made, with the parts that its method reads."""
    found = object.__new__(kind)
    found.__dict__.update(vars(parts))
    yield found


def moved(*names: str) -> ModuleType:
    """Import a module that releases have in different places: the first of ``names`` that is there."""
    for name in names[:-1]:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])


def import_speculators() -> None:
    """Import what the engine would import late: once, and without a device."""
    import torch

    empty = torch.empty
    torch.empty = lambda *size, device=None, **options: empty(*size, device="meta", **options)
    try:
        importlib.import_module("vllm.v1.attention.backends.mla.cutlass_mla")
    finally:
        torch.empty = empty
    for name in ("eagle", "mtp", "gemma4", "multi_module_mtp", "standalone_ar", "ngram", "dflash", "dspark"):
        importlib.import_module(f"vllm.v1.worker.gpu.spec_decode.{name}.speculator")


def unmade(self: Any, *parts: Any, **options: Any) -> None:
    """Stand in for an ``__init__`` that allocates on a device."""


def subclasses(kind: type) -> list[type]:
    return [found for child in kind.__subclasses__() for found in (child, *subclasses(child))]


def flash_attention_support(module: ModuleType) -> Any:
    """Return the expression by which the engine's class sets its support level, compiled."""
    assert module.__file__ is not None
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.ClassDef) and node.name == "FlashAttentionMetadataBuilder":
            for item in node.body:
                if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "_cudagraph_support":
                    return compile(ast.Expression(item.value), module.__file__, "eval")
    raise LookupError("FlashAttentionMetadataBuilder._cudagraph_support")


def model_info(registry: Any, architectures: ModuleType) -> Any:
    """Return what the engine learns by importing a model's class; a plain decoder where none imports."""
    decoder = {
        "is_text_generation_model": True,
        "attn_type": "decoder",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "score_type": "bi-encoder",
        "supports_pp": True,
        "supports_lora": True,
        "supported_video_pruning_methods": (),
    }
    found: dict[str, Any] = {}

    def inspect(model: Any) -> Any:
        if model.class_name not in found:
            try:
                kind = architectures.model_class(model.module_name, model.class_name)
                found[model.class_name] = registry._ModelInfo.from_model_cls(kind)
            except (ImportError, AssertionError, AttributeError):
                names = [field.name for field in dataclasses.fields(registry._ModelInfo)]
                values = {name: decoder.get(name, False) for name in names}
                found[model.class_name] = registry._ModelInfo(**{**values, "architecture": model.class_name})
        return found[model.class_name]

    return inspect


def recurrent_groups(config: Any) -> list[Any]:
    """Return the groups of a hybrid model's recurrent layers, with the engine's builders."""
    if not config.model_config.is_hybrid:
        return []
    from vllm.v1.attention.backends import gdn_attn, mamba1_attn, mamba2_attn, short_conv_attn

    kinds = {
        "Qwen3": gdn_attn.GDNAttentionBackend,
        "OlmoHybrid": gdn_attn.GDNAttentionBackend,
        "Lfm2": short_conv_attn.ShortConvAttentionBackend,
        "Jamba": mamba1_attn.Mamba1AttentionBackend,
    }
    architecture = config.model_config.architecture
    found = [kind for name, kind in kinds.items() if architecture.startswith(name)]
    backend = found[0] if found else mamba2_attn.Mamba2AttentionBackend
    return [group(backend, backend.get_builder_cls(), None, "recurrent")]


def check_adapters(config: Any, architectures: ModuleType) -> None:
    """Raise where the model's class takes no adapters, as the worker does once it has loaded one."""
    import vllm.model_executor.models.registry as registry
    from vllm.model_executor.models import supports_lora

    name = config.model_config.architecture
    if config.lora_config is not None and name in registry._VLLM_MODELS:
        with contextlib.suppress(ImportError):
            if not supports_lora(architectures.model_class(*registry._VLLM_MODELS[name])):
                raise ValueError(f"{name} does not support LoRA yet.")


def is_sparse(config: Any) -> bool:
    """Say whether the layers attend to the tokens that an indexer chose."""
    return hasattr(config.model_config.hf_text_config, "index_topk")


def indexer_groups(config: Any) -> list[Any]:
    """Return the group of a sparse model's indexers, with the engine's builder."""
    if not is_sparse(config):
        return []
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend as Backend

    return [group(Backend, Backend.get_builder_cls(), None, "indexer")]


def backend_of_layer(config: Any) -> Any:
    """Return the backend that MiMo-V2's layers name, as ``MiMoV2Attention.__init__`` does; None for other models."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    text, asked = config.model_config.hf_text_config, config.attention_config.backend
    sizes = (getattr(text, "head_dim", 0), getattr(text, "v_head_dim", 0))
    if not config.model_config.architecture.startswith("MiMoV2") or sizes[0] == sizes[1]:
        return None
    if asked is not None and asked.name.endswith("_DIFFKV"):
        return asked.get_class()
    found = AttentionBackendEnum.FLASH_ATTN_DIFFKV.get_class()
    fits = found.is_supported_on_current_device(head_size=sizes[0], head_size_v=sizes[1], has_sinks=False)
    return found if fits else AttentionBackendEnum.TRITON_ATTN_DIFFKV.get_class()


def group(backend: Any, builder: Any, spec: Any, layer: str) -> Any:
    """Return a stand-in for an attention group of one layer."""
    return SimpleNamespace(
        layer_names=[layer], backend=backend, kv_cache_spec=spec, get_metadata_builder=lambda index: builder
    )


class ModelLoad(Exception):
    """Raised where a model would be loaded; has the configuration that it would be loaded with."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def without_context(config: Any) -> Any:
    """Return the configuration that a DFlash speculator works with, as its ``__init__`` makes it."""
    from vllm.config import replace

    found = copy.copy(config)
    mla = config.speculative_config.draft_model_config.use_mla
    parallel = config.parallel_config
    found.parallel_config = replace(
        parallel,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=parallel.decode_context_parallel_size if mla else 1,
    )
    return found


def parallel_configuration(config: Any) -> Any:
    """Let the engine load a DFlash or DSpark draft, and return the configuration that it loads it with."""
    import vllm.model_executor.model_loader as loader
    from vllm.v1.worker.gpu.spec_decode.dflash import utils as dflash
    from vllm.v1.worker.gpu.spec_decode.dspark import utils as dspark

    def load(vllm_config: Any, **options: Any) -> Any:
        raise ModelLoad(vllm_config)

    is_dspark = config.speculative_config.use_dspark()
    dflash.get_model = loader.get_model = load
    # Asks for the pipeline's ranks, which there are none of.
    dflash.get_pp_safe_draft_load_config = dspark.get_pp_safe_draft_load_config = lambda loading: loading
    try:
        (dspark.load_dspark_model if is_dspark else dflash.load_dflash_model)(None, without_context(config))
    except ModelLoad as loaded:
        return loaded.config
    raise LookupError("nothing is loaded")
