"""Which entry serves a batch, of ladders that are still being planned: as the dispatcher will answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.sizing import Ladder
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import Deployment, draft_steps


def entry_of(ladder: Ladder, size: int, case: int) -> Entry:
    """Return the graph of one size of a ladder, for one number of adapters."""
    return Entry(
        mode=ladder.mode,
        num_tokens=size * (ladder.query_len or 1),
        num_reqs=None if ladder.mode is GraphMode.PIECEWISE else ladder.num_reqs(size),
        query_len=None if ladder.varies else ladder.query_len,
        active_loras=case,
        draft_steps=ladder.draft_steps,
        max_query_len=ladder.query_len if ladder.varies else None,
    )


class LadderAnswers:
    """The cheapest entry of ladders for a batch."""

    def __init__(self, ladders: Sequence[Ladder], deployment: Deployment) -> None:
        self._ladders = {role: [each for each in ladders if each.role is role and each.sizes] for role in Role}
        self._speculative = deployment.speculative

    def __call__(self, batch: Batch) -> Entry | None:
        """Return the entry that serves a batch of a role without adapters' limits, or None for none."""
        return min(self._fits(batch), key=lambda entry: entry.cost, default=None)

    def _fits(self, batch: Batch) -> Iterator[Entry]:
        steps = draft_steps(batch.role, batch.num_reqs, self._speculative)
        for ladder in self._ladders[batch.role]:
            index = bisect_left(ladder.sizes, batch.extent(ladder.kind))
            for size in ladder.sizes[index : index + 1]:
                case = next((case for case in ladder.served(size) if case >= batch.active_loras), None)
                entry = None if case is None else entry_of(ladder, size, case)
                if entry is not None and entry.rejection(batch, steps) is None:
                    yield entry
