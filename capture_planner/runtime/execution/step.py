"""The values of one step, made on the host from what is known of each place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from capture_planner.runtime.execution.fields import SAMPLED_COUNTS, SAMPLED_ROWS
from capture_planner.runtime.executor import NULL_SLOT
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.scheduler import Places, Scheduled
from capture_planner.runtime.serving.speculative import sampled_counts, sampled_rows

Array = np.ndarray[Any, Any]
Made = dict[str, Array]

LOOKAHEAD = 64
"""Tokens by which decodes that go on by themselves may grow before their fields are made anew."""


def token_rows(scheduled: Scheduled, places: Places) -> tuple[Array, Array, Array]:
    """Return ``starts int32[R + 1]``, and for each token its place and its position, ``int64[T]``."""
    base, query_len = places.computed[scheduled.places], scheduled.query_len
    if query_len is not None:
        starts = np.arange(0, scheduled.num_tokens + 1, query_len, dtype=np.int32)
        if query_len == 1:
            return starts, scheduled.places, base
        return starts, np.repeat(scheduled.places, query_len), (base[:, None] + np.arange(query_len)).ravel()
    starts = np.zeros(scheduled.num_reqs + 1, dtype=np.int32)
    np.cumsum(scheduled.counts, out=starts[1:])
    positions = np.arange(scheduled.num_tokens) + np.repeat(base - starts[:-1], scheduled.counts)
    return starts, np.repeat(scheduled.places, scheduled.counts), positions


def slots(rows: Array, positions: Array, places: Places, page_size: int) -> Array:
    """Return the cache slot of each position of a place, ``int64[T]``."""
    page, offset = np.divmod(positions, page_size)
    found: Array = places.table[rows, page] * np.int64(page_size) + offset
    return found


def target_values(scheduled: Scheduled, places: Places, pages: PageFormat) -> Made:
    """Return the target's fields: tokens from each row's first uncomputed position on.

    The block table is wide enough for the ``LOOKAHEAD`` tokens after them, too.
    """
    starts, rows, positions = token_rows(scheduled, places)
    seq_lens = (places.computed[scheduled.places] + scheduled.counts).astype(np.int32)
    width = min(pages.pages(int(seq_lens.max()) + LOOKAHEAD), places.table.shape[1])
    return {
        "input_ids": places.tokens[rows, positions],
        "positions": positions,
        "slot_mapping": slots(rows, positions, places, pages.page_size),
        "query_start_loc": starts,
        "seq_lens": seq_lens,
        "block_table": places.table[:, :width].take(scheduled.places, axis=0),
        "last_token_indices": starts[1:] - 1,
        "idx_mapping": scheduled.places.astype(np.int32),
        "cu_num_draft_tokens": np.cumsum(scheduled.drafts, dtype=np.int32),
        SAMPLED_ROWS: sampled_rows(scheduled, starts, places),
        SAMPLED_COUNTS: sampled_counts(scheduled, places).astype(np.int32),
    }


def draft_prefill_values(target: Made, scheduled: Scheduled, settled: Array, places: Places) -> Made:
    """Return the drafter's fields on the target's batch: each token shifted by one.

    ``settled int64[R]`` counts the tokens of each row that verification kept. Rows past them hold
    rejected drafts, whose tokens, keys and values are overwritten before anything reads them.
    """
    rows = np.repeat(scheduled.places, scheduled.counts)
    return target | {
        "input_ids": places.tokens[rows, target["positions"] + 1],
        "last_token_indices": (target["query_start_loc"][:-1] + settled - 1).astype(np.int32),
    }


def draft_decode_values(scheduled: Scheduled, wanted: Array, places: Places, pages: PageFormat) -> Made:
    """Return the first draft decode's fields: one token a row, at ``wanted int64[R]``.

    That is where what is settled ends. The graph moves the fields on for the steps that follow. A
    position past the model's end is held at the last one and writes the null slot.
    """
    positions = np.minimum(wanted, places.max_model_len - 1)
    count = len(positions)
    found = slots(scheduled.places, positions, places, pages.page_size)
    found[wanted > positions] = NULL_SLOT
    seq_lens = (positions + 1).astype(np.int32)
    starts = np.arange(count + 1, dtype=np.int32)
    width = min(pages.pages(int(seq_lens.max()) + scheduled.draft_tokens), places.table.shape[1])
    return {
        "input_ids": np.zeros(count, dtype=np.int32),
        "positions": positions,
        "slot_mapping": found,
        "query_start_loc": starts,
        "seq_lens": seq_lens,
        "block_table": places.table[scheduled.places, :width],
        "last_token_indices": starts[:-1],
        "idx_mapping": scheduled.places.astype(np.int32),
    }


def move_on(made: Made, page_size: int, max_model_len: int) -> None:
    """Move the host's copy of a draft decode on by one token, as the graph moves the device's."""
    moved = made["positions"] + 1 < max_model_len
    positions = made["positions"] + moved
    page, offset = np.divmod(positions, page_size)
    slot = made["block_table"][np.arange(len(page)), page] * np.int64(page_size) + offset
    made["positions"], made["slot_mapping"] = positions, np.where(moved, slot, NULL_SLOT)
    made["seq_lens"] = (made["seq_lens"] + moved).astype(np.int32)


def go_on(made: Made) -> None:
    """Bring the host's copy of a decode to its next token, as its graph did on the device.

    Ids and slots are known there alone then, so they are taken out: no backend plans by them.
    """
    made["positions"] = made["positions"] + 1
    made["seq_lens"] = made["seq_lens"] + np.int32(1)
    made.pop("slot_mapping", None)
    made.pop("input_ids", None)


def _page_counts(made: Mapping[str, Array], page_size: int) -> Array:
    return -(-made["seq_lens"] // page_size)


def _page_starts(made: Mapping[str, Array], page_size: int) -> Array:
    return np.concatenate(([0], np.cumsum(_page_counts(made, page_size)))).astype(np.int32)


def _page_list(made: Mapping[str, Array], page_size: int) -> Array:
    table = made["block_table"]
    used: Array = table[np.arange(table.shape[1]) < _page_counts(made, page_size)[:, None]]
    return used


def _last_page(made: Mapping[str, Array], page_size: int) -> Array:
    last: Array = ((made["seq_lens"] - 1) % page_size + 1).astype(np.int32)
    return last


DERIVED: Mapping[str, Callable[[Mapping[str, Array], int], Array]] = {
    "qo_indptr": lambda made, page_size: made["query_start_loc"],
    "kv_lens": lambda made, page_size: made["seq_lens"],
    "paged_kv_indptr": _page_starts,
    "paged_kv_indices": _page_list,
    "paged_kv_last_page_len": _last_page,
    "mrope_positions": lambda made, page_size: np.repeat(made["positions"], 3),
}
"""Fields that follow from the common ones; made where a role declares them. Text alone has the same
position in all three sections of multimodal rope."""


def derive(made: Made, names: Iterable[str], page_size: int) -> None:
    """Add the derived fields among ``names``."""
    for name in names:
        if name in DERIVED:
            made[name] = DERIVED[name](made, page_size)
