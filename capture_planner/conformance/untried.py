"""What a run of the suite did not try, in sentences: a pass says nothing about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capture_planner.conformance.draft_scheme import DraftScheme
from capture_planner.conformance.features import NAMES
from capture_planner.conformance.machine import Log
from capture_planner.modes import GraphMode, Role
from capture_planner.records.text import counted

NEVER = (
    "latent attention (MLA)",
    "KV caches in NVFP4, and scales of KV caches: the runner has none",
    "multimodal positions and embeddings as inputs",
    "more than one device: ranks are those of the plan, and one of them runs",
    "layers of several backends in one role",
)
"""Beyond the suite, whatever the options."""


def untried(log: Log, drafts: Sequence[int]) -> Iterator[str]:
    """Yield what was refused, what no scene had, what no batch reached, and what the suite never tries."""
    yield from (f"{name}: {reason}" for name, reason in log.refused.items())
    names = [*NAMES.values(), *(map(str, DraftScheme) if any(drafts) else ())]
    absent = [name for name in names if not log.features[name] and name not in log.refused]
    yield from (f"{name}: no scene had it" for name in absent)
    for role in Role:
        if role is not Role.TARGET and not any(drafts):
            continue
        modes = [
            mode.value
            for mode in (GraphMode.PIECEWISE, GraphMode.FULL)
            if not log.forwards[f"{role.value} {mode.value}"]
            and not (role is Role.DRAFT_DECODE and mode is GraphMode.PIECEWISE)
        ]
        if modes:
            yield f"{role.value} in {' and '.join(modes)} graphs"
    reqs, tokens = log.largest
    yield f"batches of more than {counted(reqs, 'request')} or {counted(tokens, 'token')}"
    yield f"sequences of more than {counted(log.longest, 'key')}, and pages above number {log.pages}"
    yield f"scenes of more than {counted(log.most_steps, 'step')}"
    yield from NEVER
