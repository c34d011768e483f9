"""Verification of drafts: greedy, or with synthetic acceptance.

Greedy: a draft is kept while it equals the target's own token. So the output is the target's own greedy output, token
for token, whatever was proposed. Sampled: the same, as the target's token is the draft where rejection sampling accepts
it, see ``execution.sampling``.

Synthetic: how many drafts are accepted is drawn, whatever the target says of them, so that speculation can be measured
with random weights, of which a drafter knows nothing. As in vLLM 0.33 (``synthetic_acceptance_rates``,
``v1/worker/gpu/spec_decode/rejection_sampler_utils.py``): the rates are unconditional, drafts are tried one after the
other with the share of each among those whose drafts before were accepted, an accepted draft becomes the output, and
after the first rejection stands what the target says.
"""

from __future__ import annotations

import hashlib
from typing import Any

import attrs
import numpy as np

from capture_planner_runner.execution.sampling import SPLIT_MIX
from capture_planner_runner.serving.states import RequestStates, ScheduledBatch

Array = np.ndarray[Any, Any]


@attrs.frozen(eq=False)
class Verification:
    """Result of verifying one step."""

    kept: Array
    """``int64[R]``: tokens of each row whose keys and values stay."""
    accepted: Array
    """``int64[R]``: drafts of each row that equal the target's tokens."""
    gained: Array
    """``int64[R]``: new tokens of each row, the accepted drafts and the next token; 0 where it ends inside its
    prompt."""
    at: Array
    """``int64[R]``: their position, which is the length of each request before."""


def advance(scheduled: ScheduledBatch, states: RequestStates, starts: Array) -> Verification:
    """Advance the states by a step without drafts, whose tokens are not known yet.

    Each new token is in ``states`` as ``-1 - i``, where row i of this step's batch computes it, until
    ``store_tokens`` replaces it. Lengths become those that ``settle`` would give.
    """
    rows = scheduled.state_indices
    reaches = _reaches_end(scheduled, states)
    gained, at = reaches.astype(np.int64), states.length[rows]
    states.tokens[rows[reaches], at[reaches]] = -starts[1:][reaches]  # -1 - i, where i is the last row, starts[1:] - 1
    states.length[rows] += gained
    states.computed[rows] += scheduled.counts
    return Verification(scheduled.counts, np.zeros_like(gained), gained, at)


def store_tokens(
    scheduled: ScheduledBatch, settled: Verification, states: RequestStates, starts: Array, answers: Array
) -> None:
    """Store the tokens of a step that was advanced; ``answers int64[T]``: the next token of each row of the batch."""
    # A request that ended meanwhile has gained nothing, and its state may belong to another one.
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

    Requests that are ``gone bool[R]``, since they ended after this step was launched, get nothing: their states may
    belong to other requests now.
    The tokens of ``states`` behind the known ones are the drafts, and become the target's tokens. Rejected drafts are
    not counted: their keys and values are past ``computed``, and are overwritten before anything reads them.

    :param synthetic: ``int32[R]``: drafts of each row that are accepted without comparing; None: the equal ones.
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
    # The columns of the longest row may lie past the array for others; `hits` leaves them out.
    drafted = states.tokens[rows[:, None], np.minimum(at, states.tokens.shape[1] - 1)]
    hits = answers == drafted if synthetic is None else columns < synthetic[:, None]
    hits &= columns < drafts[:, None]
    hits &= ~gone[:, None]
    # A draft behind a rejected one is rejected, even if it happens to be equal.
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


_STEP, _FIRST, _SECOND = map(np.uint64, SPLIT_MIX)


@attrs.frozen(eq=False)
class SyntheticAcceptance:
    """Draws how many drafts of each request are accepted.

    A draw depends on the seed, the request's name and the position of the draft alone: so the same requests accept the
    same drafts in batches of any composition, from graphs and eager.

    :param rates: ``rates[i]`` is the share of steps in which drafts 0 to i are all accepted; never rising.
    """

    rates: tuple[float, ...]
    seed: int = 0
    conditional: Array = attrs.field(init=False)
    """``float64[K]``: the share of each draft where all before it were accepted."""

    @conditional.default
    def _conditional(self) -> Array:
        before = (1.0, *self.rates[:-1])
        return np.array([rate / last if last > 0 else 0.0 for rate, last in zip(self.rates, before, strict=True)])

    def accepted(self, keys: Array, length: Array, drafts: Array) -> Array:
        """Return how many drafts of each request are accepted, ``int32[R]``.

        :param keys: ``uint64[R]``, see ``request_key``.
        :param length: ``int64[R]``: tokens of each that are settled, so the position of its first draft.
        :param drafts: ``int64[R]``: how many each has.
        """
        columns = np.arange(len(self.rates))
        positions = (length[:, None] + columns).astype(np.uint64)
        hits = self.draws(keys[:, None], positions) < self.conditional
        hits &= columns < drafts[:, None]
        counts: Array = np.logical_and.accumulate(hits, axis=1).sum(axis=1, dtype=np.int32)
        return counts

    def draws(self, keys: Array, positions: Array) -> Array:
        """Return a number from 0 to 1, 1 excluded, for each key and position: SplitMix64 of both and the seed."""
        mixed = _mixed(keys ^ _mixed(np.full(1, self.seed, dtype=np.uint64) + _STEP)) + positions * _STEP
        # 53 bits: all that a double holds exactly, so no number is rounded up to 1.
        draws: Array = (_mixed(mixed) >> np.uint64(11)) * 2.0**-53
        return draws


def request_key(name: str) -> int:
    """Return 64 bits that stand for a request's name, the same in every process."""
    # Not `hash`, which differs between processes. A name may come from a file's, with half of a surrogate pair.
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _mixed(bits: Array) -> Array:
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    mixed: Array = bits ^ (bits >> np.uint64(31))
    return mixed
