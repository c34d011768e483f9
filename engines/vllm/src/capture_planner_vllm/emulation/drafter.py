"""The drafters of vLLM 0.33, model runner V2: the graph managers of each, and its lookups in them.

Autoregressive drafters that read the target's state (EAGLE, EAGLE-3, MTP of one module, Gemma 4) have a
manager for draft position 0, on the target's batch, and one for the positions after it. MTP of several
modules has only the first, for all positions. Parallel drafters (DFlash, DSpark) have only the second, for
all positions at once. Independent draft models, n-gram and suffix matching have none.
"""

from __future__ import annotations

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.emulation import CapturedGraph
from capture_planner.modes import GraphMode, GraphSupport, Reason, Role
from capture_planner.records.batch import Batch
from capture_planner_vllm.emulation import legacy
from capture_planner_vllm.emulation.settings import DrafterKind, RunnerVersion
from capture_planner_vllm.emulation.table import Query, TableManager, answered


def draft_decode_mode(mode: GraphMode) -> GraphMode:
    """Return the mode of draft positions from 1 on: never PIECEWISE, which does not pad requests."""
    return GraphMode.FULL_DECODE_ONLY if mode.decode_mode is GraphMode.FULL else GraphMode.NONE


def draft_modes(
    mode: GraphMode,
    drafter: DrafterKind,
    runner: RunnerVersion,
    *,
    support: GraphSupport = GraphSupport.ALWAYS,
    breakable: bool = False,
    eager: bool = False,
) -> tuple[GraphMode | None, GraphMode | None]:
    """Return the modes of a drafter's first position and of its later ones; None: there is no such manager.

    ``mode`` is the target's; ``support`` the level of a parallel drafter's own layers; ``breakable`` means
    piecewise graphs without torch.compile; ``eager`` is the draft's ``enforce_eager``, which only model runner
    V1 applies. Under V1 any draft with a KV cache has one dispatcher.
    """
    if runner is RunnerVersion.V1:
        every = GraphMode.NONE if eager else legacy.draft_mode(mode)
        return every, every
    decode = draft_decode_mode(mode)
    match drafter:
        case DrafterKind.CHAIN:
            return mode, decode
        case DrafterKind.MODULES:
            # Compiled pieces do not depend on which module runs, so they would replay another one.
            return (decode if mode.has_piecewise and not breakable else mode), None
        case DrafterKind.PARALLEL:
            # Where its own layers support less, vLLM runs the draft eager (dflash/speculator.py).
            return None, decode if support >= GraphSupport.UNIFORM_BATCH else GraphMode.NONE
    return None, None


@attrs.frozen(kw_only=True)
class DraftPrefill:
    """Draft position 0, looked up with the tokens that the target's batch is padded to."""

    table: TableManager
    target: TableManager
    role: Role = attrs.field(default=Role.DRAFT_PREFILL, init=False)

    @property
    def mode(self) -> GraphMode:
        return self.table.mode

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        return self.table.graphs

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the answer for the target's batch; an eager one keeps the target's padding."""
        graph = self.target.find(self.target.query(batch))
        # vLLM's drafter gets the target's padded tokens, and its own list may pad them once more.
        padded = batch.num_tokens if graph is None else graph.entry.num_tokens
        return self.at(batch, padded, self.table.query(batch).uniform)

    def at(self, batch: Batch, num_tokens: int, uniform: int | None) -> Dispatch:
        """Return the answer where the target runs ``num_tokens`` tokens, padding included; without adapters."""
        query = Query(num_reqs=batch.num_reqs, num_tokens=num_tokens, uniform=uniform, max_query_len=None)
        graph = self.table.find(query)
        reason = None if graph is not None else self.table.reason(query)
        return answered(graph, batch, reason, tokens=num_tokens)


@attrs.frozen(kw_only=True)
class DraftDecode:
    """Draft passes of ``table.query_len`` tokens per request: from position 1 on, in steps or chains, or as one."""

    table: TableManager
    draft_tokens: tuple[int, ...] = attrs.field(repr=False)
    """k of each batch size, as ``schedule.draft_tokens`` returns it."""
    chains: tuple[int, ...] | None = None
    """Lengths of fused chains, in draft steps and in the order of capture; None: single steps."""
    least: int = 2
    """The fewest draft tokens for which the pass runs: 2 for positions from 1 on, 1 for all of them."""

    @property
    def role(self) -> Role:
        return self.table.role

    @property
    def mode(self) -> GraphMode:
        return self.table.mode

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """In the order of capture: for each size, largest first, its chains, longest first."""
        if self.chains is None:
            return self.table.graphs
        return tuple(_chained(graph, steps) for graph in self.table.graphs for steps in self.chains)

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the answer for that many requests; a batch that drafts too few tokens has no pass."""
        return self.at(batch, batch.num_reqs)

    def at(self, batch: Batch, num_reqs: int) -> Dispatch:
        """Return the answer for rows of ``num_reqs``, maybe another rank's; a chain not captured runs eager, padded."""
        width = self.table.query_len
        batch = attrs.evolve(batch, num_tokens=batch.num_reqs * width)
        k = self.draft_tokens[batch.num_reqs] if 0 < batch.num_reqs < len(self.draft_tokens) else 0
        if k < self.least:
            return answered(None, batch, Reason.NOT_ADMISSIBLE)
        tokens = num_reqs * width
        query = Query(num_reqs=batch.num_reqs, num_tokens=tokens, uniform=width, max_query_len=None)
        graph = self.table.find(query)
        if graph is None:
            return answered(None, batch, self.table.reason(query), tokens=tokens)
        if self.chains is None:
            return answered(graph, batch, None)
        # A longer chain would draft tokens that the schedule does not ask for: the engine runs eager instead.
        if k - 1 not in self.chains:
            return answered(None, batch, Reason.MODE, tokens=graph.entry.num_tokens)
        return answered(_chained(graph, k - 1), batch, None)


def _chained(graph: CapturedGraph, steps: int) -> CapturedGraph:
    return attrs.evolve(graph, entry=attrs.evolve(graph.entry, draft_steps=steps))
