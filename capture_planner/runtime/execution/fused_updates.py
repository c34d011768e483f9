"""The updates of ``updates`` that graphs hold, each as one Triton kernel; ``fused_verification`` has the others.

A draft step of a small batch is short, and in torch operators its updates are two dozen kernels of a
few microseconds. Import it where there is a GPU; for tests on a CPU see ``fused``.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from capture_planner.runtime.execution.updates import DraftState, TokenFields, Updates
from capture_planner.runtime.executor import NULL_SLOT, LayerCache

BLOCK = 128
"""Rows of a program."""

CHANGING = ("rows", "most")
"""Numbers that differ from step to step: a kernel that Triton specialised for them would compile while it serves."""


class FusedUpdates(Updates):
    """One kernel each, but for verification."""

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
            cache.keys.stride(1),
            cache.keys.stride(2),
            heads * dim,
            dim,
            width=triton.next_power_of_2(heads * dim),
            **ONE_WARP | {"num_warps": 4},
        )

    def taken(self, ids: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        resolved = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        _taken[grid(len(ids))](ids, answers, resolved, len(ids), block=BLOCK, **ONE_WARP)
        return resolved

    def entered(self, state: DraftState, idx_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(idx_mapping)
        states, ids = torch.empty(2, rows, dtype=torch.int64, device=idx_mapping.device)
        _entered[grid(rows)](idx_mapping, state.token, states, ids, state.padding, rows, block=BLOCK, **ONE_WARP)
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
            block=BLOCK,
            **ONE_WARP,
        )

    def advance(self, token_fields: TokenFields, rows: int, tokens: torch.Tensor | None = None) -> None:
        _advance[grid(rows)](
            token_fields.idx_mapping,
            token_fields.input_ids,
            token_fields.idx_mapping if tokens is None else tokens,
            *self.cache_arguments(token_fields),
            rows,
            NULL_SLOT,
            takes=tokens is not None,
            block=BLOCK,
            **ONE_WARP,
        )

    def cache_arguments(self, fields: TokenFields) -> tuple[torch.Tensor | int, ...]:
        """Return what a kernel needs to move requests on in the cache."""
        table, lengths = fields.block_table, fields.lengths
        place = fields.positions, fields.slot_mapping, table, self._held(lengths)
        return *place, table.stride(0), len(lengths), fields.page_size, fields.max_model_len

    def _held(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the addresses of tensors, ``int64[n]`` on their device: made once, so out of any capture.

        The first call is in a warm-up, before what is captured.
        """
        key = tuple(tensor.data_ptr() for tensor in tensors)
        if key not in self._addresses:
            self._addresses[key] = torch.tensor(key, dtype=torch.int64, device=tensors[0].device)
        return self._addresses[key]


# The kernels compute with no floats, and at most copy them; Triton 3.9 warns where a launch leaves their rules open.
# One warp: a scalar that a program both reads and writes must not be overtaken by another warp of its own.
ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}


def grid(rows: int) -> tuple[int]:
    """Return the grid of a kernel with a program for each block of rows."""
    return (-(-rows // BLOCK),)


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
    slot_stride,
    head_stride,
    size,
    dim,
    width: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, width)
    inside = element < size
    head = (element // dim).to(tl.int64)
    within = element % dim
    # A page is its tokens one after the other, so that slots are equally far from each other.
    row = tl.load(slots + token) * slot_stride + head * head_stride + within
    key = tl.load(keys + token * key_token + head * key_head + within, mask=inside)
    tl.store(key_cache + row, key.to(key_cache.dtype.element_ty), mask=inside)
    value = tl.load(values + token * value_token + head * value_head + within, mask=inside)
    tl.store(value_cache + row, value.to(value_cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=CHANGING)  # type: ignore[untyped-decorator]
def _taken(ids, answers, resolved, rows, block: tl.constexpr) -> None:
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    token = tl.load(ids + row, mask=inside, other=0).to(tl.int64)
    pending = token < 0
    answer = tl.load(answers + (-1 - token), mask=inside & pending, other=0)
    tl.store(resolved + row, tl.where(pending, answer, token), mask=inside)


@triton.jit(do_not_specialize=CHANGING)  # type: ignore[untyped-decorator]
def _entered(idx_mapping, token, states, ids, padding, rows, block: tl.constexpr) -> None:
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    state = tl.load(idx_mapping + row, mask=inside, other=-1)
    real = state >= 0
    tl.store(states + row, tl.where(real, state, padding).to(tl.int64), mask=inside)
    tl.store(ids + row, tl.load(token + state, mask=inside & real, other=0), mask=inside)


@triton.jit(do_not_specialize=CHANGING)  # type: ignore[untyped-decorator]
def _keep(
    idx_mapping, tokens, token, proposed, column, padding, width, rows, stride, first: tl.constexpr, block: tl.constexpr
) -> None:
    # One program for all rows: with several, one would move the column on before another has read it.
    at = tl.load(column)
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


@triton.jit(do_not_specialize=CHANGING)  # type: ignore[untyped-decorator]
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
    tl.store(slot_mapping + row, tl.where(moved, slot, null_slot), mask=inside)
    for number in range(0, num_lengths):
        pointer = tl.load(lengths + number).to(tl.pointer_type(tl.int32))
        length = tl.load(pointer + row, mask=moved, other=0)
        tl.store(pointer + row, length + 1, mask=moved)
    if takes:
        token_id = tl.load(tokens + row, mask=real, other=0)
        tl.store(input_ids + row, token_id.to(tl.int32), mask=real)
