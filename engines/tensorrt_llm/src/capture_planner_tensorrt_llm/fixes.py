"""How to fix the findings of ``check`` with the options of ``trtllm-serve``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Fixes
from capture_planner.engines.walk import Run
from capture_planner.modes import Role


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

    def uncovered(self, emulation: Emulation, runs: Sequence[Run]) -> str:
        requests = max(run.last for run in runs)
        if emulation.asked_sizes:
            return f"add {requests} to cuda_graph_config.batch_sizes, and keep the others"
        return f"raise cuda_graph_config.max_batch_size to {requests}"

    def unreached(self, emulation: Emulation, role: Role) -> str:
        return "nothing to do: the schedule of draft lengths adds them"

    def dropped(self, emulation: Emulation, sizes: Sequence[int]) -> str:
        limit, most = emulation.limits.max_num_reqs, max(sizes)
        return f"remove them, or raise max_batch_size from {limit} to {most}" if most > limit else ""

    def padded(self, emulation: Emulation, run: Run) -> str:
        sizes = " ".join(map(str, run.sizes_between(1)))
        return f"add {sizes} to cuda_graph_config.batch_sizes, and keep the others"
