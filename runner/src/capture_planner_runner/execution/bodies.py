"""The computation of each role: the part that graphs hold, over persistent buffers only.

A body has a part per token, which every graph holds, and a part per request, which a FULL graph
holds and everything else runs outside, at real extents: a PIECEWISE graph pads no requests, and so
must not read what is theirs (vllm#39773). Results return through persistent buffers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

import attrs
import torch

from capture_planner.records.batch import Entry
from capture_planner_runner.compilation.forwards import Forwards, Inputs
from capture_planner_runner.execution.fields import (
    PROPOSAL_ROWS,
    REQUEST_KEYS,
    SAMPLED_ROWS,
    Extents,
    Fields,
    TensorRef,
)
from capture_planner_runner.execution.inputs import Array
from capture_planner_runner.execution.sampling import Sampler
from capture_planner_runner.execution.updates import DraftState, TokenFields, Updates
from capture_planner_runner.models.protocols import Adapters, Attend, Drafter, TargetModel, Weight


class Body(Protocol):
    """The computation of one forward of a role."""

    forwards: Forwards
    """Compiled variants of ``forward``."""

    @property
    def network(self) -> Hashable:
        """Key of everything that ``forward`` depends on besides its arguments; equal keys share compiled code.

        Models, adapters and drafters are keys by what they are: they define no equality.
        """

    def forward(self, attend: Attend, variant: int, **inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the network: the part that can be compiled, of tensors that are given."""

    def examples(self, extents: Extents) -> Iterator[tuple[int, Inputs]]:
        """Yield each variant of ``forward`` that a step of such extents runs, with inputs for it."""

    def per_token(self, extents: Extents, attend: Attend) -> None:
        """Run the model over ``extents.tokens`` rows of the persistent inputs."""

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Run what follows for ``extents.reqs`` requests. ``entry`` is set where a graph holds it."""

    def outputs(self) -> Iterator[TensorRef]:
        """Every persistent tensor that a forward writes as a whole before anything reads it."""

    def inputs(self) -> Iterator[TensorRef]:
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
    """``int64[max tokens]``: the likeliest or the sampled next token of each row that was read; of every row after a
    uniform FULL graph."""
    updates: Updates
    token_fields: TokenFields
    aux_layers: tuple[int, ...] = ()
    embeddings: torch.Tensor | None = None
    """``[max tokens, hidden_size]``: in place of token ids, where the plan says so."""
    ahead: bool = False
    """Whether an input id may be negative: -1 - i is what the previous step says after its row i."""
    advances: bool = False
    """Whether a graph of one token a request ends with the fields of the next step."""
    adapters: Adapters | None = None
    """Products that LoRA adds to the model's layers; None: nothing, also in graphs for active adapters."""
    sampler: Sampler | None = None
    """Draws the tokens; None: they are the likeliest."""
    forwards: Forwards = attrs.Factory(Forwards)

    def per_token(self, extents: Extents, attend: Attend) -> None:
        rows = extents.tokens
        hidden, *aux = self.forwards.run(self.forward, attend, *self._inputs(extents))
        # Copied out of the graph's memory, which the next replay in its pool overwrites.
        self.hidden[:rows].copy_(hidden)
        if self.aux is not None:
            self.aux[:rows].copy_(aux[0])

    def examples(self, extents: Extents) -> Iterator[tuple[int, Inputs]]:
        """Yield the one variant: how many adapters are active."""
        yield self._inputs(extents)

    def _inputs(self, extents: Extents) -> tuple[int, Inputs]:
        rows, inputs = extents.tokens, {"positions": self.fields["positions"][: extents.tokens]}
        if self.model.mrope:
            # The field has the three sections of a token side by side; models take a row for each section.
            inputs["positions"] = self.fields["mrope_positions"].view(-1, 3)[:rows].t()
        if self.embeddings is None:
            inputs["input_ids"] = self.input_ids(rows)
        else:
            inputs["embeddings"] = self.embeddings[:rows]
        active = extents.adapters if self.adapters is not None else 0
        if active:
            inputs["lanes"] = self.fields["adapter_lanes"][:rows]
            inputs["active"] = self.fields["active_adapters"][:active]
        return active, inputs

    @property
    def network(self) -> Hashable:
        return self.model, self.adapters, self.aux_layers

    def forward(self, attend: Attend, variant: int, **inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the hidden states, and the auxiliary ones where a drafter reads them."""
        lanes, active = inputs.get("lanes"), inputs.get("active")
        with ExitStack() as stack:
            if self.adapters is not None and lanes is not None and active is not None:
                stack.enter_context(self.adapters.applied(lanes, active))
            hidden, aux = self.model.forward(
                input_ids=inputs.get("input_ids"),
                embeddings=inputs.get("embeddings"),
                positions=inputs["positions"],
                attend=attend,
                aux_layers=self.aux_layers,
            )
        return [hidden] if aux is None else [hidden, aux]

    def input_ids(self, rows: int) -> torch.Tensor:
        """Return the ids ``int[rows]`` that the next forward reads, answers of the step before included."""
        ids = self.fields["input_ids"][:rows]
        return self.updates.taken(ids, self.tokens) if self.ahead else ids

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Fill ``tokens`` inside a graph of decodes, where every row is read; else ``sample`` is asked."""
        if not _reads_all(entry):
            # With prompts, few rows are read: ``sample`` computes their logits behind the graph.
            return
        rows = extents.tokens
        tokens = self.next_tokens(slice(rows))
        self.tokens[:rows].copy_(tokens)
        # With one token a request, the next step's fields follow from this one's; prompts have other rows next.
        if self.advances and extents.reqs == rows:
            self.updates.advance(self.token_fields, rows, tokens)

    def sample(self, entry: Entry | None, count: int) -> None:
        """Fill ``tokens`` where the graph has not: at the first ``count`` rows of ``sampled_rows``."""
        if not _reads_all(entry):
            rows = self.fields[SAMPLED_ROWS][:count]
            # At their own rows, where verification and the next step look for them.
            self.tokens.index_copy_(0, rows, self.next_tokens(rows))

    def next_tokens(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return the token after each of these rows, ``int64[N]``: the likeliest, or by the sampler."""
        hidden, sampler = self.hidden[rows], self.sampler
        if sampler is None:
            # Not by whole logits, of which each rank of a spread model has a part.
            return self.model.likeliest(hidden)
        found = self.model.logits(hidden), self.fields[REQUEST_KEYS][rows], self.fields["positions"][rows] + 1
        if sampler.proposed is None:
            return sampler.answers(*found)
        # A row's draft is the token of the next row.
        drafts = self.fields["input_ids"].roll(-1)[rows].long()
        return sampler.answers(*found, drafts, self.fields[PROPOSAL_ROWS][rows])

    def embed(self, input_ids: Array) -> None:
        """Fill ``embeddings`` for ``int32[T]``, where they are the input; rows past them become zero."""
        if self.embeddings is not None:
            rows = len(input_ids)
            # What a larger batch left would reach real rows through scales over all rows (vllm#37442).
            self.embeddings[rows:].zero_()
            ids = torch.from_numpy(input_ids).to(self.embeddings.device)
            self.embeddings[:rows] = self.model.embed(ids)

    def outputs(self) -> Iterator[TensorRef]:
        """Yield the tensors that sampling and the drafter read."""
        yield "hidden", self, "hidden"
        # Where the next step reads the answers, they are an input: poison must not destroy them.
        if not self.ahead:
            yield "tokens", self, "tokens"
        if self.aux is not None:
            yield "aux", self, "aux"

    def inputs(self) -> Iterator[TensorRef]:
        """The embeddings or the answers of the step before, where they are the input."""
        if self.sampler is not None:
            yield from self.sampler.buffers()
        if self.ahead:
            yield "tokens", self, "tokens"
        if self.embeddings is not None:
            yield "embeddings", self, "embeddings"

    def weights(self) -> Iterator[Weight]:
        yield from self.model.weights()
        if self.adapters is not None:
            yield from self.adapters.weights()


def _reads_all(entry: Entry | None) -> bool:
    """Say whether a graph computes logits of all of its rows: graphs of decodes do."""
    return entry is not None and entry.tokens_each is not None


@attrs.define(eq=False)
class _DraftBody:
    drafter: Drafter
    fields: Fields
    state: DraftState
    updates: Updates
    distance: int
    """Distance of a proposed token from its row's position: 2 for a head, 1 for a draft model."""
    forwards: Forwards = attrs.field(factory=Forwards, kw_only=True)
    sampler: Sampler | None = attrs.field(default=None, kw_only=True)
    """Draws the drafts; None: they are the likeliest tokens."""

    def propose(
        self,
        hidden: torch.Tensor,
        states: torch.Tensor,
        rows: slice | torch.Tensor,
        positions: torch.Tensor,
        number: int | torch.Tensor,
        module: int = 0,
    ) -> torch.Tensor:
        """Return a draft for each of N rows, ``int64[N]``, as ``Drafter.propose`` does, or by the sampler.

        :param rows: which of the fields they are.
        :param number: how many drafts of the step come before; also ``int64[N]``.
        """
        if self.sampler is None:
            return self.drafter.propose(hidden, states, positions, module)
        places = states * self.state.proposed.shape[1] + number
        return self.sampler.draft(
            self.drafter.logits(hidden, module), self.fields[REQUEST_KEYS][rows], positions, places
        )

    def sampled(self) -> Iterator[TensorRef]:
        """Yield what the sampler keeps."""
        return iter(()) if self.sampler is None else self.sampler.buffers()

    @property
    def network(self) -> Hashable:
        return (self.drafter,)

    def forward(self, attend: Attend, variant: int, **inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the hidden states that one module leaves."""
        return [self.drafter.forward(**inputs, attend=attend, module=variant)]

    def weights(self) -> Iterator[Weight]:
        return self.drafter.weights()


@attrs.define(eq=False)
class DraftPrefillBody(_DraftBody):
    """Draft position 0, on the target's batch: it reads what the target left in its outputs.

    A draft model has its own rows, and reads only tokens.
    """

    target: TargetBody
    hidden: torch.Tensor
    """``[max tokens, hidden_size]``"""

    def per_token(self, extents: Extents, attend: Attend) -> None:
        rows = extents.tokens
        (hidden,) = self.forwards.run(self.forward, attend, 0, self._inputs(rows))
        self.hidden[:rows].copy_(hidden)

    def examples(self, extents: Extents) -> Iterator[tuple[int, Inputs]]:
        """Yield the one module."""
        yield 0, self._inputs(extents.tokens)

    def _inputs(self, rows: int) -> Inputs:
        """Return what a module reads, of the first of several."""
        ids, positions = self.fields["input_ids"][:rows], self.fields["positions"][:rows]
        return {"input_ids": ids, "positions": positions, "hidden": self.source(rows)}

    def source(self, rows: int) -> torch.Tensor:
        """Return the state that each row goes on from, ``[rows, hidden_size]``."""
        aux = self.target.aux
        return self.target.hidden[:rows] if aux is None else self.drafter.combine(aux[:rows])

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Propose the first token of each request, from its last settled row."""
        last = self.fields["last_token_indices"][: extents.reqs].long()
        mapping = self.fields["idx_mapping"][: extents.reqs]
        states, _ = self.updates.entered(self.state, mapping)
        hidden = self.hidden[last]
        tokens = self.propose(hidden, states, last, self.fields["positions"][last] + self.distance, 0)
        self.state.hidden.index_copy_(0, states, hidden)
        self.updates.keep(self.state, mapping, tokens, first=True)

    def outputs(self) -> Iterator[TensorRef]:
        """The hidden states, and the state that draft decodes go on from."""
        yield "hidden", self, "hidden"
        yield from self.state.written()

    def inputs(self) -> Iterator[TensorRef]:
        yield from self.state.carried()
        yield from self.sampled()
        for name, holder, attribute in self.target.outputs():
            yield f"target.{name}", holder, attribute


@attrs.define(eq=False)
class DraftDecodeBody(_DraftBody):
    """Later draft positions, one token a request: each step moves its own fields on to the next."""

    token_fields: TokenFields

    def per_token(self, extents: Extents, attend: Attend) -> None:
        """Run one step; it ends with the fields of the next."""
        rows = extents.reqs
        mapping = self.fields["idx_mapping"][:rows]
        states, inputs = self._inputs(rows)
        (hidden,) = self.forwards.run(self.forward, attend, 0, inputs)
        tokens = self.propose(hidden, states, slice(rows), inputs["positions"] + self.distance, self.state.column)
        self.state.hidden.index_copy_(0, states, hidden)
        self.updates.keep(self.state, mapping, tokens, first=False)
        # Last: `positions` above is a view of the field that this moves on.
        self.updates.advance(self.token_fields, rows)

    def examples(self, extents: Extents) -> Iterator[tuple[int, Inputs]]:
        """Yield the one module."""
        yield 0, self._inputs(extents.reqs)[1]

    def _inputs(self, rows: int) -> tuple[torch.Tensor, Inputs]:
        """Return the states' rows, and what the module reads."""
        states, ids = self.updates.entered(self.state, self.fields["idx_mapping"][:rows])
        positions, hidden = self.fields["positions"][:rows], self.state.hidden[states]
        return states, {"input_ids": ids, "positions": positions, "hidden": hidden}

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Nothing: a token and a request are the same here."""

    def outputs(self) -> Iterator[TensorRef]:
        """Yield nothing: each step goes on from the state that it changes."""
        return iter(())

    def inputs(self) -> Iterator[TensorRef]:
        yield from self.state.buffers()
        yield from self.sampled()


@attrs.define(eq=False)
class ParallelDraftBody(DraftPrefillBody):
    """All drafts at once: each but the first in a row of its own, with a mask token."""

    def source(self, rows: int) -> torch.Tensor:
        """Return the target's state of each row; of a mask token the drafter's own."""
        mask = self.drafter.mask_hidden
        if mask is None:
            return self.hidden[:rows]  # of a draft model, which reads none
        aux, wanted = self.target.aux, self.fields["target_rows"][:rows].long()
        states = (self.target.hidden if aux is None else aux)[wanted.clamp(min=0)]  # -1, a mask, is replaced below
        states = torch.where((wanted < 0).unsqueeze(1), mask.to(states.dtype), states)
        return states if aux is None else self.drafter.combine(states)

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Propose the tokens of each request, from its last settled row on. Rows that it lacks repeat its last one."""
        reqs, most = extents.reqs, self.state.proposed.shape[1]
        first = self.fields["last_token_indices"][:reqs].long()
        ends = self.fields["query_start_loc"][1 : reqs + 1].long()
        mapping = self.fields["idx_mapping"][:reqs]
        states, _ = self.updates.entered(self.state, mapping)
        steps = torch.arange(most, device=first.device)
        rows = torch.minimum(first.unsqueeze(1) + steps, (ends - 1).clamp(min=0).unsqueeze(1))
        positions = self.fields["positions"][first].unsqueeze(1) + steps + self.distance
        hidden = self.hidden[rows.flatten()]
        of_states, of_rows = (values.repeat_interleave(most) for values in (states, first))
        tokens = self.propose(hidden, of_states, of_rows, positions.flatten(), steps.repeat(reqs)).view(reqs, most)
        self.state.hidden.index_copy_(0, states, hidden.view(reqs, most, -1)[:, 0])
        self.updates.keep(self.state, mapping, tokens[:, 0], first=True)
        self.state.proposed.index_copy_(0, states, tokens)


@attrs.define(eq=False)
class ModulesBody(DraftPrefillBody):
    """MTP of several modules: each drafts a token on the same rows, and goes on from the states of the one before.

    A module reads its tokens one position later than the one before it, the last of them a draft. Where that draft is
    rejected, the module's key and value of this position are of a token that is not there; as it only drafts, tokens
    stay right. vLLM 0.33 runs such rows once more in the next step, which saves drafts.
    """

    def per_token(self, extents: Extents, attend: Attend) -> None:
        rows, reqs, most = extents.tokens, extents.reqs, self.state.proposed.shape[1]
        mapping = self.fields["idx_mapping"][:reqs]
        last = self.fields["last_token_indices"][:reqs].long()
        # Padded requests have no row: what they draft goes behind the real ones.
        places = torch.where(mapping < 0, rows, last)
        states, _ = self.updates.entered(self.state, mapping)
        inputs = self._inputs(rows)
        ids, positions = inputs["input_ids"], inputs["positions"]
        for number in range(most):
            (hidden,) = self.forwards.run(self.forward, attend, number, inputs)
            at = positions[last] + self.distance + number
            tokens = self.propose(hidden[last], states, last, at, number, number)
            self.updates.keep(self.state, mapping, tokens, first=number == 0)
            # Two more: one for the row that the shift takes away, one for the place of padded requests.
            ids = torch.cat([ids[1:], ids.new_zeros(2)])
            ids = ids.index_copy(0, places, tokens.to(ids.dtype))[:rows]
            inputs = {"input_ids": ids, "positions": positions, "hidden": hidden}
        self.hidden[:rows].copy_(hidden)
        self.state.hidden.index_copy_(0, states, hidden[last])

    def examples(self, extents: Extents) -> Iterator[tuple[int, Inputs]]:
        """Yield each module."""
        inputs = self._inputs(extents.tokens)
        yield from ((number, inputs) for number in range(self.state.proposed.shape[1]))

    def per_request(self, extents: Extents, entry: Entry | None) -> None:
        """Nothing: tokens are drafted between the modules."""
