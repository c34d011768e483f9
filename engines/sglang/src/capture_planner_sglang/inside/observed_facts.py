"""The static part of SGLang's observation: what it resolved and captured, and what its runners answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from capture_planner.engines.inside import resolve, timestamp
from capture_planner.engines.probe import Answer, answers
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import digest
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import DecodeFamily, Domain
from capture_planner.records.model import Method, Speculative
from capture_planner.records.observation import DraftPass, Observation, ObservedRole
from capture_planner.records.plan import Decision, Plan
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner_sglang.inside import seam
from capture_planner_sglang.inside.observe import SglangObserver
from capture_planner_sglang.inside.observed_runners import CapturedRunner

_LEAVES = """
    context_length max_running_requests max_total_tokens chunked_prefill_size max_prefill_tokens page_size
    tp_size pp_size dp_size attn_dp_size attention_backend decode_attention_backend prefill_attention_backend
    sampling_backend disable_cuda_graph_padding speculative_algorithm speculative_num_steps speculative_eagle_topk
    speculative_num_draft_tokens enable_lora max_loras_per_batch lora_backend disable_overlap_schedule
    enable_mixed_chunk
"""
_EAGLE = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


@attrs.frozen(kw_only=True)
class _Deployment:
    """The limits that a probe goes through."""

    limits: Limits
    speculative: Speculative | None
    lora: Lora | None
    parallel: Parallel


def observation_of(
    observer: SglangObserver, scheduler: Any, *, plan: Plan | None, decisions: Sequence[Decision], notes: Sequence[str]
) -> Observation:
    """Return what is known once the scheduler is made; ``plan`` is the one that was applied."""
    import torch

    context = seam.context()
    parallel, spec, schedule = context.get_parallel(), context.get_spec(), context.get_schedule()
    graph, model = context.get_exec().graph.cuda_graph_config, scheduler.tp_worker.model_runner
    settings, missing = _settings(context)
    # Not the flag: SGLang clamps sizes to the pool, which memory may have made smaller.
    pool, chunk = int(model.req_to_token_pool.size), schedule.chunked_prefill_size or 0
    drafted = (spec.speculative_num_draft_tokens or 1) if spec.speculative_algorithm else 1
    # A chunk bounds prefills; a verification has the drafts of all requests at once.
    tokens = max(chunk if chunk > 0 else schedule.max_prefill_tokens, pool * drafted)
    limits = Limits(max_num_reqs=pool, max_num_tokens=tokens)
    loras = int(context.get_lora().max_loras_per_batch) if context.get_lora().enable_lora else 0
    deployment = _Deployment(
        limits=limits,
        speculative=_speculative(spec.speculative_algorithm, drafted),
        # SGLang counts the bare model among its adapters.
        lora=Lora(max_active=max(loras - 1, 1)) if loras else None,
        parallel=Parallel(data=parallel.dp_size * parallel.attn_dp_size, tensor=parallel.tp_size),
    )
    drafts = _drafts(spec, pool)
    roles = tuple(_roles(observer, deployment, drafts[0] if drafts else None, drafts is not None, loras))
    graphs = [each for role in roles for each in role.graphs]
    return Observation(
        engine="sglang",
        engine_version=resolve("sglang.version").__version__,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        torch=torch.__version__,
        # SGLang numbers the ranks of a replica by stage first.
        rank=parallel.pp_rank * parallel.tp_size + parallel.tp_rank,
        world_size=parallel.tp_size * parallel.pp_size,
        started=timestamp(),
        plan=None if plan is None else digest(plan),
        model=str(context.get_server_args().model_path),
        limits=limits,
        whole_prompts=chunk <= 0,
        speculative=deployment.speculative,
        drafts=drafts,
        lora=deployment.lora,
        parallel=deployment.parallel,
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
            # A value that this version lacks is no reason to observe nothing.
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


def _drafts(spec: Any, pool: int) -> tuple[DraftPass, ...] | None:
    """Return the chain of draft decodes: a token for each branch, in all steps but the first; None: no drafter."""
    if spec.speculative_algorithm not in _EAGLE:
        return None
    # The draft prefill makes the first draft.
    steps = (spec.speculative_num_steps or 0) - 1
    return (
        (DraftPass(query_len=spec.speculative_eagle_topk, draft_steps=steps, first=1, last=pool),) if steps > 0 else ()
    )


def _roles(
    observer: SglangObserver, deployment: _Deployment, chain: DraftPass | None, drafts: bool, loras: int
) -> Iterator[ObservedRole]:
    tables = observer.tables()
    prompt_mode = resolve("sglang.srt.model_executor.forward_batch_info").ForwardMode.EXTEND
    for role in Role:
        # Without a drafter, or a chain, there are no such batches to ask for.
        if (role.is_drafter and not drafts) or (role is Role.DRAFT_DECODE and chain is None):
            continue
        decodes, prompts = observer.runners.get((role, False)), observer.runners.get((role, True))

        def dispatch(batch: Batch, decodes: Any = decodes, prompts: Any = prompts) -> Answer:
            # SGLang tells decodes from prompts by the mode of a forward; of a batch only its width says it.
            width = batch.uniform_query_len
            uniform = width == 1 if deployment.speculative is None else width is not None
            each = decodes if uniform or batch.role is Role.DRAFT_DECODE else prompts
            return (None, Reason.MODE) if each is None else each.answer(batch, tables[each], prompt_mode)

        steps = None if chain is None else chain.draft_steps
        graphs = tuple(graph for each in (prompts, decodes) if each for graph in each.graphs(loras, steps))
        own = None if chain is None or role is not Role.DRAFT_DECODE else [_family(chain)]
        # Answers to prompts change where the slots of their graphs end.
        slots = (1, prompts.runner.max_bs, prompts.runner.max_bs + 1) if prompts else (1,)
        counts = [count for count in slots if count <= deployment.limits.max_num_reqs]
        yield ObservedRole(
            role=role,
            mode=_mode(decodes, prompts),
            graphs=graphs,
            answers=answers(role, deployment, graphs, dispatch, families=own, request_counts=counts),
        )


def _family(chain: DraftPass) -> DecodeFamily:
    requests = Domain(((chain.first, chain.last),))
    return DecodeFamily(query_len=chain.query_len, draft_steps=chain.draft_steps, requests=requests)


def _mode(decodes: CapturedRunner | None, prompts: CapturedRunner | None) -> GraphMode:
    """Return the nearest mode, as the emulation does: PIECEWISE or FULL also where only prompts have graphs."""
    decode = decodes.mode if decodes else GraphMode.NONE
    mixed = prompts.mode if prompts else GraphMode.NONE
    if mixed is GraphMode.NONE:
        return GraphMode.FULL_DECODE_ONLY if decode is GraphMode.FULL else decode
    return GraphMode.FULL_AND_PIECEWISE if (decode, mixed) == (GraphMode.FULL, GraphMode.PIECEWISE) else mixed
