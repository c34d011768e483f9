"""Draft chains under a plan: with dynamic draft lengths vLLM multiplies every graph by every length as it captures."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from capture_planner_vllm.inside.log import report
from capture_planner_vllm.inside.observe_seams import DRAFTERS, MANAGERS


def with_planned_chains(original: Callable[..., None]) -> Callable[..., None]:
    """Let a drafter capture the chains that the plan has named."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def capture(manager: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(manager, *args, **kwargs)
        fused = bound.arguments.get("specialize_spec_tokens", False)
        bound.arguments["specialize_spec_tokens"] = not _settle_chains(manager, fused) and fused
        original(*bound.args, **bound.kwargs)

    return capture


def _settle_chains(manager: Any, fused: bool) -> bool:
    """Fit the keys of draft chains to what the drafter runs; return whether they name the chains already."""
    chained = importlib.import_module(DRAFTERS).SpeculatorBatchDescriptor
    descs = [desc for listed in manager._capture_descs.values() for desc in listed]
    if not any(isinstance(desc, chained) for desc in descs):
        return False
    # The descriptors name their chains, and vLLM would capture each once more for every length.
    if fused:
        return True
    report(logging.WARNING, ["draft_decode: the plan has fused chains; this drafter's backend runs single steps"])
    # Single steps serve chains of all lengths, so graphs that differ in their chain alone become one.
    names = {field.name for field in fields(importlib.import_module(MANAGERS).BatchExecutionDescriptor)}
    plain = importlib.import_module(MANAGERS).BatchExecutionDescriptor
    for mode, listed in manager._capture_descs.items():
        single = (plain(**{name: getattr(desc, name) for name in names}) for desc in listed)
        manager._capture_descs[mode] = [*dict.fromkeys(single)]
    return False
