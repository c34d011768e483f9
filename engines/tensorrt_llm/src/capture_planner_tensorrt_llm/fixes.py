"""How to fix the findings of ``check`` with the options of ``trtllm-serve``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import yaml

from capture_planner.engines.deployments import Run
from capture_planner.engines.emulation import Emulation, Emulator
from capture_planner.engines.engine import Fixes, FlagChange, adding
from capture_planner.modes import Role
from capture_planner.records.environment import Environment
from capture_planner_tensorrt_llm.flags import options_of, read_flags, replacing
from capture_planner_tensorrt_llm.values import Problems

_CONFIG = "cuda_graph_config"


class TensorRTLLMFixes(Fixes):
    """Fixes by ``cuda_graph_config``; sizes are requests."""

    general: ClassVar = {
        "EN001": "raise cuda_graph_config.max_batch_size to max_batch_size, or list it in batch_sizes",
        "EN002": "set cuda_graph_config.enable_padding: true",
        "EN003": "list in cuda_graph_config.batch_sizes only sizes up to max_batch_size",
        "EN004": "give cuda_graph_config.batch_sizes that max_num_tokens admits",
        "EN005": "remove the option that rules it out",
        "EN006": "add sizes between to cuda_graph_config.batch_sizes",
        "EN007": "nothing to do: no graph depends on the model",
        "EN008": "nothing to do: no batch is split here",
        "EN009": "nothing to do: no graph of an encoder is emulated",
    }

    def changes(self, code: str, emulation: Emulation, role: Role, runs: Sequence[Run]) -> Iterator[FlagChange]:
        sizes, listed = set(emulation.sizes), bool(emulation.asked_sizes)
        if code == "EN001":
            most, covered = max(run.last for run in runs), min(run.first for run in runs) - 1
            # A list decides its own maximum.
            if not listed:
                yield _config(emulation, max_batch_size=most)
            yield _config(emulation, batch_sizes=sorted({*sizes, most}))
            yield _config(emulation, batch_sizes=sorted({*sizes, *(n for run in runs for n in (run.first, run.last))}))
            if covered:
                yield FlagChange.of("--max_batch_size", covered, instead=True)
        elif code == "EN002":
            yield _config(emulation, enable_padding=True)
        elif code in ("EN003", "EN004") and sizes:
            yield _config(emulation, batch_sizes=sorted(sizes))
            yield _config(emulation, batch_sizes=sorted(n for n in sizes if n <= emulation.limits.max_num_reqs))
        elif code == "EN005":
            # Too few tokens for one decode leave no size; this is the default.
            yield FlagChange.of("--max_num_tokens", 8192)
            yield FlagChange(((_CONFIG, ("null",)),), instead=True)
        elif code == "EN006":
            yield _config(emulation, batch_sizes=sorted({*sizes, *(n for run in runs for n in run.sizes_between(1))}))

    def after(self, emulate: Emulator, command: Sequence[str], change: FlagChange, machine: Environment) -> Emulation:
        flags = tuple((name, values) for name, values in change.flags if name.startswith("-"))
        # Options that are keys of the file alone: the file is read as if it had them.
        keys = {name: yaml.safe_load(values[0]) for name, values in change.flags if not name.startswith("-")}
        with replacing(keys):
            return emulate(self.applied(command, FlagChange(flags)), machine)

    def advice(self, code: str, emulation: Emulation, role: Role, about: Any) -> str:
        if code == "EN001":
            requests = max(run.last for run in about)
            if emulation.asked_sizes:
                return adding([requests], "cuda_graph_config.batch_sizes")
            return f"raise cuda_graph_config.max_batch_size to {requests}"
        if code == "EN003":
            return "nothing to do: the schedule of draft lengths adds them"
        if code == "EN004":
            limit, most = emulation.limits.max_num_reqs, max(about)
            return f"remove them, or raise max_batch_size from {limit} to {most}" if most > limit else ""
        if code == "EN006":
            return adding(about[0].sizes_between(1), "cuda_graph_config.batch_sizes")
        return ""


def _config(emulation: Emulation, **keys: Any) -> FlagChange:
    """Return the change to a ``cuda_graph_config`` with other keys; sizes and their maximum replace each other."""
    present = dict(options_of(read_flags(emulation.command, Problems()), Problems()).get(_CONFIG) or {})
    if {"batch_sizes", "max_batch_size"} & set(keys):
        present = {name: value for name, value in present.items() if name not in ("batch_sizes", "max_batch_size")}
    return FlagChange(((_CONFIG, (json.dumps({**present, **keys}),)),))
