"""Synthetic acceptance: how many drafts are accepted is drawn, whatever the target says of them.

So speculation can be measured with random weights, of which a drafter knows nothing. As in vLLM 0.33
(``synthetic_acceptance_rates``, ``v1/worker/gpu/spec_decode/rejection_sampler_utils.py``): the rates are unconditional,
drafts are tried one after the other with the share of each among those whose drafts before were accepted, an accepted
draft becomes the output, and after the first rejection stands what the target says.
"""

from __future__ import annotations

import hashlib
from typing import Any

import attrs
import numpy as np

Array = np.ndarray[Any, Any]

_STEP, _FIRST, _SECOND = (np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


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
        draws: Array = (_mixed(mixed) >> np.uint64(11)) * 2.0**-53
        return draws


def request_key(name: str) -> int:
    """Return 64 bits that stand for a request's name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _mixed(bits: Array) -> Array:
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    mixed: Array = bits ^ (bits >> np.uint64(31))
    return mixed
