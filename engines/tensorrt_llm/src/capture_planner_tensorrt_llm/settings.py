"""What ``trtllm-serve`` ends up with, as far as it matters for graphs."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capture_planner.records.model import Method, Speculative
from capture_planner_tensorrt_llm import rules


@attrs.frozen(kw_only=True)
class Algorithm:
    """What a ``decoding_type`` means for graphs."""

    method: Method
    """The nearest of the methods that a plan knows: only the lengths matter here."""
    one_engine: bool = True
    """Whether the drafter runs inside the target's graphs; all but NGram."""
    dynamic: bool = True
    """Whether a schedule can change the draft length."""
    doubled: bool = False
    """Whether a request runs 2K tokens: K + 1 to verify, and masks for the drafts to come (PARD)."""


ALGORITHMS = {
    "Eagle": Algorithm(method=Method.EAGLE3),
    "Eagle3": Algorithm(method=Method.EAGLE3),
    "MTP": Algorithm(method=Method.MTP),
    "Draft_Target": Algorithm(method=Method.EAGLE),
    "SA": Algorithm(method=Method.EAGLE),
    "PARD": Algorithm(method=Method.EAGLE, doubled=True),
    "DFlash": Algorithm(method=Method.EAGLE),
    "NGram": Algorithm(method=Method.EAGLE, one_engine=False, dynamic=False),
}
"""Decoding types that are emulated. ``Eagle`` is taken for ``Eagle3``, as the engine takes it."""


@attrs.frozen(kw_only=True)
class Drafting:
    """Speculative decoding as the engine resolved it."""

    decoding_type: str
    max_draft_len: int
    """K: the longest chain of drafts."""
    total_draft_tokens: int
    """Draft tokens that a step without a schedule verifies of a request: K, or all of the tree."""
    schedule: Mapping[int, int] | None = None
    """Draft length by threshold, ascending; None where the length is always the same."""
    max_concurrency: int | None = None
    """Most requests that are speculated for, where that is not a schedule: NGram alone."""

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.decoding_type]

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """The draft lengths that each size is captured with, where there is no schedule."""
        # Batches above ``max_concurrency`` draft nothing.
        without = not self.algorithm.one_engine and self.max_concurrency is not None
        return (self.total_draft_tokens, 0) if without else (self.total_draft_tokens,)

    def width(self, draft_len: int) -> int:
        """Return the tokens that a request has in a step with this draft length."""
        return 2 * draft_len if self.algorithm.doubled and draft_len else 1 + draft_len

    def draft_len_of(self, width: int) -> int | None:
        """Return the draft length at which a request has so many tokens; or None."""
        # Checked by ``width`` below: an odd width of PARD is no draft length but 0.
        draft_len = width // 2 if self.algorithm.doubled else width - 1
        return draft_len if draft_len >= 0 and self.width(draft_len) == width else None

    def speculative(self, max_batch_size: int, max_num_tokens: int) -> Speculative:
        """Return the tokens that decodes have, by batch size."""
        longest = self.width(self.total_draft_tokens) - 1
        tiers: list[tuple[int, int, int]] = []
        thresholds = self.schedule or {}
        together = rules.most_together(max_batch_size, max_num_tokens, 1 + longest)
        # NGram stops drafting above it, which a plan states as a tier of K = 0.
        if self.schedule is None and self.max_concurrency is not None and together > self.max_concurrency:
            thresholds = {self.max_concurrency: self.total_draft_tokens}
        first = 1
        for threshold, draft_len in thresholds.items():
            tiers.append((first, threshold, self.width(draft_len) - 1))
            first = threshold + 1
        # Above the last threshold nothing is drafted.
        if thresholds and first <= max_batch_size:
            tiers.append((first, max_batch_size, 0))
        return Speculative(method=self.algorithm.method, num_tokens=longest, schedule=tuple(tiers))


@attrs.frozen(kw_only=True)
class GraphConfig:
    """``cuda_graph_config`` as it was given."""

    batch_sizes: tuple[int, ...] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


@attrs.frozen(kw_only=True)
class ServeSettings:
    """All that decides about graphs, from flags and file together."""

    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    tensor: int = 1
    attention_dp: bool = False
    graphs: GraphConfig | None = attrs.Factory(GraphConfig)
    """None: cuda_graph_config is null, and everything runs eager."""
    drafting: Drafting | None = None
    by_length: bool = False
    """Whether each shape is captured a second time, for short sequences."""
    sources: Mapping[str, str] = attrs.Factory(dict)
    """``flag`` or ``file`` for each that was given; the rest are defaults."""
    overridden: tuple[str, ...] = ()
    """Keys of the file that a flag took the place of."""

    @property
    def width(self) -> int:
        """The most tokens that a decode has of one request."""
        return 1 if self.drafting is None else self.drafting.width(self.drafting.total_draft_tokens)

    @property
    def schedule(self) -> Mapping[int, int] | None:
        """The schedule of draft lengths where there is one that the engine follows."""
        return None if self.drafting is None or not self.drafting.algorithm.dynamic else self.drafting.schedule
