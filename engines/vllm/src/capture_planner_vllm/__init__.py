"""vLLM 0.33 for capture-planner: the emulation (``engine``), a plugin for vLLM itself (``vllm_plugin``), and vLLM's
attention backends for the runner and the conformance suite (``attention_backend``).

Importing this package imports none of them: vLLM imports it in every process, for the plugin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from capture_planner.engines.engine import Engine
    from capture_planner.plugins.backend import Backend


@pluggy.HookimplMarker("capture_planner")
def capture_planner_engines() -> Iterable[Engine]:
    """Return the one engine of this distribution."""
    from capture_planner_vllm.emulation.engine import ENGINE

    return (ENGINE,)


@pluggy.HookimplMarker("capture_planner")
def capture_planner_backends() -> Iterable[Backend]:
    """Return vLLM's FLASH_ATTN and TRITON_ATTN."""
    from capture_planner_vllm.attention.backend import VllmAttention

    return (VllmAttention("FLASH_ATTN"), VllmAttention("TRITON_ATTN"))
