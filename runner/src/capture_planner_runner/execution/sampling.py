"""Sampling of target and drafter, and rejection sampling between them, in operators that a graph can hold.

No generator has a state. A random number is a hash of the request's key, of the position that the token will have, and
of what it is for. All three are in the fields of a step, so a replay draws anew, and a token does not depend on the
batch, on padding, or on whether a graph computed it. The numbers of a generator that is registered with a graph
(``CUDAGraph.register_generator_state``) go to rows in their order, padding included: another batch, other tokens.

A number is used again where a step drafts or verifies a position that an earlier step did, too. That one's result was
thrown away then, behind a rejected draft, and nothing that was kept depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import attrs
import torch

from capture_planner_runner.execution.fields import TensorRef

SPLIT_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of SplitMix64: its step, and the factors of its finalizer."""


class Draw(IntEnum):
    """The purpose of a random number; each has numbers of its own."""

    DRAFT = 1
    ACCEPT = 2
    TOKEN = 3


@attrs.frozen(kw_only=True, eq=False)
class Sampler:
    """Draws the tokens of a run, for the bodies of all roles."""

    temperature: float
    top_p: float = 1.0
    seed: int = 0
    proposed: torch.Tensor | None = None
    """``float32[states + 2, K, vocab_size]``: what each draft was drawn from, by request state. The row before the last
    is for padding, and the last is zero, for rows without a draft. None without a drafter."""

    def buffers(self) -> Iterator[TensorRef]:
        """Yield what one step leaves for the next."""
        if self.proposed is not None:
            yield "draft_state.probabilities", self, "proposed"

    def draft(
        self, logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Draw a draft from each row of ``logits [N, vocab_size]``, ``int64[N]``, and keep what it is drawn from.

        Without top-p: whatever drafts are drawn from, tokens are distributed as the target says.

        :param keys: ``int64[N]``, of the requests.
        :param positions: ``int64[N]``: where the draft will stand.
        :param rows: ``int64[N]``: its place in ``proposed``, request states and drafts counted as one.
        """
        assert self.proposed is not None, "a plan with a drafter has room for what drafts are drawn from"
        weights = torch.softmax(logits.float() / self.temperature, dim=-1)
        self.proposed.flatten(0, 1).index_copy_(0, rows, weights)
        return choose(weights, self.draws(keys, positions, Draw.DRAFT))

    def answers(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        drafts: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the target's token after each row of ``logits [N, vocab_size]``, ``int64[N]``: its draft if accepted.

        A draft with probability p by the target, drawn with q, is accepted with min(1, p/q). In place of a rejected
        one, a token is drawn from max(p - q, 0), which is never the draft: so comparing drafts with answers verifies
        them, on the host and on the device.

        :param drafts: ``int64[N]``: the token at ``positions``; any where there is no draft.
        :param rows: ``int64[N]``: its place in ``proposed``.
        """
        weights, numbers = self.probabilities(logits), self.draws(keys, positions, Draw.TOKEN)
        if self.proposed is None or rows is None or drafts is None:
            return choose(weights, numbers)
        proposed = self.proposed.flatten(0, 1)[rows]
        by_target, by_drafter = (each.gather(1, drafts.unsqueeze(1)).squeeze(1) for each in (weights, proposed))
        chosen = choose((weights - proposed).clamp_(min=0), numbers)
        # Multiplied, not divided: q is 0 where there is no draft.
        accepted = self.draws(keys, positions, Draw.ACCEPT) * by_drafter < by_target
        # Nothing is left to choose from where both distributions are the same.
        accepted |= chosen == weights.shape[1]
        return torch.where(accepted & (by_drafter > 0), drafts, chosen)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the target's probabilities, ``float32[N, vocab_size]``."""
        weights = torch.softmax(logits.float() / self.temperature, dim=-1)
        if self.top_p >= 1.0:
            return weights
        ordered = weights.sort(dim=-1, descending=True).values
        # The likeliest tokens that reach top_p together, and those that are as likely as the last of them.
        kept = ordered.cumsum(-1) - ordered < self.top_p
        least = torch.where(kept, ordered, torch.inf).amin(-1, keepdim=True)
        weights = torch.where(weights < least, 0.0, weights)
        return weights / weights.sum(-1, keepdim=True)

    def draws(self, keys: torch.Tensor, positions: torch.Tensor, purpose: Draw) -> torch.Tensor:
        """Return a number from 0 to 1, 1 excluded, for each key and position, ``float64[N]``: SplitMix64 of both."""
        # By purpose, too: the draws of one position must not depend on each other.
        mixed = _mixed(keys ^ _signed(self.seed + purpose * SPLIT_MIX[0])) + positions * _signed(SPLIT_MIX[0])
        # 52 bits: a product with a sum of weights is less than the sum.
        return _shifted(_mixed(mixed), 12).double() * 2.0**-52


def choose(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return an index for each row of ``weights [N, V]``, ``int64[N]``, as likely as its share of the row's sum.

    V where all weights are 0. Sums are in float64, so that the order of additions is of no consequence.

    :param numbers: ``float64[N]``, from 0 to 1, 1 excluded.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    # Not `<`: the number 0 would choose a first token of weight 0.
    return (sums <= (numbers * sums[:, -1]).unsqueeze(1)).sum(-1)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _signed(SPLIT_MIX[1])
    bits = (bits ^ _shifted(bits, 27)) * _signed(SPLIT_MIX[2])
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift ``int64`` to the right as if it were unsigned, which torch computes little with."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    """Return the ``int64`` with the lowest 64 bits of a number."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)
