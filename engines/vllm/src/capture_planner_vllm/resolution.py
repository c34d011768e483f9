"""The last steps of vLLM's mode: what the attention backends leave of it.

The ladder is that of ``resolve_cudagraph_mode_and_sizes``; ``attention.py`` knows the backends.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from capture_planner.engines.parsing import refusal
from capture_planner.errors import FlagError
from capture_planner.modes import GraphMode, GraphSupport


@attrs.frozen(kw_only=True)
class Ladder:
    """What the ladder needs beside the mode. ``note`` is told (rule, before, after, sentence)."""

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
        """Return the mode that is left; raises ``FlagError`` where nothing can be."""
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
            says = f"captures decodes of one token, and they have {self.query_len}"
            mode = self._step("speculative-support", mode, after, says)
        if not self.piecewise_capture and mode.has_piecewise:
            after = mode.without_piecewise
            self.note(
                "piecewise-capture", mode, after, "nothing is compiled in pieces, so nothing is captured so"
            )
            mode = after
        return mode

    def _step(self, rule: str, mode: GraphMode, after: GraphMode, says: str) -> GraphMode:
        self.note(rule, mode, after, f"{self.backend} {says}, so {mode.value} becomes {after.value}")
        return after

    def _no_graph(self, mode: GraphMode) -> FlagError:
        return refusal(
            "--compilation-config",
            f"vLLM refuses {mode.value}: {self.backend} captures no attention",
            "ask for PIECEWISE",
            "cudagraph_mode",
        )
