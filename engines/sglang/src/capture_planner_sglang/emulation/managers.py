"""SGLang's graph runners as managers: which graph serves a batch.

A runner of decodes is asked about requests, one of prefills about tokens. A batch in which every request is past its
prompt and has the same number of tokens is a decode (with speculation: a verification); all others are prefills.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property

import attrs

from capture_planner.dispatch.dispatcher import Dispatch, served
from capture_planner.engines.emulation import CapturedGraph
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry

_MOST_PADDING = 2
"""A prefill graph that would run more than this many times the batch's tokens is not replayed."""


def aligned(size: int, alignment: int) -> int:
    """Round a size up to the alignment."""
    return -(-size // alignment) * alignment


def decode_sizes(sizes: Iterable[int], *, pool: int, alignment: int, width: int) -> tuple[int, ...]:
    """Return the request counts that a decode runner captures, ascending.

    ``pool`` is the size of the request pool, ``width`` the tokens of a request. A size whose tokens the
    alignment does not divide is dropped; a list that passes the pool's end is cut there.
    """
    wanted = set(sizes)
    # Rounded up, or a pool that is no multiple would lose its own size (get_batch_sizes_to_capture).
    most = aligned(pool, alignment)
    # A small pool would else end between two sizes, and its largest batches run eager.
    if max(wanted, default=0) > most:
        wanted.add(most)
    return tuple(sorted(size for size in wanted if size * width % alignment == 0 and size <= most))


def prefill_sizes(sizes: Iterable[int], *, most: int, alignment: int) -> tuple[int, ...]:
    """Return the token counts that a prefill runner captures, ascending; ``most`` is all that fits."""
    return tuple(sorted({aligned(size, alignment) for size in sizes if size <= most}))


def ranks_bucket(sizes: tuple[int, ...], requests: Iterable[int], *, padding: bool = True) -> int | None:
    """Return the decode size for the largest of attention-DP ranks' ``requests``, 0 for an idle one; None: eager."""
    most = max(requests, default=0)
    if not padding:
        return most if most in sizes else None
    if not sizes or most > sizes[-1]:
        return None
    return sizes[bisect_left(sizes, most)]


@attrs.frozen(kw_only=True)
class DecodeGraphs:
    """The graphs of one decode runner: a size in requests, each with ``width`` tokens."""

    role: Role
    mode: GraphMode
    """FULL, or PIECEWISE where the runner captures in segments; both pad requests."""
    sizes: tuple[int, ...]
    width: int
    padding: bool = True
    loras: tuple[int, ...] = (0,)
    """Adapter counts that each size is captured for, in order of capture."""
    draft_steps: int | None = None
    microbatches: int = 1
    """Parts of a batch that overlap in the graph."""
    agreed: bool = True
    """Whether ranks agree on each batch before it runs; where they do not, microbatches never overlap."""

    @cached_property
    def entries(self) -> dict[tuple[int, int], Entry]:
        """By requests and adapters: largest first, and for each size the one with adapters first."""
        return {
            (size, loras): Entry(
                mode=self.mode,
                num_tokens=size * self.width,
                num_reqs=size,
                query_len=self.width,
                active_loras=loras,
                draft_steps=self.draft_steps,
            )
            for size in reversed(self.sizes)
            for loras in self.loras
        }

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """In the order of ``entries``."""
        return tuple(
            CapturedGraph(role=self.role, entry=entry, microbatches=self.microbatches)
            for entry in self.entries.values()
        )

    def find(self, batch: Batch) -> Dispatch:
        if batch.uniform_query_len != self.width:
            return Dispatch(None, reason=Reason.UNCOVERED)
        size = ranks_bucket(self.sizes, (batch.num_reqs,), padding=self.padding)
        if size is None:
            return Dispatch(None, reason=Reason.SIZES if batch.num_reqs > self.sizes[-1] else Reason.UNCOVERED)
        # The graph holds two halves of a batch, and without a collective nothing says that all ranks split theirs.
        if self.microbatches > 1 and not self.agreed:
            return Dispatch(None, reason=Reason.SPLIT)
        return served(self.entries[size, self.loras[0] if batch.active_loras else self.loras[-1]], batch)


@attrs.frozen(kw_only=True)
class PrefillGraphs:
    """The graphs of one prefill runner: a size in tokens, over requests of any lengths."""

    role: Role
    mode: GraphMode
    """PIECEWISE where attention stays outside (``breakable``), FULL where it is captured too."""
    sizes: tuple[int, ...]
    num_reqs: int | None = None
    """Request slots of a FULL graph."""
    max_reqs: int | None = None
    """Most requests of a batch that is served; None: any number."""
    max_seq_len: int | None = None
    loras: int = 0

    @cached_property
    def entries(self) -> dict[int, Entry]:
        """By tokens, largest first."""
        return {
            size: Entry(mode=self.mode, num_tokens=size, num_reqs=self.num_reqs, active_loras=self.loras)
            for size in reversed(self.sizes)
        }

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """Largest first."""
        return tuple(CapturedGraph(role=self.role, entry=each, prompts_only=True) for each in self.entries.values())

    def find(self, batch: Batch) -> Dispatch:
        tokens = batch.num_tokens
        if (
            (self.max_reqs is not None and batch.num_reqs > self.max_reqs)
            or (self.max_seq_len is not None and _longest(batch) > self.max_seq_len)
            or tokens > self.sizes[-1]
        ):
            return Dispatch(None, reason=Reason.SIZES)
        size = self.sizes[bisect_left(self.sizes, tokens)]
        # 3,208 tokens padded to 8,192 were slower than eager (sglang#31487); the same
        # bound refuses a cheap 5 to 16 (#40253).
        if size > tokens * _MOST_PADDING:
            return Dispatch(None, reason=Reason.UNCOVERED)
        return served(self.entries[size], batch)


def _longest(batch: Batch) -> int:
    """The longest sequence of a batch of whole prompts; without their lengths, the least it can be."""
    return batch.query_len if batch.query_len is not None else -(-batch.num_tokens // batch.num_reqs)


@attrs.frozen(kw_only=True)
class SglangManager:
    """One role's decode and prefill graphs."""

    role: Role
    decodes: DecodeGraphs | None = None
    prefills: PrefillGraphs | None = None
    speculative: bool = False
    """Whether a batch of any one width past its prompts is a verification; without, only width 1 decodes."""

    @property
    def mode(self) -> GraphMode:
        """The nearest mode: PIECEWISE or FULL also where only prefills have graphs."""
        decode = self.decodes.mode if self.decodes else GraphMode.NONE
        mixed = self.prefills.mode if self.prefills else GraphMode.NONE
        if mixed is GraphMode.NONE:
            return GraphMode.FULL_DECODE_ONLY if decode is GraphMode.FULL else decode
        if decode is GraphMode.FULL and mixed is GraphMode.PIECEWISE:
            return GraphMode.FULL_AND_PIECEWISE
        return mixed

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """In the order of capture: prefills first, and the largest of each first."""
        return tuple(graph for part in (self.prefills, self.decodes) if part for graph in part.graphs)

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the graph of the runner that the batch is for; with attention DP, as if all ranks had it."""
        if not 0 < batch.num_reqs <= batch.num_tokens or batch.active_loras < 0:
            return Dispatch(None, reason=Reason.NOT_ADMISSIBLE)
        width = batch.uniform_query_len
        is_decode = width is not None if self.speculative else width == 1
        part = self.decodes if is_decode or self.role is Role.DRAFT_DECODE else self.prefills
        if part is None:
            return Dispatch(None, reason=Reason.MODE)
        return part.find(batch)
