"""Verification, and the correction of a step that was launched before verification was read, as a Triton kernel each.

Import it where there is a GPU; for tests on a CPU see ``fused``.
"""

from __future__ import annotations

import attrs
import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from capture_planner.runtime.execution.fused_updates import BLOCK, CHANGING, ONE_WARP, FusedUpdates, grid
from capture_planner.runtime.execution.updates import (
    DraftState,
    StepAhead,
    TokenFields,
    VerificationInputs,
    VerificationOutcome,
)
from capture_planner.runtime.executor import NULL_SLOT


class FusedVerification(FusedUpdates):
    """All updates of a step, one kernel each."""

    def correct(self, step: StepAhead, state: DraftState, outcome: VerificationOutcome) -> None:
        rows, accepted = len(step.starts) - 1, step.accepted
        both = attrs.evolve(step.target, lengths=(*step.target.lengths, *step.prefill.lengths))
        _correct[grid(rows)](
            step.starts,
            step.target.idx_mapping,
            step.target.input_ids,
            step.prefill.positions,
            step.prefill.slot_mapping,
            outcome.token,
            outcome.rejected,
            state.proposed,
            outcome.rejected if accepted is None else accepted,
            *self.cache_arguments(both),
            state.proposed.shape[1],
            0 if accepted is None else accepted.stride(0),
            rows,
            step.most,
            is_synthetic=accepted is not None,
            block=BLOCK,
            **ONE_WARP,
        )

    def prepare_drafts(
        self,
        verified: VerificationInputs,
        prefill: TokenFields,
        last: torch.Tensor,
        decode: TokenFields | None,
        outcome: VerificationOutcome | None = None,
    ) -> None:
        decodes = decode or prefill
        rows, accepted = len(verified.counts), verified.accepted
        _prepare_drafts[grid(rows)](
            verified.starts,
            verified.counts,
            verified.answers,
            verified.fields.input_ids,
            verified.fields.positions,
            prefill.input_ids,
            last,
            *self.cache_arguments(decodes),
            rows,
            verified.most,
            NULL_SLOT,
            verified.counts if accepted is None else accepted,
            0 if accepted is None else accepted.stride(0),
            verified.fields.idx_mapping,
            verified.answers if outcome is None else outcome.token,
            verified.counts if outcome is None else outcome.rejected,
            is_synthetic=accepted is not None,
            decodes=decode is not None,
            carries=outcome is not None,
            block=BLOCK,
            **ONE_WARP,
        )


@triton.jit(do_not_specialize=CHANGING)  # type: ignore[untyped-decorator]
def _correct(
    starts,
    idx_mapping,
    input_ids,
    prefill_positions,
    prefill_slots,
    newest,
    rejected,
    proposed,
    accepted,
    positions,
    slot_mapping,
    block_table,
    lengths,
    table_row,
    num_lengths,
    page_size,
    max_model_len,
    width,
    places,
    rows,
    most,
    is_synthetic: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    start = tl.load(starts + row, mask=inside, other=0)
    end = tl.load(starts + row + 1, mask=inside, other=0)
    unread = inside & (tl.load(input_ids + start, mask=inside, other=0) < 0)
    state = tl.load(idx_mapping + row, mask=unread, other=0)
    back = tl.load(rejected + state, mask=unread, other=0)
    for number in range(0, most):
        at = start + number
        mine = unread & (at < end)
        # -1 is the newest token, and -1 - i the i-th draft; a draft that was not proposed is a token already.
        token_id = tl.load(input_ids + at, mask=mine, other=0)
        draft = -2 - token_id
        token = tl.load(newest + state, mask=mine & (draft == -1), other=0)
        token += tl.load(proposed + state.to(tl.int64) * width + draft, mask=mine & (draft >= 0), other=0)
        tl.store(input_ids + at, tl.where(token_id < 0, token.to(tl.int32), token_id), mask=mine)
        position = tl.load(positions + at, mask=mine, other=0) - back
        page = tl.load(block_table + row.to(tl.int64) * table_row + position // page_size, mask=mine, other=0)
        slot = page.to(tl.int64) * page_size + position % page_size
        tl.store(positions + at, position, mask=mine)
        tl.store(prefill_positions + at, position, mask=mine)
        tl.store(slot_mapping + at, slot, mask=mine)
        tl.store(prefill_slots + at, slot, mask=mine)
    for number in range(0, num_lengths):
        pointer = tl.load(lengths + number).to(tl.pointer_type(tl.int32))
        length = tl.load(pointer + row, mask=unread, other=0)
        tl.store(pointer + row, length - back, mask=unread)
    if is_synthetic:
        given = tl.load(accepted + row * places + back, mask=unread, other=0)
        tl.store(accepted + row * places, given, mask=unread)


@triton.jit(do_not_specialize=CHANGING)  # type: ignore[untyped-decorator]
def _prepare_drafts(
    starts,
    wanted,
    answers,
    input_ids,
    positions,
    shifted,
    last,
    next_positions,
    next_slots,
    block_table,
    lengths,
    table_row,
    num_lengths,
    page_size,
    max_model_len,
    rows,
    most,
    null_slot,
    given,
    given_row,
    idx_mapping,
    newest,
    rejected,
    is_synthetic: tl.constexpr,
    decodes: tl.constexpr,
    carries: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    start = tl.load(starts + row, mask=inside, other=0)
    end = tl.load(starts + row + 1, mask=inside, other=0)
    read = tl.load(wanted + row, mask=inside, other=0)
    drafts = tl.maximum(read - 1, 0)
    first = end - 1 - drafts
    # ``agrees`` stays False after the first draft that the target does not say: greedy verification.
    accepted = row * 0
    if is_synthetic:
        most_accepted = tl.load(given + row * given_row, mask=inside, other=0)
    agrees = read > 0
    for number in range(0, most):
        token_id = tl.load(answers + first + number, mask=number < read, other=0)
        draft = tl.load(input_ids + first + number + 1, mask=number < drafts, other=0)
        if is_synthetic:
            agrees = agrees & (number < drafts) & (number < most_accepted)
        else:
            agrees = agrees & (number < drafts) & (draft == token_id)
        accepted += agrees.to(tl.int32)
        token_id = tl.where(agrees, draft.to(tl.int64), token_id)
        tl.store(shifted + first + number, token_id.to(tl.int32), mask=number < read)
    # The draft prefill reads the last row that was kept; rows past it hold rejected drafts.
    kept = end - start - drafts + accepted
    tl.store(last + row, start + kept - 1, mask=inside)
    if carries:
        state = tl.load(idx_mapping + row, mask=inside, other=0)
        tl.store(rejected + state, drafts - accepted, mask=inside)
        # The row after the last draft that was accepted says the newest token; inside a prompt nobody reads it.
        tl.store(newest + state, tl.load(answers + first + accepted, mask=inside, other=0), mask=inside)
    if decodes:
        computed = tl.load(positions + start, mask=inside, other=0) + kept
        position = tl.minimum(computed, max_model_len - 1)
        room = inside & (computed == position)
        page = tl.load(block_table + row.to(tl.int64) * table_row + position // page_size, mask=room, other=0)
        slot = page.to(tl.int64) * page_size + position % page_size
        tl.store(next_positions + row, position, mask=inside)
        tl.store(next_slots + row, tl.where(room, slot, null_slot), mask=inside)
        for number in range(0, num_lengths):
            pointer = tl.load(lengths + number).to(tl.pointer_type(tl.int32))
            tl.store(pointer + row, (position + 1).to(tl.int32), mask=inside)
