"""From vLLM's settled flags to its graph managers: the target's, and the drafter's two."""

from __future__ import annotations

from typing import Protocol

from capture_planner.engines.core import Manager
from capture_planner.engines.vllm.drafter import DraftDecode, DraftPrefill
from capture_planner.engines.vllm.schedule import Tier, draft_tokens
from capture_planner.engines.vllm.table import TableManager
from capture_planner.modes import GraphMode, Role


class Settings(Protocol):
    """What the managers need to know of the engine's configuration, once every rule was applied."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """``cudagraph_capture_sizes``, in tokens, ascending."""
        ...

    @property
    def max_size(self) -> int:
        """``max_cudagraph_capture_size``."""
        ...

    @property
    def target_mode(self) -> GraphMode: ...

    @property
    def draft_prefill_mode(self) -> GraphMode | None:
        """The mode of draft position 0; None where no drafter makes graphs, or there is none."""
        ...

    @property
    def draft_decode_mode(self) -> GraphMode | None:
        """The mode of draft positions from 1 on, see ``drafter.draft_decode_mode``; None as above."""
        ...

    @property
    def max_num_reqs(self) -> int:
        """``max_num_seqs``."""
        ...

    @property
    def num_speculative(self) -> int:
        """K; 0 without speculation."""
        ...

    @property
    def schedule(self) -> tuple[Tier, ...]:
        """The dynamic schedule as ``schedule.normalized`` returns it; empty where K is fixed."""
        ...

    @property
    def query_lens(self) -> tuple[int, ...]:
        """``schedule.query_lens``, ascending; (1 + K,) where K is fixed."""
        ...

    @property
    def lora_cases(self) -> tuple[int, ...]:
        """Adapter counts captured for, ascending; (0,) without adapters."""
        ...

    @property
    def varlen(self) -> bool:
        """Whether decode graphs take any mix of lengths (adaptive verification)."""
        ...

    @property
    def fused_chain(self) -> bool:
        """Whether every draft backend refreshes its metadata in the graph, so that a chain is one graph."""
        ...


def managers(settings: Settings) -> tuple[Manager, ...]:
    """Return the managers that can have graphs, target first.

    A drafter of K = 1 has no positions after the first, and captures nothing for them.
    """
    most = settings.num_speculative
    target = TableManager(
        role=Role.TARGET,
        mode=settings.target_mode,
        sizes=settings.sizes,
        max_size=settings.max_size,
        max_num_reqs=settings.max_num_reqs,
        query_len=1 + most,
        query_lens=settings.query_lens,
        lora_cases=settings.lora_cases,
        varlen=settings.varlen,
    )
    found: list[Manager] = [target]
    if settings.draft_prefill_mode is not None:
        prefill = TableManager(
            role=Role.DRAFT_PREFILL,
            mode=settings.draft_prefill_mode,
            sizes=settings.sizes,
            max_size=settings.max_size,
            max_num_reqs=settings.max_num_reqs,
            query_len=1 + most,
            query_lens=settings.query_lens,
        )
        found.append(DraftPrefill(table=prefill, target=target))
    if settings.draft_decode_mode is not None and most > 1:
        found.append(_decodes(settings, settings.draft_decode_mode))
    return tuple(found)


def _decodes(settings: Settings, mode: GraphMode) -> DraftDecode:
    lookup = draft_tokens(
        settings.schedule, max_num_reqs=settings.max_num_reqs, num_speculative=settings.num_speculative
    )
    table = TableManager(
        role=Role.DRAFT_DECODE,
        mode=mode,
        sizes=settings.sizes,
        max_size=settings.max_size,
        max_num_reqs=settings.max_num_reqs,
        query_len=1,
        query_lens=(1,),
    )
    chains = tuple(sorted({k - 1 for k in lookup if k > 1}, reverse=True))
    return DraftDecode(table=table, draft_tokens=lookup, chains=chains if settings.fused_chain else None)
