"""The inputs of a step's forwards, made on the host from the states of the requests."""

from __future__ import annotations

import attrs
import numpy as np

from capture_planner.records.model import Method, Speculative
from capture_planner.runtime.execution.inputs import Array, StepInputs
from capture_planner.runtime.executor import NULL_SLOT
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.speculative import sampled_counts, sampled_rows
from capture_planner.runtime.serving.states import RequestStates, ScheduledBatch

LOOKAHEAD = 64
"""Tokens by which requests may grow in graphs that advance their own fields, before the host must widen
their block tables."""


def token_rows(scheduled: ScheduledBatch, states: RequestStates) -> tuple[Array, Array, Array]:
    """Return ``starts int32[R + 1]``, and for each token its request state index and its position, ``int64[T]``.

    Positions after a step that is under way are as if all its drafts were kept.
    """
    base, query_len = states.computed_at_most(scheduled.state_indices), scheduled.query_len
    if query_len is not None:
        starts = np.arange(0, scheduled.num_tokens + 1, query_len, dtype=np.int32)
        if query_len == 1:
            return starts, scheduled.state_indices, base
        return (starts, np.repeat(scheduled.state_indices, query_len), (base[:, None] + np.arange(query_len)).ravel())
    starts = np.zeros(scheduled.num_reqs + 1, dtype=np.int32)
    np.cumsum(scheduled.counts, out=starts[1:])
    positions = np.arange(scheduled.num_tokens) + np.repeat(base - starts[:-1], scheduled.counts)
    return starts, np.repeat(scheduled.state_indices, scheduled.counts), positions


def slots(rows: Array, positions: Array, states: RequestStates, page_size: int) -> Array:
    """Return the cache slot of each position of a request, ``int64[T]``."""
    page, offset = np.divmod(positions, page_size)
    slot_mapping: Array = states.table[rows, page] * np.int64(page_size) + offset
    return slot_mapping


def adapter_lanes(scheduled: ScheduledBatch, states: RequestStates) -> tuple[Array | None, Array | None]:
    """Return for each token where its adapter is in the second, ``int32[T]``, and the batch's adapters ``int32[n]``.

    Next to requests with an adapter, those without one have the null adapter, 0. None twice where the plan has no LoRA.
    """
    if not states.has_adapters:
        return None, None
    mine = states.adapter[scheduled.state_indices]
    active = np.unique(mine) if mine.any() else mine[:0]
    return np.repeat(np.searchsorted(active, mine).astype(np.int32), scheduled.counts), active


def active_loras(inputs: StepInputs) -> int:
    """Return what a batch is dispatched by: its adapters, the null adapter of rows without one among them."""
    return 0 if inputs.active_adapters is None else len(inputs.active_adapters)


def target_inputs(scheduled: ScheduledBatch, states: RequestStates, pages: PageFormat) -> StepInputs:
    """Return the target's inputs: tokens from each row's first uncomputed position on.

    The block table is wide enough for the ``LOOKAHEAD`` tokens after them, too. Where the step before is under way with
    drafts, positions, slots and lengths are as if all of them were kept, and ids are negative: see ``unread_tokens``.
    """
    starts, rows, positions = token_rows(scheduled, states)
    seq_lens = (states.computed_at_most(scheduled.state_indices) + scheduled.counts).astype(np.int32)
    width = min(pages.pages(int(seq_lens.max()) + LOOKAHEAD), states.table.shape[1])
    lanes, active = adapter_lanes(scheduled, states)
    return StepInputs(
        input_ids=unread_tokens(scheduled, states, starts, states.tokens[rows, positions]),
        positions=positions,
        slot_mapping=slots(rows, positions, states, pages.page_size),
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=states.table[:, :width].take(scheduled.state_indices, axis=0),
        idx_mapping=scheduled.state_indices.astype(np.int32),
        cu_num_draft_tokens=np.cumsum(scheduled.drafts, dtype=np.int32),
        state_indices=states.pool_row[scheduled.state_indices],
        sampled_rows=sampled_rows(scheduled, starts, states),
        sampled_counts=sampled_counts(scheduled, states).astype(np.int32),
        adapter_lanes=lanes,
        active_adapters=active,
        page_size=pages.page_size,
    )


def unread_tokens(scheduled: ScheduledBatch, states: RequestStates, starts: Array, tokens: Array) -> Array:
    """Return the ids ``int32[T]``, where those of requests that the step under way gives tokens are on the device.

    Such a row has -1, its newest token, and -1 - i for the i-th draft that was proposed after it; a draft that it
    lacks is token 0. ``Updates.correct`` puts the tokens there.
    """
    unread = states.is_unread(scheduled.state_indices)
    if not unread.any():
        return tokens
    inside = np.arange(scheduled.num_tokens) - np.repeat(starts[:-1], scheduled.counts)
    known = np.where(inside <= np.repeat(scheduled.proposed, scheduled.counts), -1 - inside, 0)
    ids: Array = np.where(np.repeat(unread, scheduled.counts), known, tokens).astype(np.int32)
    return ids


def draft_prefill_inputs(
    target: StepInputs, scheduled: ScheduledBatch, settled: Array, states: RequestStates
) -> StepInputs:
    """Return the drafter's inputs on the target's batch: each token shifted by one.

    ``settled int64[R]`` counts the tokens of each row that verification kept. Rows past them hold
    rejected drafts, whose tokens, keys and values are overwritten before anything reads them.
    """
    rows = np.repeat(scheduled.state_indices, scheduled.counts)
    return attrs.evolve(
        target,
        input_ids=states.tokens[rows, target.positions + 1],
        last_token_indices=(target.query_start_loc[:-1] + settled - 1).astype(np.int32),
    )


@attrs.frozen(kw_only=True)
class DraftRows:
    """How the rows of each request in the first draft pass follow from the target's."""

    is_own: bool
    """Whether they are not the target's rows, each with the token after it."""
    shift: int
    """How far a row's token stands after its position: 1 of a head, 0 of a draft model."""
    masks: int
    """Mask tokens, one for each draft of a parallel pass but the first."""
    mask_token: int

    @classmethod
    def of(cls, speculative: Speculative, mask_token: int) -> DraftRows:
        return cls(
            is_own=speculative.has_own_rows,
            shift=int(speculative.method is not Method.DRAFT_MODEL),
            masks=(speculative.num_tokens - 1) * speculative.parallel_drafting,
            mask_token=mask_token,
        )


def own_prefill_counts(scheduled: ScheduledBatch, first: Array, longest: int, draft: DraftRows) -> Array:
    """Return the rows of each request in a first draft pass with rows of its own, ``int64[R]``.

    A request at the model's end has those that fit.

    :param first: ``int64[R]``: the position of each request's first row in the step.
    :param longest: positions that the model has.
    """
    counts: Array = np.minimum(scheduled.counts + 1 - draft.shift + draft.masks, longest - first)
    return counts


def own_prefill_inputs(
    target: StepInputs,
    scheduled: ScheduledBatch,
    settled: Array,
    states: RequestStates,
    pages: PageFormat,
    draft: DraftRows,
) -> StepInputs:
    """Return the inputs of a first draft pass with rows of its own, as vLLM 0.33 orders them.

    Of each request they are, from its first row's position on: the tokens that verification kept (of a draft model the
    new one too), the mask tokens, and rows in place of rejected drafts, whose keys and values are overwritten before
    anything reads them. A request at the model's end has as many rows as fit, and then the batch is mixed.
    """
    base = target.positions[target.query_start_loc[:-1]]
    known = settled + 1 - draft.shift
    counts = own_prefill_counts(scheduled, base, states.max_model_len, draft)
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    rows = np.repeat(scheduled.state_indices, counts)
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    positions = np.repeat(base, counts) + inside
    is_known, is_mask = inside < np.repeat(known, counts), inside < np.repeat(known + draft.masks, counts)
    is_mask &= ~is_known
    tokens = np.where(is_known, states.tokens[rows, positions + draft.shift], 0)
    seq_lens = (base + counts).astype(np.int32)
    width = min(pages.pages(int(seq_lens.max())), states.table.shape[1])
    target_rows = np.repeat(target.query_start_loc[:-1], counts) + np.where(is_known, inside, 0)
    return attrs.evolve(
        target,
        input_ids=np.where(is_mask, draft.mask_token, tokens).astype(np.int32),
        positions=positions,
        slot_mapping=slots(rows, positions, states, pages.page_size),
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=states.table[:, :width].take(scheduled.state_indices, axis=0),
        last_token_indices=(starts[:-1] + np.minimum(known, counts) - 1).astype(np.int32),
        target_rows=np.where(is_mask, -1, target_rows).astype(np.int32),
        cu_num_draft_tokens=None,
        sampled_rows=None,
        sampled_counts=None,
    )


def draft_decode_inputs(
    scheduled: ScheduledBatch, wanted: Array, states: RequestStates, pages: PageFormat
) -> StepInputs:
    """Return the first draft decode's inputs: one token a row, at position ``wanted int64[R]``.

    That is the first one that is not settled. The graph advances the fields for the steps that follow.
    A position past the model's end is held at the last one and writes the null slot.
    """
    positions = np.minimum(wanted, states.max_model_len - 1)
    count = len(positions)
    slot_mapping = slots(scheduled.state_indices, positions, states, pages.page_size)
    slot_mapping[wanted > positions] = NULL_SLOT
    seq_lens = (positions + 1).astype(np.int32)
    starts = np.arange(count + 1, dtype=np.int32)
    width = min(pages.pages(int(seq_lens.max()) + scheduled.draft_tokens), states.table.shape[1])
    return StepInputs(
        input_ids=np.zeros(count, dtype=np.int32),
        positions=positions,
        slot_mapping=slot_mapping,
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=states.table[scheduled.state_indices, :width],
        idx_mapping=scheduled.state_indices.astype(np.int32),
        page_size=pages.page_size,
    )
