"""Greedy verification: a draft is kept as long as it is what the target says.

So the output is the target's own greedy output, token for token, whatever was proposed.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from capture_planner.runtime.serving.scheduler import Places, Scheduled

Array = np.ndarray[Any, Any]


@attrs.frozen(eq=False)
class Settled:
    """What verification kept of a step."""

    kept: Array
    """``int64[R]``: tokens of each row whose keys and values stay."""
    accepted: Array
    """``int64[R]``: drafts of each row that the target says too."""
    gained: Array
    """``int64[R]``: tokens each row has now that it had not: the accepted ones and the next; 0 where
    the row ends inside its prompt."""
    at: Array
    """``int64[R]``: where they stand: how long each request was before."""


def sampled_rows(scheduled: Scheduled, starts: Array, places: Places) -> Array:
    """Return the rows of the batch whose next token is read, ``int64[N]``: of each request that
    reaches the end of what is settled, the last settled token and its drafts.
    """
    if not scheduled.prompts and (scheduled.drafts + 1 == scheduled.counts).all():
        return np.arange(scheduled.num_tokens)
    ends = starts[1:].astype(np.int64)
    first = ends - 1 - scheduled.drafts
    wanted = sampled_counts(scheduled, places)
    offsets = np.arange(wanted.sum()) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    rows: Array = np.repeat(first, wanted) + offsets
    return rows


def sampled_counts(scheduled: Scheduled, places: Places) -> Array:
    """Return how many of them each request has, ``int64[R]``: none inside its prompt."""
    return np.where(_reaches_end(scheduled, places), scheduled.drafts + 1, 0)


def promise(scheduled: Scheduled, places: Places, starts: Array) -> Settled:
    """Move the places on by a step without drafts whose tokens nobody knows yet.

    Each new token stands in ``places`` as ``-1 - i``, i being the row of this step's batch that says it,
    until ``fulfil`` puts it there. What is counted is what ``settle`` would count.
    """
    rows = scheduled.places
    reaches = _reaches_end(scheduled, places)
    gained, at = reaches.astype(np.int64), places.length[rows]
    places.tokens[rows[reaches], at[reaches]] = -starts[1:][reaches]
    places.length[rows] += gained
    places.computed[rows] += scheduled.counts
    return Settled(scheduled.counts, np.zeros_like(gained), gained, at)


def fulfil(scheduled: Scheduled, settled: Settled, places: Places, starts: Array, said: Array) -> None:
    """Put what was promised into its places; ``said int64[T]`` is the next token of each row of the batch."""
    new = settled.gained > 0
    places.tokens[scheduled.places[new], settled.at[new]] = said[starts[1:][new] - 1]


def settle(scheduled: Scheduled, places: Places, sampled: Array) -> Settled:
    """Verify the drafts and move the places on; ``sampled int64[N]`` belongs to ``sampled_rows``.

    The tokens of ``places`` after the settled ones are the drafts, and become what the target says.
    Rejected drafts are rolled back by not counting them: their keys and values stand past
    ``computed`` and are written anew before anything reads them.
    """
    rows, drafts = scheduled.places, scheduled.drafts
    reaches = _reaches_end(scheduled, places)
    wanted = np.where(reaches, drafts + 1, 0)
    most = int(wanted.max(initial=0))
    columns = np.arange(most)
    inside = columns < wanted[:, None]
    said = np.zeros((len(rows), most), dtype=np.int64)
    said[inside] = sampled
    before = places.length[rows]
    at = before[:, None] + columns
    drafted = places.tokens[rows[:, None], np.minimum(at, places.tokens.shape[1] - 1)]
    hits = (said == drafted) & (columns < drafts[:, None])
    accepted = np.logical_and.accumulate(hits, axis=1).sum(axis=1)
    gained = np.where(reaches, accepted + 1, 0)
    new = columns < gained[:, None]
    places.tokens[np.broadcast_to(rows[:, None], new.shape)[new], at[new]] = said[new]
    kept = scheduled.counts - drafts + accepted
    places.length[rows] += gained
    places.computed[rows] += kept
    return Settled(kept, accepted, gained, before)


def _reaches_end(scheduled: Scheduled, places: Places) -> Array:
    ends = places.computed[scheduled.places] + scheduled.counts - scheduled.drafts
    reached: Array = ends == places.length[scheduled.places]
    return reached
