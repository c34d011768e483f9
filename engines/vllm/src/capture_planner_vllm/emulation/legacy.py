"""vLLM 0.33's legacy dispatcher, model runner V1: pad to the next size, then look the shape up.

The rules of ``vllm/v1/cudagraph_dispatcher.py`` and of the runner's call to it. A prompt of exactly 1 + K
tokens counts as a decode.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.emulation import CapturedGraph
from capture_planner.engines.parsing import refusal
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner_vllm.emulation.overlap import Overlap
from capture_planner_vllm.emulation.table import answered


def draft_mode(mode: GraphMode) -> GraphMode:
    """Return the mode of every draft position: PIECEWISE where mixed batches have graphs, else NONE."""
    return GraphMode.NONE if mode.mixed_mode is GraphMode.NONE else GraphMode.PIECEWISE


def speculative_sizes(sizes: tuple[int, ...], max_size: int, *, query_len: int, mode: GraphMode) -> tuple[int, ...]:
    """Return sizes for all batches, in multiples of ``query_len`` for FULL decodes; raises ``FlagError`` if empty."""
    if mode.decode_mode is not GraphMode.FULL or query_len <= 1 or not sizes:
        return sizes
    rounded = {-(-size // query_len) * query_len for size in sizes}
    kept = sorted(size for size in rounded if size <= max_size)
    # Rounding up may leave no size, though one request of 1 + K tokens fits.
    if not kept and query_len <= max_size:
        kept = [query_len]
    if not kept:
        message = f"no capture size up to {max_size} is a multiple of 1 + K = {query_len}"
        raise refusal("--max-cudagraph-capture-size", message, f"allow sizes up to {query_len}, or draft fewer tokens")
    return tuple(kept)


@attrs.frozen(kw_only=True)
class PaddedManager:
    """One role's graphs under the legacy dispatcher."""

    role: Role
    mode: GraphMode
    sizes: tuple[int, ...]
    """In tokens, ascending, as ``speculative_sizes`` returns them."""
    max_num_reqs: int
    query_len: int
    """Tokens of a uniform decode: 1 + K."""
    lora_cases: tuple[int, ...] = (0,)
    """Adapter counts captured for, ascending. Without 0, batches without adapters run eager."""
    max_loras: int = 0
    specialize_lora: bool = False
    """Whether batches with fewer active adapters have graphs of their own."""
    overlap: Overlap | None = None
    """How batches are split into microbatches; None: none is."""
    graphs: tuple[CapturedGraph, ...] = attrs.field(init=False, repr=False, eq=False)
    """In the order of capture: PIECEWISE before FULL, each by tokens and adapters, largest first."""
    _keys: frozenset[Entry] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        keys = frozenset(self._entries())
        ordered = sorted(keys, key=_order)
        graphs = tuple(CapturedGraph(role=self.role, entry=entry) for entry in ordered)
        if self.overlap is not None:
            graphs = tuple(map(self.overlap.replacement, graphs))
        object.__setattr__(self, "graphs", graphs)
        object.__setattr__(self, "_keys", keys)

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the dispatcher's answer once everything is captured."""
        own = self.padded(batch, batch.num_tokens, (GraphMode.FULL, GraphMode.PIECEWISE))
        return own if self.overlap is None else self.overlap.legacy(own, batch, decode=self._is_whole(batch))

    def padded(self, batch: Batch, tokens: int, modes: Sequence[GraphMode]) -> Dispatch:
        """Return the answer for ``tokens`` rows, padding by other ranks included, in one of ``modes``."""
        if tokens <= 0 or (batch.active_loras > 0 and not self._has_loras):
            return answered(None, batch, Reason.NOT_ADMISSIBLE, tokens=tokens)
        if self.mode is GraphMode.NONE:
            return answered(None, batch, Reason.MODE, tokens=tokens)
        index = bisect_left(self.sizes, tokens)
        if index == len(self.sizes):
            return answered(None, batch, Reason.SIZES, tokens=tokens)
        size = self.sizes[index]
        for entry in (
            self._full(size, self._is_decode(batch), self._case(batch)),
            Entry(mode=GraphMode.PIECEWISE, num_tokens=size, active_loras=self._case(batch)),
        ):
            if entry.mode in modes and entry in self._keys:
                return answered(CapturedGraph(role=self.role, entry=entry), batch, None)
        return answered(None, batch, self._reason(batch), tokens=tokens)

    @property
    def _has_loras(self) -> bool:
        return self.max_loras > 0 or self.role.is_drafter

    def _case(self, batch: Batch) -> int:
        """Return the adapter count to look for; drafters run without adapters."""
        if batch.active_loras <= 0 or self.role.is_drafter:
            return 0
        # Graphs are captured for the most adapters only, so that every count looks for those.
        if not self.specialize_lora:
            return self.max_loras + 1
        cases = [case for case in self.lora_cases if case]
        return next((case for case in cases if case >= batch.active_loras), batch.active_loras)

    def _is_whole(self, batch: Batch) -> bool:
        # By length alone: V1 does not ask whether requests are past their prompts.
        return batch.query_len == self.query_len and batch.num_tokens == batch.num_reqs * self.query_len

    def _is_decode(self, batch: Batch) -> bool:
        return self._is_whole(batch) and self.mode.is_separate

    def _full(self, tokens: int, is_decode: bool, case: int) -> Entry:
        query_len = self.query_len if is_decode else None
        reqs = min(tokens // (query_len or 1), self.max_num_reqs)
        return Entry(mode=GraphMode.FULL, num_tokens=tokens, num_reqs=reqs, query_len=query_len, active_loras=case)

    def _entries(self) -> Iterable[Entry]:
        for size in self.sizes:
            for case in self.lora_cases:
                if self.mode.mixed_mode is GraphMode.PIECEWISE:
                    yield Entry(mode=GraphMode.PIECEWISE, num_tokens=size, active_loras=case)
                elif self.mode.mixed_mode is GraphMode.FULL:
                    yield self._full(size, False, case)
                # Sizes are whole requests here, so vLLM's lower bound of 1 + K tokens always holds.
                if self.mode.is_separate and size <= self.query_len * self.max_num_reqs:
                    yield self._full(size, True, case)

    def _reason(self, batch: Batch) -> Reason:
        has_case = self._case(batch) in self.lora_cases
        has_kind = self.mode.mixed_mode is not GraphMode.NONE or self._is_decode(batch)
        return Reason.SIZES if has_case and has_kind else Reason.MODE


def _order(entry: Entry) -> tuple[bool, int, int]:
    return entry.mode is GraphMode.FULL, -entry.num_tokens, -entry.active_loras
