"""The static part of SGLang's observation: what it resolved and captured, and what its runners answer."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import digest
from capture_planner.records.model import Method, Speculative
from capture_planner.records.observation import DispatchRun, DraftPass, Observation, ObservedRole
from capture_planner.records.plan import Decision, Plan
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner_sglang import seam
from capture_planner_sglang.observe import SglangObserver
from capture_planner_sglang.observed_runners import CapturedRunner

_LEAVES = """
    context_length max_running_requests max_total_tokens chunked_prefill_size max_prefill_tokens page_size
    tp_size pp_size dp_size attn_dp_size attention_backend decode_attention_backend prefill_attention_backend
    sampling_backend disable_cuda_graph_padding speculative_algorithm speculative_num_steps speculative_eagle_topk
    speculative_num_draft_tokens enable_lora max_loras_per_batch lora_backend disable_overlap_schedule
    enable_mixed_chunk
"""
_EAGLE = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


def observation_of(
    observer: SglangObserver, scheduler: Any, *, plan: Plan | None, decisions: Sequence[Decision], notes: Sequence[str]
) -> Observation:
    """Return what is known once the scheduler is made; ``plan`` is the one that was applied."""
    import torch

    context = seam.context()
    parallel, spec, schedule = context.get_parallel(), context.get_spec(), context.get_schedule()
    graph, model = context.get_exec().graph.cuda_graph_config, scheduler.tp_worker.model_runner
    settings, missing = _settings(context)
    pool, chunk = int(model.req_to_token_pool.size), schedule.chunked_prefill_size or 0
    drafted = (spec.speculative_num_draft_tokens or 1) if spec.speculative_algorithm else 1
    tokens = max(chunk if chunk > 0 else schedule.max_prefill_tokens, pool * drafted)
    limits = Limits(max_num_reqs=pool, max_num_tokens=tokens)
    chain = (spec.speculative_num_steps or 0) - 1 if spec.speculative_algorithm in _EAGLE else None
    loras = int(context.get_lora().max_loras_per_batch) if context.get_lora().enable_lora else 0
    roles = tuple(_roles(observer, limits, drafted, chain, loras))
    graphs = [each for role in roles for each in role.graphs]
    return Observation(
        engine="sglang",
        engine_version=seam.resolve("sglang.version").__version__,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        torch=torch.__version__,
        rank=parallel.pp_rank * parallel.tp_size + parallel.tp_rank,
        world_size=parallel.tp_size * parallel.pp_size,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        plan=None if plan is None else digest(plan),
        model=str(context.get_server_args().model_path),
        limits=limits,
        whole_prompts=chunk <= 0,
        speculative=_speculative(spec.speculative_algorithm, drafted),
        drafts=_drafts(spec, chain, pool),
        lora=Lora(max_active=max(loras - 1, 1)) if loras else None,
        parallel=Parallel(data=parallel.dp_size * parallel.attn_dp_size, tensor=parallel.tp_size),
        sizes=tuple(graph.decode.bs or ()),
        settings=settings,
        decisions=tuple(decisions),
        kv_blocks=model.max_total_num_tokens // max(model.page_size or 1, 1),
        capture_seconds=round(sum(each.seconds or 0 for each in graphs), 3),
        graph_mib=round(sum(each.mib or 0 for each in graphs), 3),
        roles=roles,
        notes=(*notes, *missing),
    )


def _settings(context: Any) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Return SGLang's resolved values by name, and a note for each that this version lacks."""
    found, missing = [], []
    for name in _LEAVES.split():
        try:
            found.append((name, str(context.get_context().config_leaf(name))))
        except (AttributeError, ValueError) as error:
            missing.append(f"the setting {name} is not read: {error}")
    graph = context.get_exec().graph.cuda_graph_config
    for phase in ("decode", "prefill"):
        for key in ("backend", "max_bs", "bs"):
            found.append((f"cuda_graph_config.{phase}.{key}", str(getattr(getattr(graph, phase), key))))
    return tuple(found), missing


def _speculative(algorithm: str | None, drafted: int) -> Speculative | None:
    if algorithm is None or drafted < 2:
        return None
    return Speculative(method=Method.EAGLE3 if algorithm == "EAGLE3" else Method.EAGLE, num_tokens=drafted - 1)


def _drafts(spec: Any, chain: int | None, pool: int) -> tuple[DraftPass, ...] | None:
    if not chain or chain < 1:
        return None if chain is None else ()
    return (DraftPass(query_len=spec.speculative_eagle_topk, draft_steps=chain, first=1, last=pool),)


def _roles(
    observer: SglangObserver, limits: Limits, width: int, chain: int | None, loras: int
) -> Iterator[ObservedRole]:
    tables = observer.tables()
    for role in Role:
        decodes, prompts = observer.runners.get((role, False)), observer.runners.get((role, True))
        if role.is_drafter and chain is None:
            continue
        if role is Role.DRAFT_DECODE and not chain:
            continue
        counts = (0, 1) if loras and role is Role.TARGET else (0,)
        answers: list[DispatchRun] = []
        for each, last in ((decodes, limits.max_num_reqs), (prompts, limits.max_num_tokens)):
            if each is not None:
                mode = seam.resolve("sglang.srt.model_executor.forward_batch_info").ForwardMode.EXTEND
                answers += _whole(each.answers(tables[each], last, counts, mode), loras)
        if decodes is None:
            query_len = 1 if role is Role.DRAFT_DECODE else width
            answers.append(
                DispatchRun(query_len=query_len, first=1, last=limits.max_num_reqs, max_loras=loras, reason=Reason.MODE)
            )
        if prompts is None and role is not Role.DRAFT_DECODE:
            answers.append(
                DispatchRun(past_prompt=False, first=1, last=limits.max_num_tokens, max_loras=loras, reason=Reason.MODE)
            )
        yield ObservedRole(
            role=role,
            mode=_mode(decodes, prompts),
            graphs=tuple(graph for each in (prompts, decodes) if each for graph in each.graphs(loras, chain)),
            answers=tuple(answers),
        )


def _whole(answers: Iterator[DispatchRun], loras: int) -> Iterator[DispatchRun]:
    """SGLang asks whether a batch has any adapter, not how many: the answer for one is that for all."""
    for run in answers:
        yield attrs.evolve(run, max_loras=loras) if run.max_loras else run


def _mode(decodes: CapturedRunner | None, prompts: CapturedRunner | None) -> GraphMode:
    """Return the nearest mode, as the emulation does: PIECEWISE or FULL also where only prompts have graphs."""
    decode = decodes.mode if decodes else GraphMode.NONE
    mixed = prompts.mode if prompts else GraphMode.NONE
    if mixed is GraphMode.NONE:
        return GraphMode.FULL_DECODE_ONLY if decode is GraphMode.FULL else decode
    return GraphMode.FULL_AND_PIECEWISE if (decode, mixed) == (GraphMode.FULL, GraphMode.PIECEWISE) else mixed
