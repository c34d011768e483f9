"""A batch of a scene: its rows, and the values of its fields, as the scheduler makes them of its requests."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from capture_planner.modes import Role
from capture_planner.plugins.backend import NULL_STATE
from capture_planner.records.batch import Batch
from capture_planner_conformance.probe import MASK_TOKEN
from capture_planner_conformance.scene import VOCABULARY, Scene
from capture_planner_conformance.world import LiveRequest, World
from capture_planner_runner.execution.inputs import StepInputs
from capture_planner_runner.serving.inputs import (
    DraftRows,
    draft_decode_inputs,
    draft_prefill_inputs,
    own_prefill_inputs,
    target_inputs,
)
from capture_planner_runner.serving.states import RequestStates, ScheduledBatch

Row = tuple[LiveRequest, int, int]
"""A request, its tokens in the batch, and how many of its drafts are accepted."""

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
        # At the model's end, only the rows that fit.
        rows = min(len(fed) + scene.extra_slots, scene.shape.longest - live.computed)
        new = live.tokens[live.computed + shift : live.computed + shift + known].tolist()
        # Filled up with rows in place of rejected drafts, and cut to those that fit.
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


class SceneBatch:
    """Rows of requests, for a forward of each role.

    :param draft_tokens: k of a batch of so many requests.
    :param draft: the rows of the runner's drafter, if there is one.
    """

    def __init__(
        self,
        scene: Scene,
        world: World,
        rows: Sequence[Row],
        loras: int = 0,
        *,
        draft_tokens: int = 0,
        draft: DraftRows | None = None,
    ) -> None:
        self.scene, self.world, self.rows, self.loras = scene, world, tuple(rows), loras
        self.lives, counts, _ = zip(*rows, strict=True)
        self.counts = np.array(counts, dtype=np.int64)
        self.computed = np.array([live.computed for live in self.lives], dtype=np.int64)
        self.places = np.array([live.place for live in self.lives], dtype=np.int64)
        self.settled_counts = np.array([self.settled(*row) for row in rows])
        self._is_decode = np.array([live.computed >= live.prompt for live in self.lives])
        self.drafts = np.where(self._is_decode, np.maximum(self.counts - 1, 0), 0)
        self._draft_tokens, self._draft = draft_tokens, draft
        self.starts = np.cumsum([0, *counts], dtype=np.int32)
        self.ids = np.concatenate([self.fed(*row) for row in rows])
        self.inputs_by_role: dict[Role, StepInputs] = {}

    @staticmethod
    def fed(live: LiveRequest, count: int, accepted: int, shift: int = 0) -> np.ndarray:
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
            yield index, live, where, np.concatenate([before, self.fed(live, count, accepted, shift)])

    def batch(self, role: Role) -> Batch:
        """Return the batch that is dispatched for a role."""
        reqs = len(self.rows)
        if role is Role.DRAFT_DECODE:
            return Batch(role=role, num_reqs=reqs, num_tokens=reqs, query_len=1)
        counts = self.counts.tolist()
        if role is Role.DRAFT_PREFILL and self.scene.has_own_rows:
            counts = [each.count for each in self.draft_rows]
        # A prompt chunk can have the length of a decode; it is none (law 5).
        past_prompt, is_uniform = bool(self._is_decode.all()), len(set(counts)) == 1
        return Batch(
            role=role,
            num_reqs=reqs,
            num_tokens=sum(counts),
            query_len=counts[0] if is_uniform else None,
            past_prompt=past_prompt,
            active_loras=self.loras,
            max_query_len=max(counts) if past_prompt and not is_uniform else None,
        )

    def target(self) -> StepInputs:
        """Return the values of the target's fields."""
        inputs = target_inputs(self._scheduled, self._states, self.world.pages)
        if not self.counts.all():
            # No scheduler hands out a row without a token, so the runner need not clamp this value.
            inputs = attrs.evolve(inputs, last_token_indices=np.maximum(self.starts[1:] - 1, 0))
        return self.made(Role.TARGET, inputs)

    def draft_prefill(self, target: StepInputs) -> StepInputs:
        """Return the draft prefill's values: the same batch, each token shifted by one, or rows of its own."""
        for live, count, accepted in self.rows:
            # What was accepted, as verification writes it.
            at, stays = live.computed, self.settled(live, count, accepted)
            self._states.tokens[live.place, at : at + stays + 1] = live.tokens[at : at + stays + 1]
        if not self.scene.has_own_rows:
            inputs = draft_prefill_inputs(target, self._scheduled, self.settled_counts, self._states)
            return self.made(Role.DRAFT_PREFILL, inputs)
        assert self._draft is not None, "a drafter has rows"
        pages = self.world.pages
        inputs = own_prefill_inputs(target, self._scheduled, self.settled_counts, self._states, pages, self._draft)
        return self.made(Role.DRAFT_PREFILL, inputs)

    @functools.cached_property
    def draft_rows(self) -> tuple[DraftRowsOfRequest, ...]:
        """What the first draft pass reads of each request."""
        scene = self.scene
        return tuple(
            DraftRowsOfRequest.of(scene, row[0], self.fed(*row, shift=1), int(settled))
            for row, settled in zip(self.rows, self.settled_counts, strict=True)
        )

    @property
    def decode_positions(self) -> np.ndarray:
        """Position of each request's first draft decode, ``int64[R]``; it can exceed the longest sequence."""
        # A draft model has read the new token in its first pass.
        wanted: np.ndarray = self.computed + self.settled_counts + (not self.scene.drafter.reads_states)
        return wanted

    def draft_decode(self) -> StepInputs:
        """Return the values of the first draft decode: one token per request, after its final ones."""
        inputs = draft_decode_inputs(self._scheduled, self.decode_positions, self._states, self.world.pages)
        return self.made(Role.DRAFT_DECODE, inputs)

    def made(self, role: Role, inputs: StepInputs) -> StepInputs:
        """Keep the values of a role's fields, and return them."""
        self.inputs_by_role[role] = inputs
        return inputs

    @functools.cached_property
    def _scheduled(self) -> ScheduledBatch:
        """The batch in the scheduler's form."""
        return ScheduledBatch(
            live=self.lives,
            state_indices=self.places,
            base=self.computed,
            counts=self.counts,
            drafts=self.drafts,
            prompts=int((~self._is_decode).sum()),
            draft_tokens=self._draft_tokens,
        )

    @functools.cached_property
    def _states(self) -> RequestStates:
        """The scheduler's state of each request, before the step."""
        scene = self.scene
        found = RequestStates(
            scene.num_reqs, scene.shape.longest, scene.drafts + 1 + scene.extra_slots, self.world.pages
        )
        for live, count, accepted in self.rows:
            row, at = live.place, live.computed
            found.tokens[row, :at] = live.tokens[:at]
            # One token more, which the draft prefill reads after the last one of the row.
            found.tokens[row, at : at + count + 1] = self.fed(live, count + 1, accepted)
            found.computed[row], found.prompt[row] = at, live.prompt
            # One token at least is new, also of a request that is past its prompt.
            found.length[row] = max(live.prompt, at + 1)
            found.table[row, : len(live.pages)] = live.pages
            found.pool_row[row] = self.pool_row(live)
        return found

    def pool_row(self, live: LiveRequest) -> int:
        """Return the row of a request in the pool of recurrent states; a scene without has none."""
        return NULL_STATE
