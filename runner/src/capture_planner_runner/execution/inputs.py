"""The values of one forward: the contents of a role's fields, as far as the host knows them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from capture_planner.plugins.backend import NULL_PAGE, NULL_SLOT, NULL_STATE
from capture_planner.records.batch import Batch, Entry
from capture_planner_runner.execution.fields import Extents

Array = np.ndarray[Any, Any]

NO_REQUEST = -1
"""In ``idx_mapping``: the row is padding, or of a batch without requests."""


# Without slots, since one is made at every step, and that takes a third of the time.
@attrs.frozen(kw_only=True, eq=False, slots=False)
class StepInputs:
    """The values of one forward of T tokens and R requests, without padding.

    A value: the next step of a decode is another one, by ``next_draft`` or ``next_decode``. No array is
    written once it is in here; many are shared by several steps.
    """

    input_ids: Array | None
    """``int32[T]``; negative where a token is still on the device: of a step with a drafter, see
    ``updates.StepAhead``. None: only the device knows."""
    positions: Array
    """``int64[T]``"""
    slot_mapping: Array | None
    """``int64[T]``: the KV cache slot of each token. None: only the device knows."""
    query_start_loc: Array
    """``int32[R + 1]``: where the rows of each request begin."""
    seq_lens: Array
    """``int32[R]``: tokens of each request, this step's included."""
    block_table: Array
    """``int32[R, pages]``: the pages of each request, as far as this step needs them."""
    idx_mapping: Array
    """``int32[R]``: the request state index of each row of the batch; ``NO_REQUEST`` in a batch without requests."""
    last_token_indices: Array = attrs.field()
    """``int32[R]``: the last row of each request; in a draft prefill, the last that verification kept."""
    cu_num_draft_tokens: Array | None = None
    """``int32[R]``: running sum of the drafts to verify. None in a draft decode."""
    state_indices: Array | None = None
    """``int32[R]``: the row of each request in the pool of recurrent states. None in draft decodes."""
    sampled_rows: Array | None = None
    """``int64[N]``: the rows whose next token is read. None in draft decodes and warm-ups."""
    sampled_counts: Array | None = None
    """``int32[R]``: how many of ``sampled_rows`` each request has."""
    accepted_counts: Array | None = None
    """``int32[R * places]``: how many drafts of each request are accepted, where that is synthetic; see
    ``fields.accepted_field``."""
    request_keys: Array | None = None
    """``int64[T]``: what each token's request is sampled by. None: nothing is sampled."""
    proposal_rows: Array | None = None
    """``int64[T]``: which row of ``Sampler.proposed`` the draft after each token was drawn from. None: no drafts are
    verified, or nothing is sampled."""
    target_rows: Array | None = None
    """``int32[T]``: of a parallel head, the target's row that each row belongs to; -1 of a mask token."""
    adapter_lanes: Array | None = None
    """``int32[T]``: where each token's adapter is in ``active_adapters``."""
    active_adapters: Array | None = None
    """``int32[n]``: the adapters of the batch, each once: counted from 1, 0 of rows without one. None: a plan without
    LoRA."""
    num_tokens_across_dp: Array | None = None
    """``int32[replicas]``: the tokens that each replica runs, padding included. None: there is one."""
    page_size: int
    """Tokens per page."""

    @last_token_indices.default
    def _last_rows(self) -> Array:
        rows: Array = self.query_start_loc[1:] - 1
        return rows

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    @functools.cached_property
    def declared(self) -> Mapping[str, Array]:
        """The arrays by the names that contracts declare; read-only. Those of ``DERIVED`` are made when
        they are first read.

        What the host does not know, and what a backend fills itself, is not in it.
        """
        return _DeclaredArrays(self)

    def array(self, name: str) -> Array | None:
        """Return the array of a declared field; None where the host does not know it."""
        is_known = name in self.declared or name in DERIVED
        return self.declared[name] if is_known else None

    @property
    def is_dummy(self) -> bool:
        """Whether the batch is of no request, as ``null_inputs`` makes it: all of its rows are padding."""
        return bool((self.idx_mapping == NO_REQUEST).all())

    def next_draft(self, max_model_len: int) -> StepInputs:
        """Return the draft decode after this one, as its graph advances the fields on the device.

        A request at the model's end stays at its last position, and writes the null slot.
        """
        moved = self.positions + 1 < max_model_len
        positions = self.positions + moved
        page, offset = np.divmod(positions, self.page_size)
        slots = self.block_table[np.arange(len(page)), page] * np.int64(self.page_size) + offset  # the table is int32
        return attrs.evolve(
            self,
            positions=positions,
            slot_mapping=np.where(moved, slots, NULL_SLOT),
            seq_lens=(self.seq_lens + moved).astype(np.int32),
        )

    def next_decode(self) -> StepInputs:
        """Return the decode after this one, whose fields its graph filled on the device.

        The host knows neither ids nor slots of it; no backend that allows this plans by them.
        """
        # By hand, since ``attrs.evolve`` takes ten times as long, and this is all that the host does.
        after = object.__new__(StepInputs)
        after.__dict__.update(
            self.__dict__,
            input_ids=None,
            positions=self.positions + 1,
            slot_mapping=None,
            seq_lens=self.seq_lens + np.int32(1),
        )
        after.__dict__.pop("declared", None)  # it is of the values before
        return after


def query_lens(counts: Array, *, prompts: bool) -> tuple[int | None, int | None]:
    """Return ``query_len`` and ``max_query_len`` of ``Batch`` for rows of these lengths.

    :param counts: ``int64[R]``: the tokens of each row.
    :param prompts: whether a row is in its prompt.
    """
    first = int(counts[0])
    if (counts == first).all():
        # Uniform: prompts of equal length have a query length too, and ``past_prompt`` tells them apart.
        return first, None
    return None, None if prompts else int(counts.max())


def null_inputs(counts: Array, longest: int, page_size: int, ahead: int = 0) -> StepInputs:
    """Return inputs of ``counts int64[R]`` tokens of no request: null page, null state and the draft state's padding.

    Sequences are as long as the queries, the shortest that there can be, so that least is read (vLLM 0.33 does so too).

    :param longest: positions that the model has.
    :param ahead: draft decodes that go on from this one, which the block table is wide enough for.
    """
    reqs, tokens = len(counts), int(counts.sum())
    starts = np.zeros(reqs + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    lengths = np.minimum(counts, longest).astype(np.int32)
    # As wide as the lengths say, since lists of pages are made from both.
    pages = -(-(int(lengths.max()) + ahead) // page_size)
    return StepInputs(
        input_ids=np.zeros(tokens, dtype=np.int32),
        positions=np.minimum(np.arange(tokens) - np.repeat(starts[:-1], counts), longest - 1),
        slot_mapping=np.full(tokens, NULL_SLOT, dtype=np.int64),
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=np.full((reqs, pages), NULL_PAGE, dtype=np.int32),
        idx_mapping=np.full(reqs, NO_REQUEST, dtype=np.int32),
        # As of a decode that verifies: all tokens of a request but its first are drafts.
        cu_num_draft_tokens=(starts[1:] - np.arange(1, reqs + 1)).astype(np.int32),
        state_indices=np.full(reqs, NULL_STATE, dtype=np.int32),
        page_size=page_size,
    )


class _DeclaredArrays(dict[str, Array]):
    """The arrays of a step by declared name; see ``StepInputs.declared``.

    A plain dict to its readers, as it is read for each field of a step. Only a derived name is missing.
    """

    def __init__(self, inputs: StepInputs) -> None:
        super().__init__({name: array for name, array in vars(inputs).items() if array is not None})
        # The only value that is no array.
        del self["page_size"]
        self._inputs = inputs

    def __missing__(self, name: str) -> Array:
        array = self[name] = DERIVED[name](self._inputs)
        return array


def _page_counts(inputs: StepInputs) -> Array:
    return -(-inputs.seq_lens // inputs.page_size)


def _page_starts(inputs: StepInputs) -> Array:
    return np.concatenate(([0], np.cumsum(_page_counts(inputs)))).astype(np.int32)


def _page_list(inputs: StepInputs) -> Array:
    table = inputs.block_table
    used: Array = table[np.arange(table.shape[1]) < _page_counts(inputs)[:, None]]
    return used


def _last_page_len(inputs: StepInputs) -> Array:
    # From 1 to a whole page: `seq_lens % page_size` would say 0 of a page that is full.
    last: Array = ((inputs.seq_lens - 1) % inputs.page_size + 1).astype(np.int32)
    return last


DERIVED: Mapping[str, Callable[[StepInputs], Array]] = {
    "qo_indptr": lambda inputs: inputs.query_start_loc,
    "kv_lens": lambda inputs: inputs.seq_lens,
    "paged_kv_indptr": _page_starts,
    "paged_kv_indices": _page_list,
    "paged_kv_last_page_len": _last_page_len,
    "mrope_positions": lambda inputs: np.repeat(inputs.positions, 3),
}
"""Fields that follow from the common ones. Text has the same position in all three sections of multimodal rope."""


@attrs.frozen(kw_only=True, eq=False)
class ForwardStep:
    """One forward of one role: its batch, and the graph of the plan that serves it."""

    batch: Batch
    entry: Entry | None
    """Entry of the graph that is captured or replayed; None: the forward runs eagerly."""
    inputs: StepInputs
    real: Extents
    extents: Extents
    """Extents at which the model runs: the entry's, or the real ones."""
    for_capture: bool = False
    """Whether the entry is warmed up or captured."""

    @property
    def is_full(self) -> bool:
        """Whether attention runs inside the graph, at padded extents."""
        return self.entry is not None and self.entry.num_reqs is not None
