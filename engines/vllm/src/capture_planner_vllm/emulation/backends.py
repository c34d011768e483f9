"""The attention backends of target and drafter, and the modes that they leave: vLLM's final settings."""

from __future__ import annotations

import attrs

from capture_planner.engines.parsing import refusal
from capture_planner.modes import GraphMode, GraphSupport
from capture_planner_vllm.emulation import legacy
from capture_planner_vllm.emulation.attention import BACKEND, AttentionChoice
from capture_planner_vllm.emulation.config import Configuration
from capture_planner_vllm.emulation.drafter import draft_modes
from capture_planner_vllm.emulation.model import ModelFacts
from capture_planner_vllm.emulation.options import COMPILATION
from capture_planner_vllm.emulation.parts import COMPILE
from capture_planner_vllm.emulation.precision import check_cache
from capture_planner_vllm.emulation.releases import has
from capture_planner_vllm.emulation.resolution import resolve_mode
from capture_planner_vllm.emulation.settings import DrafterKind, RunnerVersion, VllmSettings, lora_cases
from capture_planner_vllm.emulation.speculation import SPECULATIVE, Speculation

_DEFAULT_BLOCK = 16
"""Tokens of a KV block where no flag gives them."""


def final_settings(config: Configuration) -> VllmSettings:
    """Choose the attention backends, and resolve the mode of every manager; raises ``FlagError``."""
    spec, v1 = config.spec, config.runner is RunnerVersion.V1
    tokens = spec.tokens if spec is not None else 0
    attention = _attention(config, config.model)
    backend = weakest = attention.choose(BACKEND, config.backend)
    support = attention.support(backend)
    if config.model.encoder_decoder:
        cross = attrs.evolve(attention, cross=True)
        support = min(support, cross.support(cross.choose(BACKEND, config.backend)))
    draft, varlen = None, spec is not None and spec.has_draft_cache and spec.adaptive
    # Of a model that is not emulated, the drafter's graphs are the model's to decide.
    if spec is not None and spec.has_draft_cache and config.model.odd is None:
        draft = _draft_attention(config, spec)
        # vLLM takes the weakest of all layers, the drafter's included (vllm#49547, #50619).
        if draft.shared < support:
            weakest, support = draft.backend, draft.shared
    if varlen:
        _set_adaptive_mode(config, attention, backend)
    # CudagraphDispatcher asserts it (v1/cudagraph_dispatcher.py).
    if v1 and config.mode.has_piecewise and not (config.breakable or config.compiles_around_attention):
        message = "vLLM's V1 runner captures pieces that end at attention, which is not split off"
        raise refusal(COMPILATION, message, "leave it out, or ask for a mode without PIECEWISE", "splitting_ops")
    mode = resolve_mode(
        config.mode,
        support=support,
        backend=weakest,
        query_len=1 + tokens,
        splits_attention=config.splits_attention(),
        graph_partition=config.partition,
        compiles=config.compile == 3,
        piecewise_capture=config.captures_pieces,
        note=lambda rule, old, new, text: config.note(rule, old.value, new.value, text, backend=weakest),
    )
    sizes, max_size = config.sizes, config.max_size
    # A size that was no multiple of 1 + K had a short request, whose prefill branch was captured (vllm#28207).
    if v1 and mode.decode_mode is GraphMode.FULL and tokens and sizes:
        sizes = legacy.speculative_sizes(sizes, max_size, query_len=1 + tokens, mode=mode)
        max_size = sizes[-1]
        message = f"sizes are rounded up to multiples of {1 + tokens}"
        config.note("whole-requests", len(config.sizes), len(sizes), message)
    prefill = decode = None
    if spec is not None and draft is not None:
        prefill, decode = draft_modes(
            mode,
            spec.drafter,
            config.runner,
            support=draft.own,
            breakable=config.breakable and has("breakable-modules"),
            eager=spec.eager,
        )
    loras, separate, specialize = config.max_loras, config.separate_lora, config.specialize
    return VllmSettings(
        runner=config.runner,
        sizes=sizes,
        max_size=max_size,
        max_num_seqs=config.seqs,
        max_num_batched_tokens=config.tokens,
        max_model_len=config.max_model_len,
        requested_mode=config.requested,
        configured_mode=config.mode,
        mode=mode,
        draft_prefill_mode=prefill,
        draft_decode_mode=decode,
        drafter=spec.drafter if spec is not None else DrafterKind.NONE,
        method=spec.method if spec is not None else None,
        num_speculative_tokens=tokens,
        schedule=config.schedule,
        drafted=config.drafted,
        draft_fused=draft is not None and draft.fused,
        draft_query_len=spec.width if spec is not None and draft is not None else 0,
        lora_cases=lora_cases(loras, config.runner, separate=separate, specialize=specialize),
        varlen=varlen,
        max_loras=loras,
        specialize_lora=specialize,
        compilation=COMPILE[config.compile or 0],
        overlap=config.overlap if config.data > 1 else None,
        async_scheduling=config.asynchronous,
        backend=backend,
    )


def _attention(config: Configuration, model: ModelFacts) -> AttentionChoice:
    return AttentionChoice(
        capability=config.environment.device.sm,
        model=model,
        tensor=config.tensor,
        decode_context=config.decode_context,
        flash_attn=config.flash_attn,
        trtllm=config.trtllm,
        adaptive=config.spec is not None and config.spec.adaptive,
        dtype=config.dtype,
        cache=config.cache,
        block=config.block,
        by_model=config.model.odd is not None,
    )


@attrs.frozen
class _DraftAttention:
    """The attention of a drafter."""

    backend: str
    own: GraphSupport
    """The support level that its layers report to the drafter."""
    shared: GraphSupport
    """The support level that they report in one group with the target's layers."""
    fused: bool
    """Whether a chain of its decodes is one graph."""


def _draft_attention(config: Configuration, spec: Speculation) -> _DraftAttention:
    attention = _attention(config, spec.model)
    if spec.cache is not None:
        cache, key = spec.cache, "kv_cache_dtype"
        if config.model.mla and cache.startswith("nvfp4") and not cache.endswith("_ds_mla"):
            # vLLM validates a copy of the target's configuration with it (validate_nvfp4_kv_cache_with_mla).
            raise refusal(SPECULATIVE, f"vLLM does not combine {cache} with MLA", "give fp8 or auto", key)
        check_cache(SPECULATIVE, cache, config.dtype, key)
        # vLLM copies the KV-cache settings for it, and reads the default block size in the copy as the
        # user's: backends of larger blocks are out.
        attention = attrs.evolve(attention, cache=cache, block=attention.block or _DEFAULT_BLOCK)
    independent, parallel = spec.method == "draft_model", spec.drafter is DrafterKind.PARALLEL
    v2, backend = config.runner is RunnerVersion.V2, spec.backend
    # V1 never passes the target's backend on; V2 does, and gives an independent model no other.
    if v2 and not parallel:
        backend = config.backend if independent else backend or config.backend
    alone = attrs.evolve(attention, tensor=spec.tensor, causal=spec.model.causal or not parallel)
    if v2 and (independent or parallel):
        alone = attrs.evolve(alone, decode_context=1)
    if spec.method == "dspark":
        # It drafts blocks of one length, whatever the verification trims.
        alone = attrs.evolve(alone, adaptive=False)
    chosen = alone.choose(SPECULATIVE, backend)
    # Metadata builders read one rank's heads of the target, and the draft's KV heads on its own ranks.
    heads, kv_heads = config.model.heads // config.tensor, max(1, spec.model.kv_heads // spec.tensor)
    built = attrs.evolve(spec.model, heads=heads, kv_heads=kv_heads)
    shared = attrs.evolve(attention, model=built, tensor=1)
    fused = shared.refreshes(chosen) and spec.tokens > 1 and spec.drafter is DrafterKind.CHAIN
    own = attrs.evolve(alone, model=built, tensor=1)
    return _DraftAttention(chosen, own.support(chosen), shared.support(chosen), fused)


def _set_adaptive_mode(config: Configuration, attention: AttentionChoice, backend: str) -> None:
    """Set the mode that adaptive verification runs in; raises ``FlagError`` where it has none."""
    key = "enable_adaptive_verification"
    if not attention.varies(backend):
        error = config.model.refusal if config.backend is None else refusal
        raise error(SPECULATIVE, f"{backend} graphs serve a single query length", "leave it out", key)
    if GraphMode.FULL not in config.mode.allowed:
        message = f"vLLM requires FULL graphs for it, and the mode is {config.mode.value}"
        raise refusal(SPECULATIVE, message, "leave it out", key)
    if config.mode is not GraphMode.FULL_DECODE_ONLY:
        mode = GraphMode.FULL_AND_PIECEWISE if config.captures_pieces else GraphMode.FULL_DECODE_ONLY
        config.set_mode("adaptive", mode, "adaptive verification has decode graphs of its own")
