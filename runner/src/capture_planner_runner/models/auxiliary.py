"""Drafters that know what the target will say: how often drafts are accepted is then chosen.

All of a real drafter's work is done, so that a step takes what it takes; only its proposals are
replaced. The answers are in one persistent table, read inside the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from capture_planner.errors import RunError
from capture_planner.records.model import Speculative
from capture_planner_runner.models.eagle import load_drafter
from capture_planner_runner.models.loading import weights_of
from capture_planner_runner.models.protocols import Attend, Drafter, TargetModel, Weight

Kind = Literal["copy", "miss", "chance"]
"""Proposals are always right, never right, or right by chance."""

_BITS = 31
_MASK = (1 << _BITS) - 1


class OracleDrafter(nn.Module):
    """A ``Drafter`` that does the work of another and proposes from a table of answers.

    ``num_states`` requests are served at a time; the row ``num_states`` is for padding. ``length`` is
    the longest sequence, in tokens: a position past it is taken for the last. With ``miss`` the
    proposal is the answer's successor in the vocabulary. With ``chance`` a position is answered
    rightly with probability ``chance``, which depends only on the position and ``seed``.

    Raises ``RunError`` for a vocabulary of fewer than two tokens, and for a chance that is none.
    """

    table: torch.Tensor
    """``int64[num_states + 1, length]``: the token at each position of each request; 0 where not learned."""

    def __init__(
        self,
        drafter: Drafter,
        kind: Kind,
        *,
        num_states: int,
        length: int,
        vocab_size: int,
        chance: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if vocab_size < 2 or not 0.0 <= chance <= 1.0:
            raise RunError(
                f"a drafter that answers by {kind}: vocab_size {vocab_size} and chance {chance}; expected "
                "at least 2 tokens and a chance from 0 to 1"
            )
        self._drafter, self._kind = drafter, kind
        self._vocab_size, self._seed = vocab_size, seed & _MASK
        self._threshold = round(chance * (1 << _BITS))
        self.name = f"{kind} over {drafter.name}" + (f" (chance {chance:g})" if kind == "chance" else "")
        self.num_layers, self.hidden_size = drafter.num_layers, drafter.hidden_size
        self.num_heads, self.num_kv_heads = drafter.num_heads, drafter.num_kv_heads
        self.head_dim, self.aux_layers, self.windows = drafter.head_dim, drafter.aux_layers, drafter.windows
        self.mask_token = drafter.mask_token
        device = next((getattr(module, name).device for _, module, name in drafter.weights()), None)
        self.register_buffer("table", torch.zeros(num_states + 1, length, dtype=torch.int64, device=device))

    @property
    def mask_hidden(self) -> torch.Tensor | None:
        return self._drafter.mask_hidden

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        return self._drafter.combine(aux)

    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        return self._drafter.forward(
            input_ids=input_ids, positions=positions, hidden=hidden, attend=attend, module=module
        )

    @torch.no_grad()
    def propose(
        self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        """Return the answer for each row, or a token that is not it, ``int64[N]``."""
        # Its logits are part of a step's work, so they are computed, and then not used.
        self._drafter.propose(hidden, state_indices, positions, module)
        answers = self.table[state_indices, positions.clamp(0, self.table.shape[1] - 1)]
        # The table is read inside the graph, so that a replay proposes for the requests of its step.
        if self._kind == "copy":
            return answers
        others = (answers + 1) % self._vocab_size
        if self._kind == "miss":
            return others
        return torch.where(_scatter(positions, self._seed) < self._threshold, answers, others)

    def set_answer(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """Note that the request with ``state_index`` will read ``tokens`` from its first position on.

        What was noted there before is forgotten. Raises ``RunError`` for an index that does not exist, or
        is for padding, and for more tokens than the table is long.
        """
        states, length = self.table.shape[0] - 1, self.table.shape[1]
        if not 0 <= state_index < states or len(tokens) > length:
            raise RunError(
                f"{len(tokens)} answers for request state {state_index}: the table has states 0 to {states - 1}, of "
                f"{length} tokens"
            )
        row = torch.zeros(length, dtype=torch.int64)
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self.table[state_index].copy_(row)

    def weights(self) -> Iterator[Weight]:
        """Every parameter and buffer of the real drafter, and the table."""
        yield from self._drafter.weights()
        yield from weights_of([("", self)])


def choose_drafter(
    choice: Kind | Literal["random"] | Path,
    speculative: Speculative,
    target: TargetModel,
    *,
    num_states: int,
    length: int,
    chance: float = 0.5,
    seed: int = 0,
) -> Drafter:
    """Return the drafter that a run asks for: ``copy``, ``miss``, ``chance``, ``random``, or a folder.

    All but a folder are drafters of the plan's numbers with random weights; the first three answer from
    a table of ``num_states`` requests and ``length`` tokens. Raises ``RunError`` as ``load_drafter`` does.
    """
    drafter = load_drafter(choice if isinstance(choice, Path) else None, speculative, target, seed=seed)
    if isinstance(choice, Path) or choice == "random":
        return drafter
    return OracleDrafter(
        drafter, choice, num_states=num_states, length=length, vocab_size=target.vocab_size, chance=chance, seed=seed
    )


def _scatter(positions: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a number below ``2**31`` for each position, ``int64[N]``; neighbours are far apart.

    Every product stays below ``2**63``, so that it is the same on all devices.
    """
    mixed = (positions + seed) & _MASK
    for factor in (0x45D9F3B, 0x119DE1F3):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & _MASK
    return mixed ^ (mixed >> 16)
