"""What each role computes: the part that graphs hold, over persistent buffers alone.

A body has a part per token, which every graph holds, and a part per request, which a FULL graph
holds and everything else runs outside, at real extents: a PIECEWISE graph pads no requests, and so
must not read what is theirs (vllm#39773). Results return through persistent buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import attrs
import torch

from capture_planner.entry import Entry
from capture_planner.models.contract import Attend, Drafter, TargetModel, Weight
from capture_planner.runtime.contract import NULL_SLOT
from capture_planner.runtime.fields import Extents, Fields

Held = tuple[str, object, str]
"""A persistent tensor: its name, the object that holds it, and the attribute there."""


def tensor_of(held: Held) -> torch.Tensor:
    """Return the tensor as it is now."""
    found: torch.Tensor = getattr(held[1], held[2])
    return found


class Body(Protocol):
    """What one role runs as one forward."""

    def per_token(self, extents: Extents, attend: Attend) -> None:
        """Run the model over ``extents.tokens`` rows of the persistent inputs."""

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Run what follows for ``extents.reqs`` requests. ``entry`` is set where a graph holds it."""

    def outputs(self) -> Iterator[Held]:
        """Every persistent tensor that a forward writes as a whole before anything reads it."""

    def inputs(self) -> Iterator[Held]:
        """Every other persistent tensor but the fields."""

    def weights(self) -> Iterator[Weight]:
        """Every parameter and buffer of the model."""


@attrs.define(eq=False)
class TargetBody:
    """The served model: hidden states, auxiliary ones, and the next token of each row."""

    model: TargetModel
    fields: Fields
    hidden: torch.Tensor
    """``[max tokens, hidden_size]``"""
    aux: torch.Tensor | None
    """``[max tokens, layers * hidden_size]``, where the drafter reads them."""
    tokens: torch.Tensor
    """``int64[max tokens]``: the likeliest next token; of uniform FULL graphs only."""
    aux_layers: tuple[int, ...] = ()
    embeddings: torch.Tensor | None = None
    """``[max tokens, hidden_size]``: in place of token ids, where the plan says so."""

    def per_token(self, extents: Extents, attend: Attend) -> None:
        """Fill ``hidden`` and ``aux``."""
        rows = extents.tokens
        positions = self.fields["positions"][:rows]
        if self.model.mrope:
            positions = self.fields["mrope_positions"].view(-1, 3)[:rows].t()
        given = self.embeddings is not None
        hidden, aux = self.model.forward(
            input_ids=None if given else self.fields["input_ids"][:rows],
            embeddings=self.embeddings[:rows] if self.embeddings is not None else None,
            positions=positions,
            attend=attend,
            aux_layers=self.aux_layers,
        )
        self.hidden[:rows].copy_(hidden)
        if self.aux is not None and aux is not None:
            self.aux[:rows].copy_(aux)

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Fill ``tokens`` inside a uniform graph, where every row is read; else ``sample`` is asked."""
        if entry is not None and entry.query_len is not None:
            rows = extents.tokens
            self.tokens[:rows].copy_(self.model.logits(self.hidden[:rows]).argmax(-1))

    def sample(self, rows: torch.Tensor, entry: Entry | None) -> torch.Tensor:
        """Return the next token ``int64[N]`` of the rows that are read: the graph's, or made here."""
        if entry is not None and entry.query_len is not None:
            return self.tokens[rows]
        return self.model.logits(self.hidden[rows]).argmax(-1)

    def outputs(self) -> Iterator[Held]:
        """What sampling and the drafter read."""
        yield "hidden", self, "hidden"
        yield "tokens", self, "tokens"
        if self.aux is not None:
            yield "aux", self, "aux"

    def inputs(self) -> Iterator[Held]:
        """The embeddings, where they are the input."""
        if self.embeddings is not None:
            yield "embeddings", self, "embeddings"

    def weights(self) -> Iterator[Weight]:
        """Those of the model."""
        return self.model.weights()


@attrs.define(eq=False)
class DraftState:
    """What draft steps hand on, a row a place; the last row is that of padding."""

    token: torch.Tensor
    """``int64[places + 1]``: the last token proposed."""
    hidden: torch.Tensor
    """``[places + 1, hidden_size]``: the hidden state it came from."""
    proposed: torch.Tensor
    """``int64[places + 1, K]``: all tokens proposed in this step."""
    column: torch.Tensor
    """``int64[1]``: where in ``proposed`` the next token goes."""

    @classmethod
    def make(
        cls, places: int, most_drafts: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> DraftState:
        """Allocate it, zeroed."""
        return cls(
            token=torch.zeros(places + 1, dtype=torch.int64, device=device),
            hidden=torch.zeros(places + 1, hidden_size, dtype=dtype, device=device),
            proposed=torch.zeros(places + 1, most_drafts, dtype=torch.int64, device=device),
            column=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def places(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Return the row of each request, ``int64[R]``; -1, a padded row, becomes the last."""
        return torch.where(idx_mapping < 0, self.token.shape[0] - 1, idx_mapping).long()

    def keep(self, places: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """Store one proposal for each place."""
        self.token.index_copy_(0, places, tokens)
        self.hidden.index_copy_(0, places, hidden)
        width = self.proposed.shape[1]
        self.proposed.view(-1).index_copy_(0, places * width + self.column, tokens)
        self.column.add_(1).clamp_(max=width - 1)

    def buffers(self) -> Iterator[Held]:
        """All of it, by name."""
        for name in ("token", "hidden", "proposed", "column"):
            yield f"draft_state.{name}", self, name


@attrs.define(eq=False)
class DraftPrefillBody:
    """Draft position 0, on the target's batch: it reads what the target left in its outputs."""

    drafter: Drafter
    fields: Fields
    target: TargetBody
    hidden: torch.Tensor
    """``[max tokens, hidden_size]``"""
    state: DraftState

    def per_token(self, extents: Extents, attend: Attend) -> None:
        """Fill ``hidden``."""
        rows = extents.tokens
        source = (
            self.drafter.combine(self.target.aux[:rows])
            if self.target.aux is not None
            else self.target.hidden[:rows]
        )
        hidden = self.drafter.forward(
            input_ids=self.fields["input_ids"][:rows],
            positions=self.fields["positions"][:rows],
            hidden=source,
            attend=attend,
        )
        self.hidden[:rows].copy_(hidden)

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Propose the first token of each request, from its last settled row."""
        last = self.fields["last_token_indices"][: extents.reqs].long()
        places = self.state.places(self.fields["idx_mapping"][: extents.reqs])
        hidden = self.hidden[last]
        tokens = self.drafter.propose(hidden, places, self.fields["positions"][last] + 2)
        self.state.column.zero_()
        self.state.keep(places, tokens, hidden)

    def outputs(self) -> Iterator[Held]:
        """The hidden states, and the state that draft decodes go on from."""
        yield "hidden", self, "hidden"
        yield from self.state.buffers()

    def inputs(self) -> Iterator[Held]:
        """What the target left."""
        for name, holder, attribute in self.target.outputs():
            yield f"target.{name}", holder, attribute

    def weights(self) -> Iterator[Weight]:
        """Those of the drafter."""
        return self.drafter.weights()


@attrs.define(eq=False)
class DraftDecodeBody:
    """Later draft positions, one token a request: each step moves its own fields on to the next."""

    drafter: Drafter
    fields: Fields
    state: DraftState
    page_size: int
    max_model_len: int

    def per_token(self, extents: Extents, attend: Attend) -> None:
        """Run one step; it ends with the fields of the next."""
        rows = extents.reqs
        fields = self.fields
        mapping = fields["idx_mapping"][:rows]
        places = self.state.places(mapping)
        positions = fields["positions"][:rows]
        hidden = self.drafter.forward(
            # A padded row must name some token; what its place holds is anybody's guess.
            input_ids=torch.where(mapping < 0, 0, self.state.token[places]),
            positions=positions,
            hidden=self.state.hidden[places],
            attend=attend,
        )
        tokens = self.drafter.propose(hidden, places, positions + 2)
        self.state.keep(places, tokens, hidden)
        self._move_on(rows)

    def _move_on(self, rows: int) -> None:
        """Step every real row: position, length and slot; held at the model's end, on the null slot."""
        fields = self.fields
        real = fields["idx_mapping"][:rows] >= 0
        positions = fields["positions"][:rows]
        moved = real & (positions + 1 < self.max_model_len)
        positions.add_(moved)
        page = torch.gather(fields["block_table"][:rows], 1, (positions // self.page_size).unsqueeze(1))
        slot = page.squeeze(1).long() * self.page_size + positions % self.page_size
        fields["slot_mapping"][:rows].copy_(torch.where(moved, slot, NULL_SLOT))
        for buffer in fields:
            if buffer.field.name in ("seq_lens", "kv_lens"):
                buffer.tensor[:rows].add_(moved)

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Nothing: a token and a request are the same here."""

    def outputs(self) -> Iterator[Held]:
        """None: each step goes on from the state that it changes."""
        return iter(())

    def inputs(self) -> Iterator[Held]:
        """The state of the drafts."""
        return self.state.buffers()

    def weights(self) -> Iterator[Weight]:
        """Those of the drafter."""
        return self.drafter.weights()
