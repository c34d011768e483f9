"""The rows of a first draft pass, worked out from the requests of a batch a second time."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from capture_planner.conformance.probe import MASK_TOKEN
from capture_planner.conformance.scene import Scene
from capture_planner.conformance.world import LiveRequest

MASKED = -1
"""In place of a row of the target, for a mask token."""


@attrs.frozen(kw_only=True, eq=False)
class DraftRowsOfRequest:
    """What the drafter reads of one request."""

    live: LiveRequest
    ids: np.ndarray
    """``int64[end]``: what it reads at each position of the request, up to the last row of the batch."""
    sources: tuple[int, ...]
    """For each row of the batch, which row of the request it goes on from, or ``MASKED``."""
    last: int
    """The row that the first draft is made of."""

    @property
    def first(self) -> int:
        """The position of its first row."""
        return self.live.computed

    @property
    def count(self) -> int:
        """Its rows."""
        return len(self.sources)

    @classmethod
    def of(cls, scene: Scene, live: LiveRequest, fed: np.ndarray, settled: int) -> DraftRowsOfRequest:
        """Return them after a step of the target.

        :param fed: ids of the target's rows, each token being the one after it where the drafter reads states.
        :param settled: how many of the target's rows are final.
        """
        kind, shift = scene.drafter, int(scene.drafter.reads_states)
        before = live.tokens[shift : live.computed + shift]
        if not scene.has_own_rows:
            return cls(live=live, ids=np.concatenate([before, fed]), sources=tuple(range(len(fed))), last=settled - 1)
        known = settled if kind.reads_states else settled + 1
        masks = scene.drafts - 1 if kind.is_parallel else 0
        rows = min(len(fed) + scene.extra_slots, scene.shape.longest - live.computed)
        new = live.tokens[live.computed + shift : live.computed + shift + known].tolist()
        new += [MASK_TOKEN] * masks + [0] * rows
        sources = [*range(known), *[MASKED] * masks, *[0] * rows]
        ids = np.concatenate([before, np.array(new[:rows])])
        return cls(live=live, ids=ids, sources=tuple(sources[:rows]), last=min(known, rows) - 1)


def sources_of(rows: Sequence[DraftRowsOfRequest], starts: np.ndarray) -> np.ndarray:
    """Return for each row of a draft pass the target's row that it goes on from; ``starts`` are the target's."""
    return np.array(
        [
            source if source == MASKED else int(start) + source
            for each, start in zip(rows, starts[:-1], strict=True)
            for source in each.sources
        ]
    )
