"""Families of graphs other than those of plain batches: what settings show of them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capture_planner.modes import GraphMode
from capture_planner_vllm.config import Configuration
from capture_planner_vllm.refusals import not_emulated
from capture_planner_vllm.settings import RunnerVersion, VllmSettings


def check_families(settings: VllmSettings) -> None:
    """Raise ``NotEmulated`` where model runner V1 captures graphs of microbatches while it serves, or mixes them up."""
    if settings.mode is GraphMode.NONE or settings.overlap is None or settings.runner is RunnerVersion.V2:
        return
    if settings.mode is GraphMode.FULL:
        subject = "model runner V1 captures FULL graphs of microbatches while it serves"
        raise not_emulated("--enable-dbo", subject, "request FULL_AND_PIECEWISE, or leave it out")
    if settings.max_loras:
        subject = "model runner V1 has one graph of microbatches for all numbers of adapters"
        raise not_emulated("--enable-dbo", subject, "leave it out, or drop the adapters")


def shown_families(settings: VllmSettings, configuration: Configuration) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the settings of each family that the engine has graphs of, with their sources."""
    line, overlap = configuration.line, settings.overlap
    if overlap is not None:
        name = "enable_dbo" if "enable_dbo" in line.values else "ubatch_size"
        yield "microbatches", (overlap.microbatches, line.source(name))
        for name, value in (("decode", overlap.decode_tokens), ("prefill", overlap.prefill_tokens)):
            flag = f"dbo_{name}_token_threshold"
            yield flag, (value, line.source(flag))
