"""The graphs of the target with their look-up, alone and over attention-DP ranks.

Decode batches alone have graphs. The drafter of a one-engine method runs inside them, so that there
is no role but the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from capture_planner.dispatch.dispatcher import Dispatch, served
from capture_planner.engines.emulation import CapturedGraph
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner_tensorrt_llm import rules
from capture_planner_tensorrt_llm.settings import Drafting


@attrs.frozen(kw_only=True)
class TargetGraphs:
    """The decode graphs of one rank; a ``Manager``.

    A batch whose last prompts have one token left is a decode to the engine, where nothing is
    drafted: ask for it with ``past_prompt``.
    """

    sizes: tuple[int, ...]
    """Requests, ascending; what batches are padded to."""
    shapes: tuple[rules.Shape, ...]
    """What is captured, in order."""
    padding: bool
    max_batch_size: int
    drafting: Drafting | None = None
    schedule: Mapping[int, int] | None = None
    _entries: Mapping[rules.Shape, Entry] = attrs.field(init=False, repr=False, eq=False)

    @_entries.default
    def _make_entries(self) -> Mapping[rules.Shape, Entry]:
        return {
            (num_reqs, draft_len): Entry(
                mode=GraphMode.FULL,
                num_tokens=num_reqs * self._width(draft_len),
                num_reqs=num_reqs,
                query_len=self._width(draft_len),
            )
            for num_reqs, draft_len in self.shapes
        }

    @property
    def role(self) -> Role:
        return Role.TARGET

    @property
    def mode(self) -> GraphMode:
        """FULL_DECODE_ONLY; NONE without a configuration, or where no size is left."""
        return GraphMode.FULL_DECODE_ONLY if self.shapes else GraphMode.NONE

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        return tuple(CapturedGraph(role=Role.TARGET, entry=entry) for entry in self._entries.values())

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the graph for a batch; where ranks have to agree, as if all were alike."""
        return self.on_rank(batch, batch.num_reqs)

    def on_rank(self, batch: Batch, largest_rank: int) -> Dispatch:
        """Return the graph for a batch where the largest of all ranks decodes ``largest_rank`` requests."""
        # Before the mode: a batch that cannot be is no batch that runs eager.
        if not 0 < batch.num_reqs <= batch.num_tokens:
            return Dispatch(None, reason=Reason.NOT_ADMISSIBLE)
        if not self.decodes(batch):
            return Dispatch(None, reason=Reason.MODE)
        draft_len = self._draft_len(batch)
        entry = None if draft_len is None else self._entries.get((self.size_on_rank(batch, largest_rank), draft_len))
        if entry is not None:
            return served(entry, batch)
        # Within the sizes, what lacks a graph is the draft length, or a size that nothing pads to.
        beyond = not self.sizes or largest_rank > self.sizes[-1]
        return Dispatch(None, reason=Reason.SIZES if beyond else Reason.UNCOVERED)

    def size_on_rank(self, batch: Batch, largest_rank: int) -> int:
        """Return the requests of a decode batch once dummies have joined it."""
        draft_len = self._draft_len(batch)
        if not self.padding or draft_len is None:
            return batch.num_reqs
        return rules.padded_size(
            self.sizes, batch.num_reqs, largest_rank, draft_len, self.schedule, max_batch_size=self.max_batch_size
        )

    def decodes(self, batch: Batch) -> bool:
        """Say whether a batch is one that may have a graph: decodes of one length, and graphs at all."""
        return self.mode is not GraphMode.NONE and batch.uniform_query_len is not None

    def _width(self, draft_len: int) -> int:
        return 1 if self.drafting is None else self.drafting.width(draft_len)

    def _draft_len(self, batch: Batch) -> int | None:
        # 0 where lengths differ, which no draft length gives.
        width = batch.uniform_query_len or 0
        if self.drafting is None:
            return 0 if width == 1 else None
        return self.drafting.draft_len_of(width)


def agreed(graphs: TargetGraphs, ranks: Sequence[Batch]) -> tuple[Dispatch, ...]:
    """Return the answers of attention-DP ranks, one for each batch, after both of their gatherings.

    First ranks that all decode pad to the size that holds the largest batch. Then a graph is used only where all decode
    and all have the same number of requests. Which length each one drafts is its own: a rank without that graph runs
    eager, the others do not. A rank that is idle decodes one dummy request: it is asked for with that.
    """
    alone = [graphs.dispatch(batch) for batch in ranks]
    # Padding goes by the largest rank, so that all ranks come to one size.
    largest = max((batch.num_reqs for batch in ranks), default=0)
    decode = all(graphs.decodes(batch) and batch.num_reqs > 0 for batch in ranks)
    if not decode or len({graphs.size_on_rank(batch, largest) for batch in ranks}) > 1:
        # For a rank's own reason, or for the others'.
        return tuple(Dispatch(None, reason=dispatch.reason or Reason.RANK) for dispatch in alone)
    return tuple(graphs.on_rank(batch, largest) for batch in ranks)
