"""The updates of ``updates``, each as one Triton kernel.

A draft step of a small batch is short, and in torch operators its updates are two dozen kernels of a
few microseconds. Import it where there is a GPU; for tests on a CPU see ``fused``.
"""

from __future__ import annotations

import attrs
import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from capture_planner.plugins.backend import NULL_SLOT, LayerCache
from capture_planner_runner.execution.updates import (
    DraftState,
    StepAhead,
    TokenFields,
    Updates,
    VerificationInputs,
    VerificationOutcome,
)

_BLOCK = 128
"""Rows of a program."""

_CHANGING = ("rows", "most")
"""Numbers that differ from step to step: a kernel that Triton specialised for them would compile while it serves."""


class FusedUpdates(Updates):
    """All updates of a step, one kernel each."""

    def __init__(self) -> None:
        self._addresses: dict[tuple[int, ...], torch.Tensor] = {}

    def store(self, cache: LayerCache, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        tokens, heads, dim = keys.shape
        if not tokens:
            return
        # The kernel reads a token's heads by strides, but the elements of a head in a row.
        keys, values = (each if each.stride(2) == 1 else each.contiguous() for each in (keys, values))
        _store[(tokens,)](
            keys,
            values,
            slots,
            cache.keys,
            cache.values,
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            # For both caches: keys and values of a layer are laid out alike.
            *cache.keys.stride()[:3],
            cache.keys.shape[1],
            heads * dim,
            dim,
            # tl.arange takes powers of two alone; the kernel masks what is beyond the size.
            width=triton.next_power_of_2(heads * dim),
            # No program of this kernel reads what it writes, so several warps are safe.
            **_ONE_WARP | {"num_warps": 4},
        )

    def taken(self, ids: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        resolved = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        _taken[_grid(len(ids))](ids, answers, resolved, len(ids), block=_BLOCK, **_ONE_WARP)
        return resolved

    def entered(self, state: DraftState, idx_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(idx_mapping)
        states, ids = torch.empty(2, rows, dtype=torch.int64, device=idx_mapping.device)
        _entered[_grid(rows)](idx_mapping, state.token, states, ids, state.padding, rows, block=_BLOCK, **_ONE_WARP)
        return states, ids

    def keep(self, state: DraftState, idx_mapping: torch.Tensor, tokens: torch.Tensor, *, first: bool) -> None:
        _keep[(1,)](
            idx_mapping,
            tokens,
            state.token,
            state.proposed,
            state.column,
            state.padding,
            state.proposed.shape[1],
            len(tokens),
            tokens.stride(0),
            first=first,
            block=_BLOCK,
            **_ONE_WARP,
        )

    def advance(self, token_fields: TokenFields, rows: int, tokens: torch.Tensor | None = None) -> None:
        _advance[_grid(rows)](
            token_fields.idx_mapping,
            token_fields.input_ids,
            token_fields.idx_mapping if tokens is None else tokens,
            *self._cache_arguments(token_fields),
            rows,
            NULL_SLOT,
            takes=tokens is not None,
            block=_BLOCK,
            **_ONE_WARP,
        )

    def correct(self, step: StepAhead, state: DraftState, outcome: VerificationOutcome) -> None:
        rows, accepted = len(step.starts) - 1, step.accepted
        # In one launch: the draft prefill has the same rows, and its lengths go back by the same numbers.
        both = attrs.evolve(step.target, lengths=(*step.target.lengths, *step.prefill.lengths))
        _correct[_grid(rows)](
            step.starts,
            step.target.idx_mapping,
            step.target.input_ids,
            step.prefill.positions,
            step.prefill.slot_mapping,
            outcome.token,
            outcome.rejected,
            state.proposed,
            outcome.rejected if accepted is None else accepted,
            *self._cache_arguments(both),
            state.proposed.shape[1],
            0 if accepted is None else accepted.stride(0),
            rows,
            step.most,
            is_synthetic=accepted is not None,
            block=_BLOCK,
            **_ONE_WARP,
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
        _prepare_drafts[_grid(rows)](
            verified.starts,
            verified.counts,
            verified.answers,
            verified.fields.input_ids,
            verified.fields.positions,
            prefill.input_ids,
            last,
            *self._cache_arguments(decodes),
            rows,
            verified.most,
            NULL_SLOT,
            # Where a step has none, any tensor will do: the kernel does not touch it then.
            verified.counts if accepted is None else accepted,
            0 if accepted is None else accepted.stride(0),
            verified.fields.idx_mapping,
            verified.answers if outcome is None else outcome.token,
            verified.counts if outcome is None else outcome.rejected,
            is_synthetic=accepted is not None,
            decodes=decode is not None,
            carries=outcome is not None,
            block=_BLOCK,
            **_ONE_WARP,
        )

    def _cache_arguments(self, fields: TokenFields) -> tuple[torch.Tensor | int, ...]:
        """Return what a kernel needs to move requests on in the cache."""
        table, lengths = fields.block_table, fields.lengths
        key = tuple(tensor.data_ptr() for tensor in lengths)
        if key not in self._addresses:
            # Copied from pageable memory, so never in a capture: the warm-up before it has been here.
            self._addresses[key] = torch.tensor(key, dtype=torch.int64, device=lengths[0].device)
        place = fields.positions, fields.slot_mapping, table, self._addresses[key]
        return *place, table.stride(0), len(lengths), fields.page_size, fields.max_model_len


# The kernels compute with no floats, and at most copy them; Triton 3.9 warns where a launch leaves their rules open.
# One warp: a scalar that a program both reads and writes must not be overtaken by another warp of its own.
_ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}


def _grid(rows: int) -> tuple[int]:
    """Return the grid of a kernel with a program for each block of rows."""
    return (-(-rows // _BLOCK),)


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    keys,
    values,
    slots,
    key_cache,
    value_cache,
    key_token,
    key_head,
    value_token,
    value_head,
    page_stride,
    slot_stride,
    head_stride,
    page_size,
    size,
    dim,
    width: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, width)
    inside = element < size
    head = (element // dim).to(tl.int64)
    within = element % dim
    slot = tl.load(slots + token)
    # In 64 bits, as slots are: pages may lie far apart.
    row = slot // page_size * page_stride + slot % page_size * slot_stride + head * head_stride + within
    key = tl.load(keys + token * key_token + head * key_head + within, mask=inside)
    tl.store(key_cache + row, key.to(key_cache.dtype.element_ty), mask=inside)
    value = tl.load(values + token * value_token + head * value_head + within, mask=inside)
    tl.store(value_cache + row, value.to(value_cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _taken(ids, answers, resolved, rows, block: tl.constexpr) -> None:
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    token = tl.load(ids + row, mask=inside, other=0).to(tl.int64)
    pending = token < 0
    answer = tl.load(answers + (-1 - token), mask=inside & pending, other=0)
    tl.store(resolved + row, tl.where(pending, answer, token), mask=inside)


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _entered(idx_mapping, token, states, ids, padding, rows, block: tl.constexpr) -> None:
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    state = tl.load(idx_mapping + row, mask=inside, other=-1)
    real = state >= 0
    tl.store(states + row, tl.where(real, state, padding).to(tl.int64), mask=inside)
    tl.store(ids + row, tl.load(token + state, mask=inside & real, other=0), mask=inside)


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _keep(
    idx_mapping, tokens, token, proposed, column, padding, width, rows, stride, first: tl.constexpr, block: tl.constexpr
) -> None:
    # One program for all rows: with several, one would move the column on before another has read it.
    at = tl.load(column)
    # From the device, since a replay cannot be given a column by the host.
    if first:
        at = at * 0
    for start in range(0, rows, block):
        row = start + tl.arange(0, block)
        inside = row < rows
        state = tl.load(idx_mapping + row, mask=inside, other=-1)
        state = tl.where(state >= 0, state, padding).to(tl.int64)
        # Padded rows all write the last state, which no request has; which of them wins does not matter.
        token_id = tl.load(tokens + row * stride, mask=inside, other=0)
        tl.store(token + state, token_id, mask=inside)
        tl.store(proposed + state * width + at, token_id, mask=inside)
    tl.store(column, tl.minimum(at + 1, width - 1))


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _advance(
    idx_mapping,
    input_ids,
    tokens,
    positions,
    slot_mapping,
    block_table,
    lengths,
    table_row,
    num_lengths,
    page_size,
    max_model_len,
    rows,
    null_slot,
    takes: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    real = tl.load(idx_mapping + row, mask=inside, other=-1) >= 0
    position = tl.load(positions + row, mask=real, other=0)
    # A request at the model's end stays where it is, or its position would index past rope and pages.
    moved = real & (position + 1 < max_model_len)
    position += moved.to(tl.int64)
    tl.store(positions + row, position, mask=real)
    page = tl.load(block_table + row.to(tl.int64) * table_row + position // page_size, mask=moved, other=0)
    slot = page.to(tl.int64) * page_size + position % page_size
    # For padded rows too, which stay on the null slot.
    tl.store(slot_mapping + row, tl.where(moved, slot, null_slot), mask=inside)
    for number in range(0, num_lengths):
        pointer = tl.load(lengths + number).to(tl.pointer_type(tl.int32))
        length = tl.load(pointer + row, mask=moved, other=0)
        tl.store(pointer + row, length + 1, mask=moved)
    if takes:
        token_id = tl.load(tokens + row, mask=real, other=0)
        tl.store(input_ids + row, token_id.to(tl.int32), mask=real)


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
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
    # Decided before the loop, which replaces the negative ids.
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


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
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
