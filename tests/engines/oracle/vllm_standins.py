"""What stands for vLLM's device group and support levels in the oracle."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import torch


def parallel(overlap: Any) -> SimpleNamespace:
    """Return what the engine reads of its ``ParallelConfig``; ``overlap`` is how batches are split, or None."""
    return SimpleNamespace(
        tensor_parallel_size=1,
        data_parallel_size=1,
        data_parallel_rank=0,
        disable_nccl_for_dp_synchronization=True,
        use_ubatching=overlap is not None,
        num_ubatches=1 if overlap is None else overlap.microbatches,
        dbo_decode_token_threshold=32 if overlap is None else overlap.decode_tokens,
        dbo_prefill_token_threshold=512 if overlap is None else overlap.prefill_tokens,
    )


def speculative(tokens: int, schedule: list[list[int]] | None) -> SimpleNamespace:
    """Return what the engine reads of its ``SpeculativeConfig``."""
    return SimpleNamespace(
        num_speculative_tokens_per_batch_size=schedule,
        uses_dynamic_speculative_decoding=lambda: schedule is not None,
        num_speculative_tokens=tokens,
    )


def runner(overlap: Any) -> SimpleNamespace | None:
    """Return what stands for the ``UBatchRunner``; None where no batch is split."""
    return None if overlap is None else SimpleNamespace(capture_stream=None, abort_pending_run=lambda: None)


class Support(enum.Enum):
    """Stands for the engine's support levels, of which only the order counts here."""

    UNIFORM_BATCH = 2
    ALWAYS = 3


class FirstAllReduce(Exception):
    """Raised in the all-reduce of the first pass, when a rank has said what it has."""


class Group:
    """Stands for the data-parallel group: the first pass collects, the second answers with the sum."""

    def __init__(self) -> None:
        self.said: list[torch.Tensor] = []
        self.total: torch.Tensor | None = None

    @property
    def cpu_group(self) -> Group:
        return self

    def cpu_all_reduce_(self, tensor: torch.Tensor) -> None:
        if self.total is None:
            self.said.append(tensor.clone())
            raise FirstAllReduce
        tensor.copy_(self.total)
