"""The first table of vLLM's model runner V2, from before candidates were kept by kind of batch.

One size for a number of tokens, whoever asks; decodes look in the part of it that decodes can fill. It is that
of ``vllm/v1/worker/gpu/cudagraph_utils.py`` at vLLM's commit 00383f8. No flags lead to it here, as those of
0.33 mean the later table; it is called from Python, to compare the two.
"""

from __future__ import annotations

from bisect import bisect_left

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.emulation import CapturedGraph
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner_vllm.table import answered


@attrs.frozen(kw_only=True)
class FirstManager:
    """The target's graphs and table, as the first model runner V2 had them."""

    mode: GraphMode
    sizes: tuple[int, ...]
    """In tokens, ascending."""
    max_num_reqs: int
    query_len: int = 1
    """Tokens of a uniform decode: 1 + K."""
    role: Role = attrs.field(default=Role.TARGET, init=False)

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """PIECEWISE before FULL, each largest first."""
        entries = []
        for size in self.sizes:
            if self.mode.is_separate and self._is_decode_size(size):
                entries.append(self._entry(GraphMode.FULL, size, is_decode=True))
            if self.mode.mixed_mode is not GraphMode.NONE:
                entries.append(self._entry(self.mode.mixed_mode, size, is_decode=False))
        entries.sort(key=lambda entry: (entry.mode is GraphMode.FULL, -entry.num_tokens))
        return tuple(CapturedGraph(role=self.role, entry=entry) for entry in entries)

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the answer once everything is captured. Prompts are not asked about."""
        is_decode = batch.query_len == self.query_len and (
            batch.num_tokens == self.query_len * batch.num_reqs
        )
        mode = self.mode.decode_mode if is_decode else self.mode.mixed_mode
        if mode is GraphMode.NONE:
            return answered(None, batch, Reason.MODE)
        if batch.num_tokens < 1:
            return answered(None, batch, Reason.NOT_ADMISSIBLE)
        index = bisect_left(self.sizes, batch.num_tokens)
        separate = is_decode and self.mode.is_separate
        if index == len(self.sizes) or (separate and not self._is_decode_size(self.sizes[index])):
            return answered(None, batch, Reason.SIZES)
        entry = self._entry(mode, self.sizes[index], is_decode=separate)
        return answered(CapturedGraph(role=self.role, entry=entry), batch, None)

    def _is_decode_size(self, size: int) -> bool:
        return self.query_len <= size <= self.max_num_reqs * self.query_len

    def _entry(self, mode: GraphMode, size: int, *, is_decode: bool) -> Entry:
        if mode is GraphMode.PIECEWISE:
            return Entry(mode=mode, num_tokens=size)
        if not is_decode:
            return Entry(mode=mode, num_tokens=size, num_reqs=min(size, self.max_num_reqs))
        reqs = min(-(-size // self.query_len), self.max_num_reqs)
        return Entry(mode=mode, num_tokens=size, num_reqs=reqs, query_len=self.query_len)
