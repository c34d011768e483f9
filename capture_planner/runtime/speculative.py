"""Greedy verification: a draft is kept as long as it is what the target says.

So the output is the target's own greedy output, token for token, whatever was proposed.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from capture_planner.runtime.scheduler import Places, Scheduled

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


def sampled_rows(scheduled: Scheduled, starts: Array, places: Places) -> Array:
    """Return the rows of the batch whose next token is read, ``int64[N]``: of each request that
    reaches the end of what is settled, the last settled token and its drafts.
    """
    ends = starts[1:].astype(np.int64)
    first = ends - 1 - scheduled.drafts
    wanted = np.where(_reaches_end(scheduled, places), scheduled.drafts + 1, 0)
    offsets = np.arange(wanted.sum()) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    rows: Array = np.repeat(first, wanted) + offsets
    return rows


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
    at = places.length[rows][:, None] + columns
    drafted = places.tokens[rows[:, None], np.minimum(at, places.tokens.shape[1] - 1)]
    hits = (said == drafted) & (columns < drafts[:, None])
    accepted = np.logical_and.accumulate(hits, axis=1).sum(axis=1)
    gained = np.where(reaches, accepted + 1, 0)
    new = columns < gained[:, None]
    places.tokens[np.broadcast_to(rows[:, None], new.shape)[new], at[new]] = said[new]
    kept = scheduled.counts - drafts + accepted
    places.length[rows] += gained
    places.computed[rows] += kept
    return Settled(kept, accepted, gained)


def _reaches_end(scheduled: Scheduled, places: Places) -> Array:
    ends = places.computed[scheduled.places] + scheduled.counts - scheduled.drafts
    reached: Array = ends == places.length[scheduled.places]
    return reached
