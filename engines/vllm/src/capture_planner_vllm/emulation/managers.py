"""From vLLM's settings to its graph managers: the target's and the drafter's."""

from __future__ import annotations

from capture_planner.engines.emulation import Manager
from capture_planner.modes import GraphMode, Role
from capture_planner_vllm.emulation import legacy
from capture_planner_vllm.emulation.drafter import DraftDecode, DraftPrefill
from capture_planner_vllm.emulation.settings import RunnerVersion, VllmSettings
from capture_planner_vllm.emulation.table import TableManager


def managers(settings: VllmSettings) -> tuple[Manager, ...]:
    """Return the managers that can have graphs, target first."""
    if settings.runner is RunnerVersion.V1:
        return _legacy(settings)
    most, lookup = settings.num_speculative_tokens, settings.drafted

    def table(role: Role, mode: GraphMode, query_len: int, target: TableManager | None = None) -> TableManager:
        is_target = target is None
        return TableManager(
            role=role,
            mode=mode,
            # GPUModelRunner.capture_model asks the target alone whether there is something to capture.
            sizes=settings.sizes if target is None or target.graphs else (),
            max_size=settings.max_size,
            max_num_reqs=settings.max_num_seqs,
            query_len=query_len,
            # The engine knows a dynamic schedule by a width beyond K; a pass of 1 or K tokens is fixed.
            query_lens=settings.decode_query_lens if query_len > most else (query_len,),
            lora_cases=settings.lora_cases if is_target else (0,),  # drafters run without adapters
            varlen=settings.varlen and is_target,
            overlap=settings.overlap if is_target else None,
        )

    target = table(Role.TARGET, settings.mode, settings.query_len)
    result: list[Manager] = [target]
    if settings.draft_prefill_mode is not None and not settings.draft_query_len:
        prefill = table(Role.DRAFT_PREFILL, settings.draft_prefill_mode, settings.query_len, target)
        result.append(DraftPrefill(table=prefill, target=target))
    if settings.draft_decode_mode is not None and settings.draft_query_len:
        whole = table(Role.DRAFT_DECODE, settings.draft_decode_mode, settings.draft_query_len, target)
        result.append(DraftDecode(table=whole, draft_tokens=lookup, least=1))
    elif settings.draft_decode_mode is not None and most > 1:
        # With K = 1 no position follows the first, and the engine captures nothing for one.
        decode = table(Role.DRAFT_DECODE, settings.draft_decode_mode, 1, target)
        # K below 2 has no chain, and vLLM captures the longest first (SpeculatorCudaGraphManager.capture).
        lengths = tuple(sorted({k - 1 for k in lookup if k > 1}, reverse=True))
        chains = lengths if settings.draft_fused else None
        result.append(DraftDecode(table=decode, draft_tokens=lookup, chains=chains))
    return tuple(result)


def _legacy(settings: VllmSettings) -> tuple[Manager, ...]:
    def manager(role: Role, mode: GraphMode) -> Manager:
        is_target = role is Role.TARGET
        return legacy.PaddedManager(
            role=role,
            mode=mode,
            sizes=settings.sizes,
            max_num_reqs=settings.max_num_seqs,
            query_len=settings.query_len,
            # Drafters run without adapters, but capture the target's case 0.
            lora_cases=tuple(case for case in settings.lora_cases if is_target or case == 0),
            max_loras=settings.max_loras if is_target else 0,
            specialize_lora=settings.specialize_lora and is_target,
            overlap=settings.overlap if is_target else None,
        )

    modes = (settings.mode, settings.draft_prefill_mode, settings.draft_decode_mode)
    return tuple(manager(role, mode) for role, mode in zip(Role, modes, strict=True) if mode is not None)
