"""vLLM 0.33's dual batch overlap: batches that are split into microbatches, and the graphs of all of them.

The rules of ``_maybe_ubatch_twin`` in ``v1/worker/gpu/cudagraph_utils.py`` and of ``dp_utils.py`` there, and for
model runner V1 of ``v1/worker/dp_utils.py`` and ``gpu_ubatch_wrapper.py``. Ranks split a batch only together, so an
answer is about ranks that all run the same batch.
"""

from __future__ import annotations

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.emulation import CapturedGraph
from capture_planner.modes import GraphMode, Reason
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch


@attrs.frozen(kw_only=True)
class Overlap:
    """How batches are split, where several data-parallel ranks overlap microbatches."""

    microbatches: int
    decode_tokens: int
    """Decodes of the full width are split from so many tokens on."""
    prefill_tokens: int
    """All other batches are."""

    def splits(self, tokens: int, *, decode: bool) -> bool:
        return tokens >= (self.decode_tokens if decode else self.prefill_tokens)

    def twin(self, graph: CapturedGraph) -> CapturedGraph | None:
        """Return the graph of microbatches that model runner V2 captures after a graph, or None."""
        entry = graph.entry
        if entry.mode is not GraphMode.FULL or entry.num_reqs is None or entry.num_tokens % entry.num_reqs:
            return None
        # Requests of one length keep the split that was captured (_maybe_ubatch_twin).
        width = entry.num_tokens // entry.num_reqs
        if entry.query_len not in (None, width) or entry.num_tokens < max(self.microbatches, self.decode_tokens):
            return None
        return attrs.evolve(graph, entry=replace(entry, query_len=width), microbatches=self.microbatches)

    def replacement(self, graph: CapturedGraph) -> CapturedGraph:
        """Return the graph that model runner V1 captures for a key: of microbatches, or of the whole batch."""
        entry = graph.entry
        splits = entry.mode is GraphMode.FULL and entry.query_len is not None and entry.num_tokens >= self.decode_tokens
        return attrs.evolve(graph, microbatches=self.microbatches) if splits else graph

    def legacy(self, own: Dispatch, batch: Batch, *, decode: bool) -> Dispatch:
        """Return model runner V1's answer, where without overlap it is ``own``.

        It has one graph for a number of tokens, and a batch that is split otherwise than its graph runs eager.
        """
        rows, most = batch.num_tokens + own.padded_tokens, self.microbatches - 1
        # is_last_ubatch_empty of v1/worker/ubatch_utils.py: such a batch is not split.
        has_empty = rows // self.microbatches * most >= batch.num_tokens
        splits = self.splits(batch.num_tokens, decode=decode) and not has_empty
        entry = own.entry
        if entry is None or splits is (self.replacement(CapturedGraph(role=batch.role, entry=entry)).microbatches > 1):
            return own
        if entry.mode is GraphMode.PIECEWISE and not splits:
            return own
        return Dispatch(None, padded_tokens=own.padded_tokens, reason=Reason.SPLIT)
