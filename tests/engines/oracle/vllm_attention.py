"""vLLM's FLASH_ATTN and TRITON_ATTN from an unpacked wheel on a CPU, for recorded graphs.

vLLM's configuration, layers, metadata builders and implementations run as they are. Triton's kernels are interpreted.
Of FlashAttention, which is compiled, two functions are stand-ins (``support.recorded_kernels``): the schedule is made
ahead of the call, from the lengths at that time, and the output has the rows of requests only.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from capture_planner.modes import GraphSupport, Role
from capture_planner.records.backend import Attention, Support
from capture_planner.records.environment import Environment
from capture_planner_vllm.attention.backend import VllmAttention
from support.files import module_at
from support.recorded_kernels import recorded, schedule, varlen_attention

configs = module_at(Path(__file__).with_name("vllm_config.py"))


class InterpretedAttention(VllmAttention):
    """One of vLLM's backends, said to run here."""

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        return Support(level=GraphSupport.ALWAYS, reason="its kernels are interpreted")

    def _refusal(self, model: Attention, environment: Environment) -> str | None:
        return None


class AttentionOracle(configs.VllmOracle):  # type: ignore[misc,name-defined]
    """vLLM on a pretended H100 whose kernels run on the CPU; there is one in a process."""

    def __init__(self, wheel: Path) -> None:
        # Read when a kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
        super().__init__(wheel)
        self._machine.name, self._machine.memory, self._machine.multiprocessors = "H100", 80 << 30, 132
        from vllm.v1.attention.backends import flash_attn, triton_attn

        triton_attn.unified_attention = recorded(triton_attn.unified_attention)
        flash_attn.flash_attn_varlen_func = recorded(varlen_attention)
        flash_attn.get_scheduler_metadata = schedule

    def _provide_triton(self) -> None:
        import triton
        import triton.language as tl

        constants = {"LOG2E": math.log2(math.e), "LOGE2": math.log(2)}
        configs.stubs.provide("vllm.triton_utils", HAS_TRITON=True, triton=triton, tl=tl, **constants)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let vLLM import what it still needs, and compute with NaN in silence."""
        with configs.stubs.installed(self._wheel, "vllm"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
