"""From vLLM's configuration to its settings: the attention backends, and the mode of every manager."""

from __future__ import annotations

from typing import NamedTuple

import attrs

from capture_planner.modes import GraphMode, GraphSupport
from capture_planner_vllm import legacy
from capture_planner_vllm.asked import COMPILATION
from capture_planner_vllm.attention import FLAG as BACKEND_FLAG
from capture_planner_vllm.attention import Attention
from capture_planner_vllm.config import Configuration
from capture_planner_vllm.drafter import draft_modes
from capture_planner_vllm.flags import refusal
from capture_planner_vllm.model import Model
from capture_planner_vllm.parts import COMPILE
from capture_planner_vllm.precision import DEFAULT_BLOCK, check_cache
from capture_planner_vllm.resolution import Ladder
from capture_planner_vllm.settings import Drafter, Runner, VllmSettings, lora_cases
from capture_planner_vllm.speculation import FLAG as SPECULATIVE
from capture_planner_vllm.speculation import Speculation


def resolved(config: Configuration) -> VllmSettings:
    """Choose the attention backends, and resolve the mode of every manager."""
    spec = config.spec
    tokens = spec.tokens if spec is not None else 0
    attention = _attention(config, config.model)
    backend = attention.choose(BACKEND_FLAG, config.backend)
    support = attention.support(backend)
    if config.model.encoder_decoder:
        cross = attrs.evolve(attention, cross=True)
        support = min(support, cross.support(cross.choose(BACKEND_FLAG, config.backend)))
    narrowest, draft = backend, None
    if spec is not None and spec.has_draft_cache:
        draft = _draft_attention(config, spec)
        if draft.shared < support:
            narrowest, support = draft.backend, draft.shared
    varlen = spec is not None and spec.adaptive and spec.has_draft_cache
    if varlen:
        _adapt(config, attention, backend)
    configured = config.mode
    in_pieces = config.breakable or config.compiles_around_attention
    if config.runner is Runner.V1 and configured.has_piecewise and not in_pieces:
        reason = "vLLM's V1 runner captures pieces that end where attention begins, and it is not split off"
        raise refusal(
            COMPILATION, reason, "leave it out, or ask for a mode without PIECEWISE", "splitting_ops"
        )
    ladder = Ladder(
        support=support,
        backend=narrowest,
        query_len=1 + tokens,
        splits_attention=config.splits_attention(),
        graph_partition=config.partition,
        compiles=config.compile == 3,
        piecewise_capture=config.captures_pieces,
        note=lambda rule, old, new, says: config.note(rule, old.value, new.value, says, backend=narrowest),
    )
    mode = ladder.resolve(config.mode)
    if config.runner is Runner.V1 and mode.decode_mode is GraphMode.FULL and tokens:
        _round(config, 1 + tokens, mode)
    if config.runner is Runner.V1 and mode is not GraphMode.NONE:
        _check_compiled(config)
    prefill = decode = None
    if spec is not None and draft is not None:
        prefill, decode = draft_modes(
            mode,
            spec.drafter,
            config.runner,
            support=draft.own,
            breakable=config.breakable,
            eager=spec.eager,
        )
    return VllmSettings(
        runner=config.runner,
        sizes=config.sizes,
        max_size=config.max_size,
        max_num_seqs=config.seqs,
        max_num_batched_tokens=config.tokens,
        max_model_len=config.max_model_len,
        requested_mode=config.requested,
        configured_mode=configured,
        mode=mode,
        draft_prefill_mode=prefill,
        draft_decode_mode=decode,
        drafter=spec.drafter if spec is not None else Drafter.NONE,
        method=spec.method if spec is not None else None,
        num_speculative_tokens=tokens,
        schedule=config.schedule,
        drafted=config.drafted,
        draft_fused=draft is not None and draft.fused,
        draft_query_len=spec.width if spec is not None else 0,
        lora_cases=lora_cases(
            config.max_loras, config.runner, separate=config.separate_lora, specialize=config.specialize
        ),
        varlen=varlen,
        data_parallel_size=config.data,
        tensor_parallel_size=config.tensor,
        max_loras=config.max_loras,
        specialize_lora=config.specialize,
        compilation=COMPILE[config.compile or 0],
        async_scheduling=config.asynchronous,
        backend=backend,
    )


class _Draft(NamedTuple):
    """The attention of a drafter."""

    backend: str
    own: GraphSupport
    """What its layers report to the drafter."""
    shared: GraphSupport
    """What they report beside the target's."""
    fused: bool
    """Whether a chain of its decodes is one graph."""


def _draft_attention(config: Configuration, spec: Speculation) -> _Draft:
    attention = _attention(config, spec.model)
    if spec.cache is not None:
        cache = check_cache(SPECULATIVE, spec.cache, config.dtype, "kv_cache_dtype")
        # vLLM copies the settings of the KV cache for it, and takes the default block in them for one that
        # was asked for: backends of larger blocks are out.
        attention = attrs.evolve(attention, cache=cache, block=attention.block or DEFAULT_BLOCK)
    independent, parallel = spec.method == "draft_model", spec.drafter is Drafter.PARALLEL
    v2 = config.runner is Runner.V2
    # V1 never hands the target's backend on; V2 does, and gives an independent model nothing else.
    asked = spec.backend
    if v2 and not parallel:
        asked = config.backend if independent else asked or config.backend
    alone = attrs.evolve(attention, tensor=spec.tensor, causal=spec.model.causal or not parallel)
    if v2 and (independent or parallel):
        alone = attrs.evolve(alone, decode_context=1)
    if spec.method == "dspark":
        # It drafts blocks of one length, whatever the verification trims.
        alone = attrs.evolve(alone, adaptive=False)
    backend = alone.choose(SPECULATIVE, asked)
    # Builders read a rank's heads of the target beside the draft's KV heads on its own ranks.
    heads, kv_heads = config.model.heads // config.tensor, max(1, spec.model.kv_heads // spec.tensor)
    built = attrs.evolve(spec.model, heads=heads, kv_heads=kv_heads)
    beside = attrs.evolve(attention, model=built, tensor=1)
    return _Draft(
        backend=backend,
        own=attrs.evolve(alone, model=built, tensor=1).support(backend),
        shared=beside.support(backend),
        fused=beside.refreshes(backend) and spec.tokens > 1 and spec.drafter is Drafter.CHAIN,
    )


def _adapt(config: Configuration, attention: Attention, backend: str) -> None:
    """Give adaptive verification the mode that it runs in; raises ``FlagError`` where it has none."""
    key = "enable_adaptive_verification"
    if not attention.varies(backend):
        refuse = config.model.refusal if config.backend is None else refusal
        raise refuse(SPECULATIVE, f"vLLM's {backend} graphs take one query length", "leave it out", key)
    if GraphMode.FULL not in config.mode.allowed:
        reason = f"vLLM needs FULL graphs for it, and {config.mode.value} is left"
        raise refusal(SPECULATIVE, reason, "leave it out", key)
    if config.mode is not GraphMode.FULL_DECODE_ONLY:
        wanted = GraphMode.FULL_AND_PIECEWISE if config.captures_pieces else GraphMode.FULL_DECODE_ONLY
        config.set_mode("adaptive", wanted, "adaptive verification has decode graphs of its own")


def _attention(config: Configuration, model: Model) -> Attention:
    return Attention(
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
    )


def _round(config: Configuration, query_len: int, mode: GraphMode) -> None:
    """Round sizes up to whole requests, as the V1 runner does; those beyond the largest go."""
    if config.sizes:
        kept = legacy.speculative_sizes(config.sizes, config.max_size, query_len=query_len, mode=mode)
        says = f"sizes are rounded up to multiples of {query_len}"
        config.note("whole-requests", len(config.sizes), len(kept), says)
        config.sizes, config.max_size = kept, kept[-1]


def _check_compiled(config: Configuration) -> None:
    """Refuse sizes to compile for that the V1 runner pads; those beyond the largest graph are not padded."""
    for size in config.compiled_sizes:
        if size <= config.max_size and size not in (0, *config.sizes):
            reason = f"vLLM's V1 runner pads {size} tokens to a graph of another size"
            raise refusal(COMPILATION, reason, "give sizes of graphs", "compile_sizes")
