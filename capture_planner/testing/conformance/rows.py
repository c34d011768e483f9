"""A batch of a scene: whose rows, and the values of its fields, made from what is known of each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from capture_planner.entry import Batch
from capture_planner.modes import Role
from capture_planner.runtime.contract import NULL_PAGE, NULL_SLOT
from capture_planner.runtime.fields import SAMPLED_COUNTS, SAMPLED_ROWS
from capture_planner.runtime.step import Made
from capture_planner.testing.conformance.scene import VOCABULARY
from capture_planner.testing.conformance.world import Live

if TYPE_CHECKING:
    from capture_planner.testing.conformance.stage import Stage


class Rows:
    """For each row its request, its tokens, and how many of its drafts are kept."""

    def __init__(self, stage: Stage, rows: Sequence[tuple[Live, int, int]]) -> None:
        self._stage, self.rows = stage, tuple(rows)
        self.starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum([count for _, count, _ in rows], out=self.starts[1:])
        self.ids = np.concatenate([self._fed(live, count, kept) for live, count, kept in rows])
        self.made_by_role: dict[Role, Made] = {}

    @staticmethod
    def _fed(live: Live, count: int, kept: int, shift: int = 0) -> np.ndarray:
        """Return the ids of a row: its own tokens, and wrong ones after the last draft that is kept."""
        ids = live.tokens[live.computed + shift : live.computed + count + shift].copy()
        if live.computed >= live.prompt:
            ids[kept + 1 :] = (ids[kept + 1 :] + 1) % VOCABULARY
        return ids

    @staticmethod
    def settled(live: Live, count: int, kept: int) -> int:
        """Return how many tokens of a row stay."""
        return min(kept + 1, count) if live.computed >= live.prompt else count

    def each(self, shift: int = 0) -> Iterator[tuple[int, Live, slice, np.ndarray]]:
        """Yield each row: its number, its request, its place in the batch, and all ids up to its end."""
        for index, (live, count, kept) in enumerate(self.rows):
            before = live.tokens[shift : live.computed + shift]
            where = slice(int(self.starts[index]), int(self.starts[index + 1]))
            yield index, live, where, np.concatenate([before, self._fed(live, count, kept, shift)])

    def batch(self, role: Role) -> Batch:
        """Return the batch of a role, as dispatch is asked about it."""
        reqs = len(self.rows)
        if role is Role.DRAFT_DECODE:
            return Batch(role=role, num_reqs=reqs, num_tokens=reqs, query_len=1)
        counts = {count for _, count, _ in self.rows}
        return Batch(
            role=role,
            num_reqs=reqs,
            num_tokens=int(self.starts[-1]),
            query_len=counts.pop() if len(counts) == 1 else None,
            past_prompt=all(live.computed >= live.prompt for live, _, _ in self.rows),
        )

    def _table(self, lengths: np.ndarray, more: int = 0) -> np.ndarray:
        pages = self._stage.world.pages
        width = min(pages.pages(int(lengths.max()) + more), pages.pages(self._stage.scene.shape.longest))
        table = np.full((len(self.rows), width), NULL_PAGE, dtype=np.int32)
        for row, (live, _, _) in enumerate(self.rows):
            table[row] = live.pages[:width]
        return table

    def target(self) -> Made:
        """Return the target's values."""
        world, starts = self._stage.world, self.starts
        positions = np.concatenate(
            [np.arange(live.computed, live.computed + count) for live, count, _ in self.rows]
        )
        slots = np.concatenate(
            [
                world.slots(live, np.arange(live.computed, live.computed + count))
                for live, count, _ in self.rows
            ]
        )
        lengths = np.array([live.computed + count for live, count, _ in self.rows], dtype=np.int32)
        drafts = np.array(
            [count - 1 if live.computed >= live.prompt and count else 0 for live, count, _ in self.rows]
        )
        made: Made = {
            "input_ids": self.ids.astype(np.int32),
            "positions": positions.astype(np.int64),
            "slot_mapping": slots.astype(np.int64),
            "query_start_loc": starts,
            "seq_lens": lengths,
            "block_table": self._table(lengths),
            "last_token_indices": np.maximum(starts[1:] - 1, 0).astype(np.int32),
            "idx_mapping": np.array([live.place for live, _, _ in self.rows], dtype=np.int32),
            "cu_num_draft_tokens": np.cumsum(drafts, dtype=np.int32),
            SAMPLED_ROWS: np.arange(len(self.ids), dtype=np.int64),
            SAMPLED_COUNTS: np.array([count for _, count, _ in self.rows], dtype=np.int32),
        }
        self.made_by_role[Role.TARGET] = made
        return made

    def draft_prefill(self, target: Made) -> Made:
        """Return the drafter's values on the same batch: each token shifted by one."""
        ids = np.concatenate([self._fed(live, count, kept, 1) for live, count, kept in self.rows])
        kept = np.array([self.settled(*row) for row in self.rows])
        made = target | {
            "input_ids": ids.astype(np.int32),
            "last_token_indices": (self.starts[:-1] + kept - 1).astype(np.int32),
        }
        self.made_by_role[Role.DRAFT_PREFILL] = made
        return made

    def draft_decode(self) -> Made:
        """Return the values of the first draft decode: one token a request, after what is settled."""
        longest, world = self._stage.scene.shape.longest, self._stage.world
        wanted = np.array(
            [live.computed + self.settled(live, count, kept) for live, count, kept in self.rows]
        )
        positions = np.minimum(wanted, longest - 1)
        slots = np.array(
            [
                int(world.slots(live, positions[row : row + 1])[0]) if wanted[row] < longest else NULL_SLOT
                for row, (live, _, _) in enumerate(self.rows)
            ]
        )
        reqs, lengths = len(self.rows), (positions + 1).astype(np.int32)
        starts = np.arange(reqs + 1, dtype=np.int32)
        return {
            "input_ids": np.zeros(reqs, dtype=np.int32),
            "positions": positions.astype(np.int64),
            "slot_mapping": slots.astype(np.int64),
            "query_start_loc": starts,
            "seq_lens": lengths,
            "block_table": self._table(lengths, self._stage.scene.drafts),
            "last_token_indices": starts[:-1],
            "idx_mapping": np.array([live.place for live, _, _ in self.rows], dtype=np.int32),
        }
