"""Record which architectures SGLang's rules for graphs leave alone: run by hand, with the unpacked wheel's path.

    PYTHONPATH=tests python tests/engines/oracle/record_sglang_architectures.py FOLDER

Writes ``architectures.json`` of the distribution, the architectures by what is emulated of them, and
``tests/engines/golden/sglang_architectures.json``, what SGLang's own functions answer for each of them.

An architecture is followed where its class is a decoder of text, and where no module that graphs depend on names
it but for the reasons that are reviewed below. That the emulation then answers as SGLang does is a test.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from capture_planner_sglang.emulation import resolution
from capture_planner_sglang.emulation.families import ENCODER
from engines.generators import sglang as drawing
from engines.generators import sglang_answers as answers
from engines.generators.sglang_families import HYBRID, SPARSE, VISION
from support.files import module_at

_HERE = Path(__file__).parent
_DATA = Path(resolution.__file__).parent / "architectures.json"
_PLACES = (
    *("arg_groups", "configs/model_config.py", "server_args.py", "model_executor", "layers/attention"),
    *("managers", "mem_cache", "speculative"),
)
"""Where rules for graphs are, and what they depend on: attention, pages, pools, chunks."""

_REVIEWED = {
    "a draft's class, and the path of a draft that is part of the model": (
        "BailingMoeForCausalLM BailingMoeV2ForCausalLM Ernie4_5_MoeForCausalLM MiMoForCausalLM HYV3ForCausalLM "
        "Glm4MoeForCausalLM"
    ),
    "kernels of experts, and all-reduces": (
        "Cohere2MoeForCausalLM MiniMaxM2ForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM Qwen3ForCausalLM"
    ),
    "memory of sliding windows": "Gemma2ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM",
    "workspaces, weights loaded in the background, heads without a size, other devices": (
        "Qwen2ForCausalLM MistralForCausalLM MixtralForCausalLM BaichuanForCausalLM"
    ),
    "followed by a rule": "LlamaForCausalLM Grok1ForCausalLM GptOssForCausalLM",
}
_FAMILIES = (*VISION, *HYBRID, *SPARSE)
_LATENT_DRAFTS = ("DeepseekV3ForCausalLMNextN", "Glm4MoeLiteForCausalLMNextN", "Eagle3DeepseekV2ForCausalLM")
"""Architectures that are named there, by what they are named for, which no graph depends on."""
_TEXT = ("ForCausalLM", "LMHeadModel", "ChatGLMModel")
_DRAFTS = ("Assistant", "DFlash", "Eagle")


def followed(models: Any, architecture: str) -> bool:
    """Whether an architecture is a decoder of text that no rule touches, as far as the sources say."""
    reviewed = {name for names in _REVIEWED.values() for name in names.split()}
    if not architecture.endswith(_TEXT) or any(word in architecture for word in _DRAFTS):
        return False
    source = models.entries[architecture].read_text(encoding="utf-8")
    # A model of diffusion decodes blocks, with attention to both sides.
    if "ENCODER_ONLY" in source:
        return False
    if architecture not in reviewed and models.naming(architecture, _PLACES):
        return False
    skeleton = models.skeleton(architecture)
    if hasattr(skeleton, "language_model"):
        return False
    model = getattr(skeleton, "model", None) or getattr(skeleton, "transformer", None)
    layers = getattr(model, "layers", None)
    # What has no layers where SGLang looks has no prefill graphs; what has some must have attention in all.
    return model is not None and hasattr(model, "__dict__") and (layers is None or _attends(layers))


def draft_of(own: Any, architecture: str) -> str:
    """Return the class that SGLang makes of a checkpoint as a draft."""
    kinds = types.SimpleNamespace(architectures=[architecture])
    config = types.SimpleNamespace(
        is_draft_model=True, hf_config=kinds, hf_text_config=kinds, speculative_algorithm="EAGLE"
    )
    with contextlib.suppress(AttributeError):
        own.m.configs.ModelConfig._config_draft_model(config)
    return str(config.hf_config.architectures[0])


def drafts_prefills(models: Any, architecture: str) -> bool:
    """Whether SGLang finds layers in a draft's class."""
    if architecture not in models.entries:
        return True
    skeleton = models.skeleton(architecture)
    model = getattr(skeleton, "model", None) or getattr(skeleton, "language_model", None)
    return hasattr(model, "layers") or hasattr(getattr(model, "model", None), "layers")


def _encodes(models: Any, source: str) -> bool:
    """Whether a class, or Qwen3-VL's encoder that it imports, captures its encoder where a variable says so."""
    vision = (models.folder / "models" / "qwen3_vl.py").read_text(encoding="utf-8")
    return ENCODER in source or ("models.qwen3_vl import" in source and ENCODER in vision)


def _attends(layers: list[Any]) -> bool:
    inner = [getattr(layer, "self_attn", None) or getattr(layer, "attention", None) for layer in layers]
    return bool(layers) and all(hasattr(part, "attn") for part in inner)


def main() -> None:
    own = module_at(_HERE / "sglang.py").Sglang(Path(sys.argv[1]))
    models = own.models
    distinct: dict[str, int] = {}
    golden: dict[str, list[int]] = {}
    found: dict[str, list[str]] = {"followed": [], "without_prefill_graphs": [], "not_followed": []}
    found |= {"latent": sorted([*drawing.LATENT, *SPARSE, *_LATENT_DRAFTS]), "drafts_without_prefill_graphs": []}
    found |= {"sparse": sorted(SPARSE), "hybrid": sorted(HYBRID)}
    found |= {"multimodal": [], "multimodal_prefill_graphs": [], "encoder_graphs": []}
    with tempfile.TemporaryDirectory() as folder:
        for architecture in sorted(models.entries):
            command = drawing.model_folder(Path(folder) / architecture, architecture, 8192)
            golden[architecture] = []
            for device, flags in drawing.PROBES:
                words = ["--model-path", command, *flags.replace("MODEL", command).split()]
                answer = own.ask(words, drawing.environment(device), [])
                kept: Any = "refused" if "refused" in answer else answers.shortened(answer)
                text = json.dumps(kept, separators=(",", ":"))
                golden[architecture].append(distinct.setdefault(text, len(distinct)))
            latent = architecture in drawing.LATENT
            drafts = any(word in architecture for word in ("NextN", "MTP", "Eagle3Deepseek"))
            family = latent or architecture in _FAMILIES
            known = family or followed(models, architecture)
            source = models.entries[architecture].read_text(encoding="utf-8")
            for kind, holds in (
                ("multimodal", known and own.m.configs.ModelConfig(command).is_multimodal),
                (
                    "multimodal_prefill_graphs",
                    known and own.m.configs.is_multimodal_breakable_cuda_graph_supported([architecture]),
                ),
                ("encoder_graphs", architecture in (*VISION, *HYBRID) and _encodes(models, source)),
            ):
                if holds:
                    found[kind].append(architecture)
            if (known or drafts) and not drafts_prefills(models, draft_of(own, architecture)):
                found["drafts_without_prefill_graphs"].append(architecture)
            if not known:
                found["not_followed"].append(architecture)
                continue
            found["followed"].append(architecture)
            if family:
                continue
            model = getattr(models.skeleton(architecture), "model", None)
            if not hasattr(model, "layers"):
                found["without_prefill_graphs"].append(architecture)
    names = found["not_followed"]
    places = {name: [str(place) for place in models.naming(name, _PLACES)] for name in names}
    kept = {**found, "decided_in": {name: each for name, each in places.items() if each}}
    _DATA.write_text(json.dumps(kept, indent=1) + "\n")
    rows = [f'"{name}":{json.dumps(kept, separators=(",", ":"))}' for name, kept in golden.items()]
    text = ",\n".join(distinct)
    joined = ",\n".join(rows)
    (_HERE.parent / "golden" / "sglang_architectures.json").write_text(
        f'{{"answers":[\n{text}\n],\n"architectures":{{\n{joined}\n}}}}\n'
    )
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in found.items())
    sys.stdout.write(f"{counts}; {len(distinct)} answers to {len(drawing.PROBES)} probes\n")


if __name__ == "__main__":
    main()
