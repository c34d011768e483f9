"""Greedy verification: a draft is kept as long as it is what the target says.

So the output is the target's own greedy output, token for token, whatever was proposed.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from capture_planner.runtime.serving.states import RequestStates, ScheduledBatch

Array = np.ndarray[Any, Any]


@attrs.frozen(eq=False)
class Verification:
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


def sampled_rows(scheduled: ScheduledBatch, starts: Array, states: RequestStates) -> Array:
    """Return the rows of the batch whose next token is read, ``int64[N]``: of each request that
    reaches the end of what is settled, the last settled token and its drafts.
    """
    if not scheduled.prompts and (scheduled.drafts + 1 == scheduled.counts).all():
        return np.arange(scheduled.num_tokens)
    ends = starts[1:].astype(np.int64)
    first = ends - 1 - scheduled.drafts
    wanted = sampled_counts(scheduled, states)
    offsets = np.arange(wanted.sum()) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    rows: Array = np.repeat(first, wanted) + offsets
    return rows


def sampled_counts(scheduled: ScheduledBatch, states: RequestStates) -> Array:
    """Return how many of them each request has, ``int64[R]``: none inside its prompt."""
    rows = scheduled.state_indices
    begin = states.computed_at_most(rows)
    # Past its prompt, a request has one token that is not computed, also after a step that is under way.
    reaches = begin + scheduled.counts - scheduled.drafts == np.maximum(states.length[rows], begin + 1)
    return np.where(reaches, scheduled.drafts + 1, 0)


def promise(scheduled: ScheduledBatch, states: RequestStates, starts: Array) -> Verification:
    """Advance the states by a step without drafts, whose tokens are not known yet.

    Each new token is in ``states`` as ``-1 - i``, i being the row of this step's batch that says it,
    until ``fulfil`` puts it there. What is counted is what ``settle`` would count.
    """
    rows = scheduled.state_indices
    reaches = _reaches_end(scheduled, states)
    gained, at = reaches.astype(np.int64), states.length[rows]
    states.tokens[rows[reaches], at[reaches]] = -starts[1:][reaches]
    states.length[rows] += gained
    states.computed[rows] += scheduled.counts
    return Verification(scheduled.counts, np.zeros_like(gained), gained, at)


def fulfil(
    scheduled: ScheduledBatch, settled: Verification, states: RequestStates, starts: Array, answers: Array
) -> None:
    """Store the tokens of a promised step; ``answers int64[T]`` is the next token of each row of the batch."""
    new = settled.gained > 0
    states.tokens[scheduled.state_indices[new], settled.at[new]] = answers[starts[1:][new] - 1]


def settle(
    scheduled: ScheduledBatch,
    states: RequestStates,
    sampled: Array,
    synthetic: Array | None = None,
    gone: Array | None = None,
) -> Verification:
    """Verify the drafts and advance the states; ``sampled int64[N]`` belongs to ``sampled_rows``.

    ``synthetic int32[R]`` of each row's drafts are accepted whatever the target says; None: those it says.
    Requests that are ``gone bool[R]``, since they ended after this step was launched, get nothing: their states may be
    other requests' now.
    The tokens of ``states`` after the settled ones are the drafts, and become what the target says.
    Rejected drafts are rolled back by not counting them: their keys and values stand past
    ``computed`` and are written anew before anything reads them.
    """
    rows, drafts = scheduled.state_indices, scheduled.drafts
    gone = np.zeros(len(rows), dtype=np.bool_) if gone is None else gone
    # A request that is gone was past its prompt.
    wanted = np.where(gone | _reaches_end(scheduled, states), drafts + 1, 0)
    most = int(wanted.max(initial=0))
    columns = np.arange(most)
    inside = columns < wanted[:, None]
    answers = np.zeros((len(rows), most), dtype=np.int64)
    answers[inside] = sampled
    before = states.length[rows]
    at = before[:, None] + columns
    drafted = states.tokens[rows[:, None], np.minimum(at, states.tokens.shape[1] - 1)]
    hits = answers == drafted if synthetic is None else columns < synthetic[:, None]
    hits &= columns < drafts[:, None]
    hits &= ~gone[:, None]
    accepted = np.logical_and.accumulate(hits, axis=1).sum(axis=1)
    gained = np.where((wanted > 0) & ~gone, accepted + 1, 0)
    answers = np.where(columns < accepted[:, None], drafted, answers)
    new = columns < gained[:, None]
    states.tokens[np.broadcast_to(rows[:, None], new.shape)[new], at[new]] = answers[new]
    kept = np.where(gone, 0, scheduled.counts - drafts + accepted)
    states.length[rows] += gained
    states.computed[rows] += kept
    return Verification(kept, accepted, gained, before)


def _reaches_end(scheduled: ScheduledBatch, states: RequestStates) -> Array:
    ends = states.computed[scheduled.state_indices] + scheduled.counts - scheduled.drafts
    reached: Array = ends == states.length[scheduled.state_indices]
    return reached
