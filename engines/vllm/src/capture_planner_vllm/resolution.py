"""The last rewrites of vLLM's mode, by the attention backends (``resolve_cudagraph_mode_and_sizes``)."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from capture_planner.engines.parsing import refusal
from capture_planner.errors import FlagError
from capture_planner.modes import GraphMode, GraphSupport


@attrs.frozen(kw_only=True)
class Ladder:
    """The inputs of the rewrites, except the mode; ``note`` is called with rule, before, after, message."""

    support: GraphSupport
    backend: str
    query_len: int
    splits_attention: bool
    graph_partition: bool
    compiles: bool
    """Whether vLLM's own compilation runs, in pieces."""
    piecewise_capture: bool
    note: Callable[[str, GraphMode, GraphMode, str], None]

    def resolve(self, mode: GraphMode) -> GraphMode:
        """Return the mode that the backend supports; raises ``FlagError`` where there is none."""
        if mode is GraphMode.NONE:
            return mode
        if mode.mixed_mode is GraphMode.FULL and self.support < GraphSupport.ALWAYS:
            if self.support is GraphSupport.NEVER:
                raise self._no_graph(mode)
            after = GraphMode.FULL_AND_PIECEWISE if self.splits_attention else GraphMode.FULL_DECODE_ONLY
            mode = self._step("mixed-support", mode, after, "captures no mixed batches")
        if mode.decode_mode is GraphMode.FULL and self.support is GraphSupport.NEVER:
            pieces = self.compiles and (self.splits_attention or self.graph_partition)
            after = GraphMode.PIECEWISE if pieces else GraphMode.NONE
            mode = self._step("decode-support", mode, after, "captures no attention at all")
        wide = self.query_len > 1 and self.support < GraphSupport.UNIFORM_BATCH
        if mode.decode_mode is GraphMode.FULL and wide:
            after = GraphMode.PIECEWISE if self.splits_attention else GraphMode.NONE
            message = f"captures decodes of one token, and they have {self.query_len}"
            mode = self._step("speculative-support", mode, after, message)
        if not self.piecewise_capture and mode.has_piecewise:
            message = "nothing is compiled piecewise, so nothing is captured piecewise"
            self.note("piecewise-capture", mode, mode.without_piecewise, message)
            mode = mode.without_piecewise
        return mode

    def _step(self, rule: str, mode: GraphMode, after: GraphMode, message: str) -> GraphMode:
        self.note(rule, mode, after, f"{self.backend} {message}, so {mode.value} becomes {after.value}")
        return after

    def _no_graph(self, mode: GraphMode) -> FlagError:
        message = f"vLLM cannot run {mode.value}: {self.backend} captures no attention"
        return refusal("--compilation-config", message, "ask for PIECEWISE", "cudagraph_mode")
