"""First draft passes that make all drafts: in parallel on mask tokens, or by several modules after one another."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from capture_planner.records.batch import Entry
from capture_planner_runner.compilation.forwards import Inputs
from capture_planner_runner.execution.bodies import DraftPrefillBody
from capture_planner_runner.execution.fields import Extents
from capture_planner_runner.models.protocols import Attend


@attrs.define(eq=False)
class ParallelDraftBody(DraftPrefillBody):
    """All drafts at once: each but the first in a row of its own, with a mask token."""

    def source(self, rows: int) -> torch.Tensor:
        """Return the target's state of each row; of a mask token the drafter's own."""
        mask = self.drafter.mask_hidden
        if mask is None:
            return self.hidden[:rows]  # of a draft model, which reads none
        aux, wanted = self.target.aux, self.fields["target_rows"][:rows].long()
        states = (self.target.hidden if aux is None else aux)[wanted.clamp(min=0)]
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
        tokens = self.drafter.propose(hidden, states.repeat_interleave(most), positions.flatten()).view(reqs, most)
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
            tokens = self.drafter.propose(hidden[last], states, at, number)
            self.updates.keep(self.state, mapping, tokens, first=number == 0)
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
