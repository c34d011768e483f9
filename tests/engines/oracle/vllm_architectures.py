"""What vLLM's model classes say of themselves, by architecture, and which of them have attention of their own."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from support.files import module_at

_SPARSE = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
_PLAIN = ("GptOssForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration", "NemotronH", "Qwen3_5", *_SPARSE)
"""Of the architectures with a hook of their own, those whose hook changes no graph, or is emulated."""
_ODD = re.compile(r"attn_backend=|StaticSinkAttention|CrossAttention\(|EncoderDecoder")
_CHOSEN_BY_LAYERS = ("MiMoV2FlashForCausalLM",)
"""Of the architectures whose layers name their backend, those whose choice is emulated."""
_HEADS_OF_THEIR_OWN = ("Zamba2ForCausalLM",)
_ENCODER_DECODERS = ("WhisperForConditionalGeneration",)
_SINKS = re.compile(r"sinks=self\.sinks")
_GROUPS = ("_TEXT_GENERATION_MODELS", "_EMBEDDING_MODELS", "_MULTIMODAL_MODELS")


def stand_in(stubs: ModuleType) -> None:
    """Answer for torchvision, which models import and nothing here runs."""
    for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional", ".io"):
        name = f"torchvision{part}"
        if name not in sys.modules:
            found = stubs.StubModule(name)
            found.__path__ = []
            found.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = found


def model_class(module: str, name: str) -> Any:
    """Import a model's class from the wheel."""
    path = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
    return getattr(importlib.import_module(path), name)


def require(registry: Any, wanted: Iterable[str]) -> None:
    """Import the classes of architectures; raises ``ImportError``, as nothing may stand in for one of them."""
    for name in wanted:
        model_class(*registry._VLLM_MODELS[name])


def architectures(wheel: Path) -> dict[str, list[str]]:
    """Return the architectures that are decoders, with and without recurrent layers or further inputs."""
    import vllm.config.vllm as config
    import vllm.model_executor.models.registry as registry
    from vllm.model_executor.models import interfaces
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    stand_in(module_at(Path(__file__).with_name("stubs.py")))
    found: dict[str, list[str]] = {"decoders": [], "hybrids": [], "multimodal": [], "sinks": []}
    found |= {"no_pipeline": [], "no_lora": []}
    for group in _GROUPS:
        for architecture, (module, name) in getattr(registry, group).items():
            hooked = architecture in MODELS_CONFIG_MAP and not architecture.startswith(_PLAIN)
            breakable = architecture in config.DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES
            if hooked or (breakable and architecture not in _SPARSE):
                continue
            try:
                kind = model_class(module, name)
            except (ImportError, AssertionError):
                continue
            info = registry._ModelInfo.from_model_cls(kind)
            source = Path(sys.modules[kind.__module__].__file__ or "").read_text()
            odd = _ODD.search(source) or architecture in _HEADS_OF_THEIR_OWN
            odd = odd or info.is_attention_free or info.has_noops or info.is_pooling_model
            odd = odd or info.supports_transcription_only or not info.is_text_generation_model
            if odd and architecture not in (*_ENCODER_DECODERS, *_CHOSEN_BY_LAYERS):
                continue
            if not info.supports_pp:
                found["no_pipeline"].append(architecture)
            if not interfaces.supports_lora(kind):
                found["no_lora"].append(architecture)
            if info.supports_multimodal:
                found["multimodal"].append(architecture)
            if info.is_hybrid:
                found["hybrids"].append(architecture)
            if not info.supports_multimodal and not info.is_hybrid:
                found["decoders"].append(architecture)
            if _SINKS.search(source):
                found["sinks"].append(architecture)
    return {**{name: sorted(set(values)) for name, values in found.items()}, **_types(wheel)}


def _types(wheel: Path) -> dict[str, list[str]]:
    """Return the model types that vLLM lists within its functions: MLA, and prompts seen in both directions."""
    path = wheel / "vllm" / "transformers_utils" / "model_arch_config_convertor.py"
    tree = ast.parse(path.read_text())
    owner = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelArchConfigConvertorBase"
    )
    functions = {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}

    def first_tuple(name: str) -> list[str]:
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Tuple) and len(node.elts) > 3:
                return [str(ast.literal_eval(item)) for item in node.elts]
        raise LookupError(name)

    return {"mla_types": first_tuple("is_deepseek_mla"), "prefix_types": first_tuple("is_mm_prefix_lm")}
