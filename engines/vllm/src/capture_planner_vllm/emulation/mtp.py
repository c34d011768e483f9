"""The modules for multi-token prediction that vLLM 0.33 finds in a model, by its type and architecture.

vLLM rewrites the configuration of every draft model before it looks at the method; a draft that is
rewritten to such a module is used by method ``mtp``, whatever keys its file has. The tables are in
``rules.json`` (vllm/config/speculative.py, ``hf_config_override``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capture_planner_vllm.emulation.tables import names, rules

_COUNT = "num_nextn_predict_layers"


@attrs.frozen(kw_only=True)
class Modules:
    """The module that a model is rewritten to as a draft."""

    architecture: str = ""
    count: int | None = None
    """As the file has it; a larger number of draft tokens must be a multiple of it."""
    stages: int = 1
    """How many modules draft one position each; for Qwen 3.5 another key than ``count``'s says so."""
    emulated: bool = True


def modules(config: Mapping[str, Any], text: Mapping[str, Any]) -> Modules | None:
    """Return the module of a model's configuration and text configuration, or None where it has none."""
    architecture, kind = str((config.get("architectures") or [""])[0]), str(config.get("model_type") or "")
    if kind in rules()["mtp_qwen35"]:
        key = "mtp_num_hidden_layers"
        count = config.get(key) if config.get(key) is not None else text.get(key)
        stages = int(config.get(_COUNT) or 1)
        return Modules(architecture=rules()["mtp_qwen35"][kind], count=_integer(count), stages=stages)
    unemulated = kind in rules()["mtp_unemulated_types"]
    if unemulated or architecture in rules()["mtp_unemulated_architectures"]:
        return Modules(emulated=False)
    name = rules()["mtp_by_architecture"].get(architecture) or rules()["mtp_by_type"].get(kind)
    if name is not None:
        count = _integer(config.get(_COUNT))
        if kind == "nemotron_h" and count != 1:
            return Modules(emulated=False) if count else None
        return Modules(architecture=name, count=count, stages=1 if count is None else count)
    return Modules(emulated=False) if kind in names()["mtp_types"] else None


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)
