"""Flags and models that vLLM accepts and that affect its graphs, but are not emulated: always an error."""

from __future__ import annotations

import re

from capture_planner.engines.engine import OTHER_DEVICE
from capture_planner.errors import NotEmulated
from capture_planner_vllm.emulation.flags import CommandLine
from capture_planner_vllm.emulation.model import ModelFacts, overrides
from capture_planner_vllm.emulation.refusals import not_emulated
from capture_planner_vllm.emulation.tables import rules

REGISTERED = "the class that vllm/model_executor/models/registry.py names"
OTHERS_BACKENDS = re.compile("ROCM_|XPU_|CPU_|AMX_")
_FOREIGN = re.compile(r"\b(?:torchair|ascend)\w*")
"""Settings of vLLM's plugins for other devices."""


def sign_of_other_device(line: CommandLine, backend: str | None) -> str:
    """Return the word of a line that is for a device that is not NVIDIA's; empty without one."""
    setting = _FOREIGN.search(str(line.get("additional_config") or ""))
    named = backend if backend is not None and OTHERS_BACKENDS.match(backend) else ""
    return line.variables.get(OTHER_DEVICE) or named or (setting[0] if setting else "")


def check_emulated(line: CommandLine, model: ModelFacts) -> None:
    """Raise ``NotEmulated`` for a flag or part with a value that ``rules.json`` lacks, or for such a model."""
    # Each has the values that change nothing, the default first.
    for name, harmless in rules()["unemulated_flags"].items():
        if line.get(name, harmless[0]) not in harmless:
            raise _error(name)
    if line.get("disable_sliding_window") and not (model.recurrent and model.window is None):
        raise _error("disable_sliding_window")  # where there is one it bounds the length
    if line.get("all2all_backend") == "moonep":
        raise _error("all2all_backend")
    for name, parts in rules()["unemulated_parts"].items():
        value = line.get(name)
        for part, harmless in parts.items():
            if isinstance(value, dict) and value.get(part) not in harmless:
                raise _error(name, part)
    if overrides(line.get("hf_overrides")) is None and model.known:
        raise _error("hf_overrides", remedy="write the values into the model's config.json")
    if line.get("runner") == "generate" and line.get("convert", "auto") not in ("auto", "none"):
        raise _error("convert")
    if model.odd is not None and not model.decodes:
        raise not_emulated("--model", f"{model.name} has {model.odd}", "name another model", place=REGISTERED)


def _error(name: str, *inside: str, remedy: str = "leave it out") -> NotEmulated:
    place = rules()["places"].get((name, *inside)[-1], "vllm/config/vllm.py")
    return not_emulated(f"--{name.replace('_', '-')}", "", remedy, *inside, place=place)
