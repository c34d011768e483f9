"""Ladder: the capture sizes of one kind of batch of one role."""

from __future__ import annotations

from collections.abc import Container, Iterator
from fractions import Fraction
from functools import cached_property

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.costs import Family
from capture_planner.planning.sizing.minimax import fewest, minimax, worst_ratio
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.batch_space import Domain, served_cases
from capture_planner.records.text import query_len_text


@attrs.frozen(kw_only=True)
class Ladder:
    """Ascending sizes (requests for decodes, tokens for mixed batches) over the counts they serve."""

    role: Role
    kind: Kind
    mode: GraphMode
    query_len: int | None = None
    varies: bool = False
    """True if its graphs serve decodes of 1 to ``query_len`` tokens each."""
    draft_steps: int | None = None
    domain: Domain
    """The counts that the ladder is meant to cover: up to its ceiling, not to the limits."""
    sizes: tuple[int, ...]
    adaptive: bool = False
    """True if the sizes were computed, and may be recomputed for fewer graphs."""
    anchors: tuple[int, ...] = ()
    """Sizes that it must have: the largest decodes, where decodes have no ladder of their own."""
    cases: tuple[int, ...] = (0,)
    """LoRA counts that each size is captured for, as far as its requests can need them."""
    max_num_reqs: int
    """The most requests that one of its graphs holds."""
    cut: Reason | None = None
    """The reason why it ends where it does; None: the policy."""
    price: str = ""
    """The loss above its largest size, in words; empty: not known."""

    @property
    def family(self) -> Family:
        """The key of its graphs in a profile."""
        return self.role, self.mode, self.query_len, self.draft_steps

    @property
    def unit(self) -> int:
        """Tokens of a count."""
        return self.query_len or 1

    @property
    def last(self) -> int:
        """The largest count that it is meant to cover."""
        return self.domain.intervals[-1][1]

    def num_reqs(self, size: int) -> int:
        """Return the padded requests of a graph of that size."""
        return size if self.kind is Kind.DECODE else min(size, self.max_num_reqs)

    def served(self, size: int) -> tuple[int, ...]:
        """Return the LoRA counts that a graph of that size is captured for, by its real requests."""
        # A request has at most one adapter, so the real requests decide, not the padded ones.
        return served_cases(self.cases, self.num_reqs(self.domain.upto_count(size) or 0))

    def entry(self, size: int, case: int) -> Entry:
        """Return the graph of one size, for one number of adapters."""
        return Entry(
            mode=self.mode,
            num_tokens=size * self.unit,
            num_reqs=None if self.mode is GraphMode.PIECEWISE else self.num_reqs(size),
            query_len=None if self.varies else self.query_len,
            active_loras=case,
            draft_steps=self.draft_steps,
            max_query_len=self.query_len if self.varies else None,
        )

    def entries(self, without: Container[int] = ()) -> Iterator[Entry]:
        """Yield its graphs, except those of the sizes in ``without``."""
        sizes = (size for size in self.sizes if size not in without)
        return (self.entry(size, case) for size in sizes for case in self.served(size))

    @property
    def num_graphs(self) -> int:
        return sum(len(self.served(size)) for size in self.sizes)

    @cached_property
    def worst(self) -> Fraction:
        """The largest padded/real ratio over the counts that it covers."""
        return worst_ratio(self.domain, self.sizes)

    def thinned(self, ratio: Fraction) -> Ladder:
        """Return the shortest ladder of this one's sizes, or of any if adaptive, within ``ratio``."""
        if ratio <= self.worst or not self.sizes:
            return self
        sizes = fewest(self.domain, ratio, candidates=None if self.adaptive else self.sizes, anchors=self.anchors)
        # Other sizes of the same number are no gain: the policy chose these.
        return self if len(sizes) >= len(self.sizes) else attrs.evolve(self, sizes=sizes)

    def tightened(self) -> Ladder:
        """Return the best ladder of the same number of sizes, if adaptive."""
        return attrs.evolve(self, sizes=minimax(self.domain, len(self.sizes), self.anchors)) if self.adaptive else self

    @property
    def reduced(self) -> Ladder:
        """The ladder with the fewest LoRA cases that serve every batch: none, and the most."""
        return attrs.evolve(self, cases=tuple(dict.fromkeys((*self.cases[:1], *self.cases[-1:]))))

    def dropped(self, reason: Reason) -> Ladder:
        """Return the ladder without sizes, with the reason."""
        return attrs.evolve(self, sizes=(), cut=reason)

    def __str__(self) -> str:
        if self.kind is Kind.MIXED:
            return f"{self.mode.value} mixed"
        chain = f", chain of {self.draft_steps}" if self.draft_steps is not None else ""
        length = query_len_text(self.query_len, varies=self.varies)
        return f"{self.mode.value} decode, query length {length}{chain}"
