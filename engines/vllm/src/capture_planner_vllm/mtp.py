"""The modules for multi-token prediction that vLLM 0.33 finds in a model, by its type and architecture.

vLLM rewrites the configuration of every draft model before it looks at the method; what is rewritten to a type
of module is drafted with by MTP, whatever keys the file has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capture_planner_vllm.parts import names

_COUNT = "num_nextn_predict_layers"
_BY_ARCHITECTURE = {
    "MiMoForCausalLM": "MiMoMTPModel",
    "Glm4MoeForCausalLM": "Glm4MoeMTPModel",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteMTPModel",
}
_BY_TYPE = {
    "deepseek_v3": "DeepSeekMTPModel",
    "deepseek_mtp": "DeepSeekMTPModel",
    "pangu_ultra_moe": "OpenPanguMTPModel",
    "pangu_ultra_moe_mtp": "OpenPanguMTPModel",
    "ernie4_5_moe": "ErnieMTPModel",
    "ernie_mtp": "ErnieMTPModel",
    "qwen3_next": "Qwen3NextMTP",
    "qwen3_next_mtp": "Qwen3NextMTP",
    "exaone_moe": "ExaoneMoeMTP",
    "exaone_moe_mtp": "ExaoneMoeMTP",
    "hy_v3": "HYV3MTPModel",
}
_QWEN35 = {
    "qwen3_5": "Qwen3_5MTP",
    "qwen3_5_text": "Qwen3_5MTP",
    "qwen3_5_moe": "Qwen3_5MoeMTP",
    "qwen3_5_moe_text": "Qwen3_5MoeMTP",
}
_OTHERS = (
    *("deepseek_v32", "glm_moe_dsa", "deepseek_v4", "deepseek_v41", "dots3_note", "kimi_k3", "nemotron_h"),
    *("nemotron_h_puzzle", "qwen4_exp", "qwen4_exp_text", "bailing_hybrid", "exaone4_5", "exaone4_5_text"),
    *("intern_s2_preview", "interns2_mobius", "longcat_flash", "step3p5", "step3p7", "step5", "step5_vl"),
    *("hy_v4", "inkling_mm_model", "inkling_model", "gemma4_assistant", "gemma4_unified_assistant"),
    *("minimax_m3_vl", "glm5_next"),
)
_OTHER_ARCHITECTURES = (
    *("RadioMBartPrefixForCausalLM", "MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM", "MiMoV2FlashForCausalLM"),
    *("GlmOcrForConditionalGeneration", "NemotronH_Super_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3"),
    *("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration", "BailingMoeV2_5ForCausalLM"),
    *("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "Step5ForCausalLM"),
    *("Step5ForConditionalGeneration", "MistralLarge3ForCausalLM"),
    *("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3MTP"),
)


@attrs.frozen(kw_only=True)
class Modules:
    """The module that a model is rewritten to as a draft."""

    architecture: str = ""
    count: int | None = None
    """As the file has it; the number of drafted tokens is a multiple where it is larger."""
    stages: int = 1
    """How many of them draft one position each: what says so is another key for Qwen 3.5."""
    followed: bool = True
    """Whether the rewriting is emulated."""


def modules(config: Mapping[str, Any], text: Mapping[str, Any]) -> Modules | None:
    """Return the module for multi-token prediction of a model's configuration, or None where it has none."""
    architecture = str((config.get("architectures") or [""])[0])
    kind = str(config.get("model_type") or "")
    if kind in _QWEN35:
        key = "mtp_num_hidden_layers"
        count = config.get(key) if config.get(key) is not None else text.get(key)
        return Modules(architecture=_QWEN35[kind], count=_whole(count), stages=int(config.get(_COUNT) or 1))
    found = _BY_ARCHITECTURE.get(architecture) or _BY_TYPE.get(kind)
    if kind in _OTHERS or architecture in _OTHER_ARCHITECTURES:
        return Modules(followed=False)
    if found is not None:
        count = _whole(config.get(_COUNT))
        return Modules(architecture=found, count=count, stages=1 if count is None else count)
    return Modules(followed=False) if kind in names()["mtp_types"] else None


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
