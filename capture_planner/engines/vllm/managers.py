"""From vLLM's settled flags to its graph managers: the target's, and those of the drafter."""

from __future__ import annotations

from typing import Protocol

from capture_planner.engines.core import Manager
from capture_planner.engines.vllm import legacy
from capture_planner.engines.vllm.drafter import DraftDecode, DraftPrefill
from capture_planner.engines.vllm.schedule import Tier, draft_tokens, normalized, query_lens
from capture_planner.engines.vllm.table import TableManager
from capture_planner.modes import GraphMode, Role


class Settings(Protocol):
    """What the managers need to know of the engine's configuration, once every rule was applied."""

    @property
    def runner(self) -> str:
        """``v2``, or ``v1`` for the legacy dispatcher."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """``cudagraph_capture_sizes``, in tokens, ascending."""
        ...

    @property
    def max_size(self) -> int:
        """``max_cudagraph_capture_size``."""
        ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def mode(self) -> GraphMode:
        """The target's mode, resolved."""
        ...

    @property
    def draft_prefill_mode(self) -> GraphMode | None:
        """The mode of the pass on the target's batch; not asked where all draft positions are one pass."""
        ...

    @property
    def draft_decode_mode(self) -> GraphMode | None:
        """The mode of the uniform draft passes, see ``drafter.draft_decode_mode``; None where there are none."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """K; 0 without speculation."""
        ...

    @property
    def schedule(self) -> tuple[Tier, ...] | None:
        """The dynamic schedule, as given; None where K is fixed."""
        ...

    @property
    def draft_query_len(self) -> int:
        """Tokens of each request where all draft positions are one pass; 0 for every other drafter."""
        ...

    @property
    def draft_fused(self) -> bool:
        """Whether every draft backend refreshes its metadata in the graph, so that a chain is one graph."""
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
    def max_loras(self) -> int: ...

    @property
    def specialize_lora(self) -> bool: ...


def managers(settings: Settings) -> tuple[Manager, ...]:
    """Return the managers that can have graphs, target first."""
    if settings.runner == "v1":
        return _legacy(settings)
    tiers = () if settings.schedule is None else normalized([*settings.schedule])
    most, requests = settings.num_speculative_tokens, settings.max_num_seqs
    widths = query_lens(tiers, max_num_reqs=requests, num_speculative=most)

    def table(role: Role, mode: GraphMode, query_len: int) -> TableManager:
        is_target = role is Role.TARGET
        return TableManager(
            role=role,
            mode=mode,
            sizes=settings.sizes,
            max_size=settings.max_size,
            max_num_reqs=requests,
            query_len=query_len,
            # The engine knows a dynamic schedule by a width beyond K; a pass of 1 or K tokens is fixed.
            query_lens=widths if query_len > most else (query_len,),
            lora_cases=settings.lora_cases if is_target else (0,),
            varlen=settings.varlen and is_target,
        )

    target = table(Role.TARGET, settings.mode, 1 + most)
    found: list[Manager] = [target]
    if settings.draft_prefill_mode is not None and not settings.draft_query_len:
        prefill = table(Role.DRAFT_PREFILL, settings.draft_prefill_mode, 1 + most)
        found.append(DraftPrefill(table=prefill, target=target))
    lookup = draft_tokens(tiers, max_num_reqs=requests, num_speculative=most)
    if settings.draft_decode_mode is not None and settings.draft_query_len:
        whole = table(Role.DRAFT_DECODE, settings.draft_decode_mode, settings.draft_query_len)
        found.append(DraftDecode(table=whole, draft_tokens=lookup, least=1))
    elif settings.draft_decode_mode is not None and most > 1:
        # With K = 1 no position follows the first, and the engine captures nothing for one.
        decode = table(Role.DRAFT_DECODE, settings.draft_decode_mode, 1)
        chains = tuple(sorted({k - 1 for k in lookup if k > 1}, reverse=True))
        found.append(
            DraftDecode(table=decode, draft_tokens=lookup, chains=chains if settings.draft_fused else None)
        )
    return tuple(found)


def _legacy(settings: Settings) -> tuple[Manager, ...]:
    query_len = 1 + settings.num_speculative_tokens
    sizes = legacy.speculative_sizes(
        settings.sizes, settings.max_size, query_len=query_len, mode=settings.mode
    )

    def manager(role: Role, mode: GraphMode) -> Manager:
        is_target = role is Role.TARGET
        return legacy.PaddedManager(
            role=role,
            mode=mode,
            sizes=sizes,
            max_num_reqs=settings.max_num_seqs,
            query_len=query_len,
            # Drafters are asked without adapters, and have the cases of the target.
            lora_cases=tuple(case for case in settings.lora_cases if is_target or case == 0),
            max_loras=settings.max_loras if is_target else 0,
            specialize_lora=settings.specialize_lora and is_target,
        )

    found = [manager(Role.TARGET, settings.mode)]
    if settings.draft_prefill_mode is not None:
        found.append(manager(Role.DRAFT_PREFILL, settings.draft_prefill_mode))
    if settings.draft_decode_mode is not None:
        found.append(manager(Role.DRAFT_DECODE, settings.draft_decode_mode))
    return tuple(found)
