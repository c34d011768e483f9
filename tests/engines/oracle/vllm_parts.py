"""What stands in for the parts of vLLM that need a device or a model's own code."""

from __future__ import annotations

import ast
import contextlib
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


def import_speculators() -> None:
    """Import what the engine would import late: once, and without a device."""
    import torch

    empty = torch.empty
    torch.empty = lambda *size, device=None, **options: empty(*size, device="meta", **options)
    try:
        importlib.import_module("vllm.v1.attention.backends.mla.cutlass_mla")
    finally:
        torch.empty = empty
    for name in ("eagle", "mtp", "gemma4", "multi_module_mtp", "standalone_ar", "ngram"):
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


def model_info(registry: Any) -> Any:
    """Return what the engine learns by importing a model's class: here, a plain decoder."""
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

    def inspect(model: Any) -> Any:
        names = [field.name for field in dataclasses.fields(registry._ModelInfo)]
        values = {name: decoder.get(name, False) for name in names}
        pooling = "Embedding" in model.class_name or "Bert" in model.class_name
        return registry._ModelInfo(
            **{**values, "architecture": model.class_name, "is_pooling_model": pooling}
        )

    return inspect
