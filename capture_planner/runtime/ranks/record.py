"""What a run on several ranks came to: a row for each rank, and what replicas brought to their steps. Plain data."""

from __future__ import annotations

import attrs

from capture_planner.modes import Role
from capture_planner.records.batch import Batch


@attrs.frozen(kw_only=True)
class RankRow:
    """One rank. Of tensor-parallel ranks, each has the steps of its replica."""

    rank: int
    host: str
    data: int
    tensor: int
    steps: int
    idle_steps: int
    """Steps in which it had no requests, and ran dummy batches along."""
    output_tokens: int
    seconds: float
    """Of serving."""
    waited: float
    """Seconds in agreements of steps, beyond what the last rank to come had: for that one. Of many, in the last."""
    last: int
    """Agreements to which it came last, of those."""
    eager_by_others: int
    """Forwards that ran eager because of other ranks: alone, it would have replayed a graph."""
    larger_by_others: int
    """Forwards that replayed a larger graph, or one of another mode, than it would have alone."""


@attrs.frozen(kw_only=True)
class VectorCount:
    """What the replicas submitted for a forward of a role, and in how many steps."""

    role: Role
    batches: tuple[Batch | None, ...]
    """By replica; None: idle."""
    captured: tuple[bool, ...]
    """By replica: whether it had graphs."""
    steps: int


@attrs.frozen(kw_only=True)
class RankRecord:
    """All ranks of a run."""

    rows: tuple[RankRow, ...]
    """By rank; a rank that ended without its last words is missing."""
    agreements: int
    """Steps that replicas agreed on; 0 for one replica."""
    skews: tuple[float, ...]
    """Seconds between the first and the last rank to come to an agreement, by step."""
    vectors: tuple[VectorCount, ...]
    """The most frequent ones first."""
    vectors_dropped: int = 0
    """Different vectors that are not listed."""
