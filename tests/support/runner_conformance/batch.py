"""A batch of a scene whose field values are computed a second time, and compared with the runner's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from capture_planner.modes import Role
from capture_planner.plugins.backend import NULL_SLOT
from capture_planner_conformance.failure import located
from capture_planner_conformance.scene_batch import SceneBatch, sources_of
from capture_planner_conformance.world import LiveRequest
from capture_planner_runner.execution.inputs import Array, StepInputs
from support.runner_conformance.laws import RunnerCheck
from support.runner_conformance.models import RunnerWorld


class RunnerBatch(SceneBatch):
    """Rows of requests, and what their fields must hold."""

    world: RunnerWorld

    def pool_row(self, live: LiveRequest) -> int:
        return self.world.rows[live.number]

    def made(self, role: Role, inputs: StepInputs) -> StepInputs:
        """Compare the runner's values with ours; raises ``Violation``."""
        for name, value in self._own(role).items():
            found = inputs.declared[name]
            if name == "block_table":
                found = found[:, : value.shape[1]]
            if found.shape != value.shape or (found != value).any():
                with located(self.batch(role), None):
                    raise RunnerCheck.MADE.violation(f"{name} is {found.tolist()}, expected {value.tolist()}")
        return super().made(role, inputs)

    def _own(self, role: Role) -> Mapping[str, Array]:
        if role is Role.TARGET:
            return self._target()
        if role is Role.DRAFT_DECODE:
            return self._draft_decode()
        if self.scene.has_own_rows:
            return self._own_prefill()
        return self._target() | {
            "input_ids": np.concatenate([self.fed(*row, shift=1) for row in self.rows]),
            "last_token_indices": self.starts[:-1] + self.settled_counts - 1,
        }

    def _target(self) -> dict[str, Array]:
        lengths = self.computed + self.counts
        positions = [np.arange(*ends) for ends in zip(self.computed, lengths, strict=True)]
        return {
            "input_ids": self.ids,
            "positions": np.concatenate(positions),
            "slot_mapping": np.concatenate(list(map(self.world.slots, self.lives, positions))),
            "query_start_loc": self.starts,
            "seq_lens": lengths,
            "block_table": self._table(lengths),
            "last_token_indices": np.maximum(self.starts[1:] - 1, 0),
            "idx_mapping": self.places,
            "cu_num_draft_tokens": np.cumsum(self.drafts),
            "state_indices": np.array([self.pool_row(live) for live in self.lives]),
        }

    def _own_prefill(self) -> dict[str, Array]:
        rows = self.draft_rows
        starts = np.cumsum([0, *(each.count for each in rows)], dtype=np.int32)
        lengths = np.array([each.first + each.count for each in rows])
        positions = [np.arange(each.first, each.first + each.count) for each in rows]
        return {
            "input_ids": np.concatenate([each.ids[each.first :] for each in rows]),
            "positions": np.concatenate(positions),
            "slot_mapping": np.concatenate(list(map(self.world.slots, self.lives, positions))),
            "query_start_loc": starts,
            "seq_lens": lengths,
            "block_table": self._table(lengths),
            "last_token_indices": starts[:-1] + np.array([each.last for each in rows]),
            "idx_mapping": self.places,
            "target_rows": sources_of(rows, self.starts),
        }

    def _draft_decode(self) -> dict[str, Array]:
        longest, wanted = self.scene.shape.longest, self.decode_positions
        positions = np.minimum(wanted, longest - 1)
        slots = np.concatenate([self.world.slots(*row) for row in zip(self.lives, positions[:, None], strict=True)])
        starts = np.arange(len(self.rows) + 1, dtype=np.int32)
        return {
            "input_ids": np.zeros(len(self.rows)),
            "positions": positions,
            "slot_mapping": np.where(wanted < longest, slots, NULL_SLOT),
            "query_start_loc": starts,
            "seq_lens": positions + 1,
            "block_table": self._table(positions + 1),
            "last_token_indices": starts[:-1],
            "idx_mapping": self.places,
        }

    def _table(self, lengths: Array) -> Array:
        width = self.world.pages.pages(min(int(lengths.max()), self.scene.shape.longest))
        return np.array([live.pages[:width] for live in self.lives], dtype=np.int32)
