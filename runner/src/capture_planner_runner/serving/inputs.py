"""The inputs of a step's forwards, made on the host from the states of the requests."""

from __future__ import annotations

import attrs
import numpy as np

from capture_planner.plugins.backend import NULL_SLOT
from capture_planner.records.model import Method, Speculative
from capture_planner_runner.execution.inputs import Array, StepInputs
from capture_planner_runner.serving.states import PageFormat, RequestStates, ScheduledBatch

LOOKAHEAD = 64
"""Tokens by which requests may grow in graphs that advance their own fields, before the host must widen
their block tables."""


def token_rows(scheduled: ScheduledBatch) -> tuple[Array, Array, Array]:
    """Return ``starts int32[R + 1]``, and for each token its request state index and its position, ``int64[T]``."""
    base, query_len = scheduled.base, scheduled.query_len
    if query_len is not None:
        # Uniform decodes are most steps, and need no cumulative sums.
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
    # The table is int32, and the slot of a large cache is beyond that.
    slot_mapping: Array = states.table[rows, page] * np.int64(page_size) + offset
    return slot_mapping


def active_adapters(scheduled: ScheduledBatch, states: RequestStates) -> Array:
    """Return the LoRA adapters of a batch, each once, ``int32[n]``: counted from 1; none where no request has one.

    Next to requests with an adapter, those without one have the null adapter, 0.
    """
    mine = states.adapter[scheduled.state_indices]
    return np.unique(mine) if mine.any() else mine[:0]


def adapter_lanes(scheduled: ScheduledBatch, states: RequestStates) -> tuple[Array | None, Array | None]:
    """Return the place of each token's adapter in the active ones, ``int32[T]``, and those; None twice without LoRA."""
    if not states.has_adapters:
        return None, None
    active = active_adapters(scheduled, states)
    lanes = np.searchsorted(active, states.adapter[scheduled.state_indices]).astype(np.int32)  # `unique` sorts
    return np.repeat(lanes, scheduled.counts), active


def target_inputs(scheduled: ScheduledBatch, states: RequestStates, pages: PageFormat) -> StepInputs:
    """Return the target's inputs: tokens from each row's first uncomputed position on.

    The block table is wide enough for the ``LOOKAHEAD`` tokens after them, too. Where the step in flight verifies
    drafts, positions, slots and lengths are as if all of them were kept, and ids are negative: see ``unread_tokens``.
    """
    starts, rows, positions = token_rows(scheduled)
    seq_lens = (scheduled.base + scheduled.counts).astype(np.int32)
    # A request near the model's end has no pages for all of the lookahead.
    width = min(pages.pages(int(seq_lens.max()) + LOOKAHEAD), states.table.shape[1])
    lanes, active = adapter_lanes(scheduled, states)
    return StepInputs(
        input_ids=unread_tokens(scheduled, starts, states.tokens[rows, positions]),
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
        request_keys=request_keys(rows, states),
        adapter_lanes=lanes,
        active_adapters=active,
        page_size=pages.page_size,
    )


def request_keys(rows: Array, states: RequestStates) -> Array | None:
    """Return the key of the request of each row, ``int64[N]``, by request state; None where nothing is sampled."""
    return states.key[rows].view(np.int64) if states.is_sampled else None


def proposal_rows(scheduled: ScheduledBatch, starts: Array, num_states: int, most_drafts: int) -> Array:
    """Return the row of ``Sampler.proposed``, which has ``num_states``, of the draft after each token, ``int64[T]``."""
    # 0 is the row of the last known token, which the first draft follows.
    inside = np.arange(scheduled.num_tokens) - np.repeat(starts[1:] - 1 - scheduled.drafts, scheduled.counts)
    rows = np.repeat(scheduled.state_indices, scheduled.counts) * most_drafts + inside
    is_drafted = (inside >= 0) & (inside < np.repeat(scheduled.proposed, scheduled.counts))
    drafted: Array = np.where(is_drafted, rows, (num_states - 1) * most_drafts)  # the last state is all zeros
    return drafted


def sampled_rows(scheduled: ScheduledBatch, starts: Array, states: RequestStates) -> Array:
    """Return the rows of the batch whose next token is read, ``int64[N]``.

    They are the last known token, and the drafts after it, of each request that reaches the end of what is known.
    """
    if not scheduled.prompts and (scheduled.drafts + 1 == scheduled.counts).all():
        # Decodes: every row is read.
        return np.arange(scheduled.num_tokens)
    wanted = sampled_counts(scheduled, states)
    first = starts[1:].astype(np.int64) - 1 - scheduled.drafts
    offsets = np.arange(wanted.sum()) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    rows: Array = np.repeat(first, wanted) + offsets
    return rows


def sampled_counts(scheduled: ScheduledBatch, states: RequestStates) -> Array:
    """Return how many of ``sampled_rows`` each request has, ``int64[R]``: none inside its prompt."""
    # Past its prompt a request has exactly one token that is not computed, also after a step in flight.
    length = np.maximum(states.length[scheduled.state_indices], scheduled.base + 1)
    reaches = scheduled.base + scheduled.counts - scheduled.drafts == length
    return np.where(reaches, scheduled.drafts + 1, 0)


def unread_tokens(scheduled: ScheduledBatch, starts: Array, tokens: Array) -> Array:
    """Return the input ids ``int32[T]``, negative where the token is still on the device.

    A row of a request that the step in flight gives tokens has -1, its newest token, and -1 - i for the i-th draft
    proposed after it; a draft that it lacks is token 0. ``Updates.correct`` replaces them by the tokens.
    """
    unread = scheduled.unread
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

    Rows past the kept ones hold rejected drafts: their keys and values are overwritten before anything reads them.

    :param settled: ``int64[R]``: tokens of each row that verification kept.
    """
    rows = np.repeat(scheduled.state_indices, scheduled.counts)
    return attrs.evolve(
        target,
        input_ids=states.tokens[rows, target.positions + 1],
        last_token_indices=(target.query_start_loc[:-1] + settled - 1).astype(np.int32),
    )


@attrs.frozen(kw_only=True)
class DraftRows:
    """Rows of each request in the first draft pass, in terms of the target's rows."""

    is_own: bool
    """Whether they are not the target's rows, each with the token after it."""
    shift: int
    """Distance of a row's token from its position: 1 for a head, 0 for a draft model."""
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


def own_prefill_counts(scheduled: ScheduledBatch, states: RequestStates, draft: DraftRows) -> Array:
    """Return the rows of each request in a first draft pass with rows of its own, ``int64[R]``.

    A request at the model's end has those that fit.
    """
    room = states.max_model_len - scheduled.base
    counts: Array = np.minimum(scheduled.counts + 1 - draft.shift + draft.masks, room)
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
    base, known = scheduled.base, settled + 1 - draft.shift
    counts = own_prefill_counts(scheduled, states, draft)
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    rows = np.repeat(scheduled.state_indices, counts)
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    positions = np.repeat(base, counts) + inside
    is_known, is_mask = inside < np.repeat(known, counts), inside < np.repeat(known + draft.masks, counts)
    # Rows from here on that are neither known nor masks hold rejected drafts.
    is_mask &= ~is_known
    tokens = np.where(is_known, states.tokens[rows, positions + draft.shift], 0)
    seq_lens = (base + counts).astype(np.int32)
    width = min(pages.pages(int(seq_lens.max())), states.table.shape[1])
    # Rows of rejected drafts may go on from any row: nothing reads what they compute.
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
        request_keys=request_keys(rows, states),
        # The drafter verifies and samples nothing of these rows.
        cu_num_draft_tokens=None,
        sampled_rows=None,
        sampled_counts=None,
    )


def draft_decode_inputs(
    scheduled: ScheduledBatch, wanted: Array, states: RequestStates, pages: PageFormat
) -> StepInputs:
    """Return the first draft decode's inputs: one token a row, at position ``wanted int64[R]``.

    That is the first position whose token is not known. The graph advances the fields for the steps that follow.
    A position past the model's end is held at the last one and writes the null slot.
    """
    positions = np.minimum(wanted, states.max_model_len - 1)
    count = len(positions)
    slot_mapping = slots(scheduled.state_indices, positions, states, pages.page_size)
    slot_mapping[wanted > positions] = NULL_SLOT
    seq_lens = (positions + 1).astype(np.int32)
    starts = np.arange(count + 1, dtype=np.int32)
    # The steps of the chain find their pages on the device, where the table cannot grow.
    width = min(pages.pages(int(seq_lens.max()) + scheduled.draft_tokens), states.table.shape[1])
    return StepInputs(
        # Not read: the forward takes the token of each request from the draft state.
        input_ids=np.zeros(count, dtype=np.int32),
        positions=positions,
        slot_mapping=slot_mapping,
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=states.table[scheduled.state_indices, :width],
        idx_mapping=scheduled.state_indices.astype(np.int32),
        request_keys=request_keys(scheduled.state_indices, states),
        page_size=pages.page_size,
    )
