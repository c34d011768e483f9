"""Kinds of drafters that a scene can have: every way in which drafts are made."""

from __future__ import annotations

import enum

from capture_planner.modes import Chain
from capture_planner.records.model import DraftModel, Method, Speculative, Tier


class DraftScheme(enum.Enum):
    """How the drafts of a scene are made; a probe stands for the drafter."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    LAYERS = "layers"
    """EAGLE of two layers."""
    MODULES = "modules"
    """MTP of a module for each draft, all in the draft prefill."""
    DRAFT_MODEL = "draft_model"
    """A whole model; the draft prefill has a row more for each request."""
    PARALLEL = "parallel"
    """EAGLE-3 with all drafts in the draft prefill, on mask tokens."""
    PARALLEL_MODEL = "parallel_model"
    """A draft model with all drafts in the draft prefill, on mask tokens."""

    @property
    def reads_states(self) -> bool:
        """Whether it goes on from the target's hidden states, and its tokens stand one position later."""
        return self not in (DraftScheme.DRAFT_MODEL, DraftScheme.PARALLEL_MODEL)

    @property
    def is_parallel(self) -> bool:
        """Whether mask tokens take the rows of drafts yet to be made."""
        return self in (DraftScheme.PARALLEL, DraftScheme.PARALLEL_MODEL)

    @property
    def reads_aux(self) -> bool:
        """Whether it reads auxiliary states of the target, as EAGLE-3 does."""
        return self in (DraftScheme.EAGLE3, DraftScheme.PARALLEL)

    def __str__(self) -> str:
        return _TEXTS[self]

    def speculative(self, drafts: int, schedule: tuple[Tier, ...], chain: Chain, *, sinks: bool) -> Speculative:
        """Return the speculation of a spec with this drafter, at K of ``drafts``."""
        layers = {DraftScheme.LAYERS: 2, DraftScheme.MODULES: max(drafts, 2)}.get(self, 1)
        method = Method.EAGLE3 if self.reads_aux else Method.EAGLE
        if self is DraftScheme.MODULES:
            method = Method.MTP
        return Speculative(
            method=method if self.reads_states else Method.DRAFT_MODEL,
            num_tokens=drafts,
            schedule=schedule,
            model=DraftModel(num_layers=layers, sinks=sinks),
            chain=chain,
            parallel_drafting=self.is_parallel,
        )


_TEXTS = {
    DraftScheme.EAGLE: "EAGLE",
    DraftScheme.EAGLE3: "EAGLE-3",
    DraftScheme.LAYERS: "EAGLE of two layers",
    DraftScheme.MODULES: "MTP of several modules",
    DraftScheme.DRAFT_MODEL: "a draft model",
    DraftScheme.PARALLEL: "parallel EAGLE-3",
    DraftScheme.PARALLEL_MODEL: "a parallel draft model",
}
