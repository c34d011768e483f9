"""The drafters of vLLM 0.33, model runner V2: which managers each makes, and how it asks them.

Emulated are the autoregressive drafters that read the target's state (EAGLE, EAGLE-3, MTP, Gemma 4):
``vllm/v1/worker/gpu/spec_decode/target_dependent_ar``. They have a manager for draft position 0, on
the target's batch, and one for the positions after it.
"""

from __future__ import annotations

import attrs

from capture_planner.dispatch import Dispatch
from capture_planner.engines.core import Graph
from capture_planner.engines.vllm.table import Query, TableManager, answered
from capture_planner.entry import Batch
from capture_planner.modes import GraphMode, Reason, Role

EMULATED = ("eagle", "eagle3", "mtp")
"""Methods whose drafters are emulated."""

NO_MANAGER = {
    "draft_model": "a drafter of its own weights runs without graphs",
    "ngram_gpu": "tokens are looked up, no model runs",
    "extract_hidden_states": "hidden states are stored, nothing is drafted",
}
"""Methods that the engine runs without any drafter graph: the target's manager is all there is."""

NOT_EMULATED = {
    "dflash": "one manager of decodes of 1 + K tokens, FULL only where the drafter's attention supports it",
    "dspark": "as dflash, with a block of drafts for each request",
    "multi_module_mtp": "one manager for all modules of the model, without PIECEWISE where it is compiled",
}
"""Methods whose drafters capture by rules that are not emulated, with what the engine does instead."""


def draft_decode_mode(mode: GraphMode) -> GraphMode:
    """Return the mode of draft positions from 1 on: never PIECEWISE, which does not pad requests."""
    return GraphMode.FULL_DECODE_ONLY if mode.decode_mode is GraphMode.FULL else GraphMode.NONE


@attrs.frozen(kw_only=True)
class DraftPrefill:
    """Draft position 0. It is asked with the tokens that the target's answer is padded to."""

    table: TableManager
    target: TableManager
    role: Role = attrs.field(default=Role.DRAFT_PREFILL, init=False)

    @property
    def mode(self) -> GraphMode:
        return self.table.mode

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return self.table.graphs

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the answer for the target's batch; an eager one still has the target's padding."""
        graph = self.target.find(self.target.query(batch))
        padded = batch.num_tokens if graph is None else graph.entry.num_tokens
        return self.at(batch, padded, self.table.query(batch).uniform)

    def at(self, batch: Batch, num_tokens: int, uniform: int | None) -> Dispatch:
        """Return the answer where the target runs ``num_tokens`` tokens, padding included."""
        query = Query(num_reqs=batch.num_reqs, num_tokens=num_tokens, uniform=uniform, max_query_len=None)
        found = self.table.find(query)
        reason = None if found is not None else self.table.reason(query)
        return answered(found, batch, reason, tokens=num_tokens)


@attrs.frozen(kw_only=True)
class DraftDecode:
    """Draft positions from 1 on: one token of each request, as single steps or as whole chains."""

    table: TableManager
    draft_tokens: tuple[int, ...] = attrs.field(repr=False)
    """k of each batch size, as ``schedule.draft_tokens`` returns it."""
    chains: tuple[int, ...] | None
    """The lengths of fused chains, in draft steps and in the order of capture; None: single steps."""
    role: Role = attrs.field(default=Role.DRAFT_DECODE, init=False)

    @property
    def mode(self) -> GraphMode:
        return self.table.mode

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """In the order of capture: for each size, largest first, its chains, longest first."""
        if self.chains is None:
            return self.table.graphs
        return tuple(_chained(graph, steps) for graph in self.table.graphs for steps in self.chains)

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the answer for that many requests; a batch with k < 2 drafts nothing more."""
        return self.at(batch, batch.num_reqs)

    def at(self, batch: Batch, num_tokens: int) -> Dispatch:
        """Return the answer where ``num_tokens`` rows run: more than requests where another rank has more.

        A chain serves its own length only; a length that is not captured runs eager, padded.
        """
        if not 0 < batch.num_reqs < len(self.draft_tokens) or self.draft_tokens[batch.num_reqs] < 2:
            return answered(None, batch, Reason.NOT_ADMISSIBLE)
        query = Query(num_reqs=batch.num_reqs, num_tokens=num_tokens, uniform=1, max_query_len=None)
        found = self.table.find(query)
        if found is None:
            return answered(None, batch, self.table.reason(query), tokens=num_tokens)
        if self.chains is None:
            return answered(found, batch, None)
        steps = self.draft_tokens[batch.num_reqs] - 1
        if steps not in self.chains:
            return answered(None, batch, Reason.MODE, tokens=found.entry.num_tokens)
        return answered(_chained(found, steps), batch, None)


def _chained(graph: Graph, steps: int) -> Graph:
    return attrs.evolve(graph, entry=attrs.evolve(graph.entry, draft_steps=steps))
