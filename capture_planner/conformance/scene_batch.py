"""A batch of a scene: its rows, and the values of its fields, made from its requests."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from capture_planner.conformance.draft_rows import DraftRowsOfRequest, sources_of
from capture_planner.conformance.failure import Check, located
from capture_planner.conformance.scene import VOCABULARY
from capture_planner.conformance.stage import Stage
from capture_planner.conformance.world import LiveRequest
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.runtime.execution.inputs import Array, StepInputs
from capture_planner.runtime.executor import NULL_SLOT
from capture_planner.runtime.serving.inputs import (
    draft_decode_inputs,
    draft_prefill_inputs,
    own_prefill_inputs,
    target_inputs,
)
from capture_planner.runtime.serving.states import RequestStates, ScheduledBatch

Row = tuple[LiveRequest, int, int]
"""A request, its tokens in the batch, and how many of its drafts are accepted."""


class SceneBatch:
    """Rows of requests. Each value is computed here a second time, and compared with the runner's."""

    def __init__(self, stage: Stage, rows: Sequence[Row], loras: int = 0) -> None:
        self._stage, self.rows, self._pages, self._loras = stage, tuple(rows), stage.world.pages, loras
        self._lives, counts, _ = zip(*rows, strict=True)
        self._counts = np.array(counts, dtype=np.int64)
        self._computed = np.array([live.computed for live in self._lives], dtype=np.int64)
        self._places = np.array([live.place for live in self._lives], dtype=np.int64)
        self._is_decode = np.array([live.computed >= live.prompt for live in self._lives])
        self._drafts = np.where(self._is_decode, np.maximum(self._counts - 1, 0), 0)
        self._settled = np.array([self.settled(*row) for row in rows])
        self.starts = np.cumsum([0, *counts], dtype=np.int32)
        self.ids = np.concatenate([self._fed(*row) for row in rows])
        self.inputs_by_role: dict[Role, StepInputs] = {}

    @staticmethod
    def _fed(live: LiveRequest, count: int, accepted: int, shift: int = 0) -> np.ndarray:
        """Return the ids of a row: its own tokens, and wrong ones after the last accepted draft."""
        ids = live.tokens[live.computed + shift : live.computed + count + shift].copy()
        if live.computed >= live.prompt:
            ids[accepted + 1 :] = (ids[accepted + 1 :] + 1) % VOCABULARY
        return ids

    @staticmethod
    def settled(live: LiveRequest, count: int, accepted: int) -> int:
        """Return how many tokens of a row are final after the step."""
        return min(accepted + 1, count) if live.computed >= live.prompt else count

    def each(self, shift: int = 0) -> Iterator[tuple[int, LiveRequest, slice, np.ndarray]]:
        """Yield each row: its number, request, slice of the batch, and all ids of the request up to its end."""
        for index, (live, count, accepted) in enumerate(self.rows):
            before = live.tokens[shift : live.computed + shift]
            where = slice(int(self.starts[index]), int(self.starts[index + 1]))
            yield index, live, where, np.concatenate([before, self._fed(live, count, accepted, shift)])

    def batch(self, role: Role) -> Batch:
        """Return the batch that is dispatched for a role."""
        reqs = len(self.rows)
        if role is Role.DRAFT_DECODE:
            return Batch(role=role, num_reqs=reqs, num_tokens=reqs, query_len=1)
        counts = self._counts.tolist()
        if role is Role.DRAFT_PREFILL and self._stage.scene.has_own_rows:
            counts = [each.count for each in self.draft_rows]
        past_prompt, is_uniform = bool(self._is_decode.all()), len(set(counts)) == 1
        return Batch(
            role=role,
            num_reqs=reqs,
            num_tokens=sum(counts),
            query_len=counts[0] if is_uniform else None,
            past_prompt=past_prompt,
            active_loras=self._loras,
            max_query_len=max(counts) if past_prompt and not is_uniform else None,
        )

    def _table(self, lengths: np.ndarray) -> np.ndarray:
        width = self._pages.pages(min(int(lengths.max()), self._stage.scene.shape.longest))
        return np.array([live.pages[:width] for live in self._lives], dtype=np.int32)

    def target(self) -> StepInputs:
        """Return the values of the target's fields."""
        lengths = self._computed + self._counts
        positions = [np.arange(*ends) for ends in zip(self._computed, lengths, strict=True)]
        slots = map(self._stage.world.slots, self._lives, positions)
        made = {
            "input_ids": self.ids,
            "positions": np.concatenate(positions),
            "slot_mapping": np.concatenate(list(slots)),
            "query_start_loc": self.starts,
            "seq_lens": lengths,
            "block_table": self._table(lengths),
            "last_token_indices": np.maximum(self.starts[1:] - 1, 0),
            "idx_mapping": self._places,
            "cu_num_draft_tokens": np.cumsum(self._drafts),
            "state_indices": np.array([live.pool_row for live in self._lives]),
        }
        return self._verified(Role.TARGET, made, target_inputs(self._scheduled, self._states, self._pages))

    def draft_prefill(self, target: StepInputs) -> StepInputs:
        """Return the draft prefill's values: the same batch, each token shifted by one, or rows of its own."""
        if self._stage.scene.has_own_rows:
            return self._own_prefill(target)
        made = {
            **target.declared,
            "input_ids": np.concatenate([self._fed(*row, shift=1) for row in self.rows]),
            "last_token_indices": self.starts[:-1] + self._settled - 1,
        }
        self._settle()
        runners = draft_prefill_inputs(target, self._scheduled, self._settled, self._states)
        return self._verified(Role.DRAFT_PREFILL, made, runners)

    @functools.cached_property
    def draft_rows(self) -> tuple[DraftRowsOfRequest, ...]:
        """What the first draft pass reads of each request."""
        scene = self._stage.scene
        return tuple(
            DraftRowsOfRequest.of(scene, row[0], self._fed(*row, shift=1), int(settled))
            for row, settled in zip(self.rows, self._settled, strict=True)
        )

    def _own_prefill(self, target: StepInputs) -> StepInputs:
        rows = self.draft_rows
        starts = np.cumsum([0, *(each.count for each in rows)], dtype=np.int32)
        lengths = np.array([each.first + each.count for each in rows])
        positions = [np.arange(each.first, each.first + each.count) for each in rows]
        made = {
            "input_ids": np.concatenate([each.ids[each.first :] for each in rows]),
            "positions": np.concatenate(positions),
            "slot_mapping": np.concatenate(list(map(self._stage.world.slots, self._lives, positions))),
            "query_start_loc": starts,
            "seq_lens": lengths,
            "block_table": self._table(lengths),
            "last_token_indices": starts[:-1] + np.array([each.last for each in rows]),
            "idx_mapping": self._places,
            "target_rows": sources_of(rows, self.starts),
        }
        self._settle()
        draft = self._stage.runner.parts.draft_rows
        assert draft is not None, "a drafter has rows"
        runners = own_prefill_inputs(target, self._scheduled, self._settled, self._states, self._pages, draft)
        return self._verified(Role.DRAFT_PREFILL, made, runners)

    def draft_decode(self) -> StepInputs:
        """Return the values of the first draft decode: one token per request, after its final ones."""
        longest, world = self._stage.scene.shape.longest, self._stage.world
        # A draft model has read the new token in its first pass.
        wanted = self._computed + self._settled + (not self._stage.scene.drafter.reads_states)
        positions = np.minimum(wanted, longest - 1)
        slots = np.concatenate([world.slots(*row) for row in zip(self._lives, positions[:, None], strict=True)])
        starts = np.arange(len(self.rows) + 1, dtype=np.int32)
        made = {
            "input_ids": np.zeros(len(self.rows)),
            "positions": positions,
            "slot_mapping": np.where(wanted < longest, slots, NULL_SLOT),
            "query_start_loc": starts,
            "seq_lens": positions + 1,
            "block_table": self._table(positions + 1),
            "last_token_indices": starts[:-1],
            "idx_mapping": self._places,
        }
        runners = draft_decode_inputs(self._scheduled, wanted, self._states, self._pages)
        return self._verified(Role.DRAFT_DECODE, made, runners)

    def _verified(self, role: Role, own: Mapping[str, Array], runners: StepInputs) -> StepInputs:
        """Return the runner's values, which must equal ours."""
        for name, value in own.items():
            found = runners.declared[name]
            if name == "block_table":
                found = found[:, : value.shape[1]]
            if not self._counts.all() and name == "last_token_indices":
                # No scheduler hands out a row without a token, so the runner need not clamp this value.
                runners, found = attrs.evolve(runners, last_token_indices=value), value
            if found.shape != value.shape or (found != value).any():
                with located(self.batch(role), None):
                    raise Check.MADE.violation(f"{name} is {found.tolist()}, expected {value.tolist()}")
        self.inputs_by_role[role] = runners
        return runners

    @functools.cached_property
    def _scheduled(self) -> ScheduledBatch:
        """The batch in the scheduler's form."""
        return ScheduledBatch(
            live=self._lives,
            state_indices=self._places,
            counts=self._counts,
            drafts=self._drafts,
            prompts=int((~self._is_decode).sum()),
            draft_tokens=self._stage.draft_tokens(len(self.rows)),
        )

    @functools.cached_property
    def _states(self) -> RequestStates:
        """The scheduler's state of each request, before the step."""
        scene = self._stage.scene
        found = RequestStates(scene.num_reqs, scene.shape.longest, scene.drafts + 1 + scene.extra_slots, self._pages)
        for live, count, accepted in self.rows:
            row, at = live.place, live.computed
            found.tokens[row, :at] = live.tokens[:at]
            found.tokens[row, at : at + count + 1] = self._fed(live, count + 1, accepted)
            found.computed[row], found.prompt[row] = at, live.prompt
            found.length[row] = max(live.prompt, at + 1)
            found.table[row, : len(live.pages)] = live.pages
            found.pool_row[row] = live.pool_row
        return found

    def _settle(self) -> None:
        """Update the tokens with those that were accepted, as verification does."""
        for live, count, accepted in self.rows:
            row, at, stays = live.place, live.computed, self.settled(live, count, accepted)
            self._states.tokens[row, at : at + stays + 1] = live.tokens[at : at + stays + 1]
