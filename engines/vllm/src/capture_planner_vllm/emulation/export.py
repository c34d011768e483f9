"""From a plan to the flags of vLLM 0.33, which has one list of sizes for all roles, widths and modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import attrs

from capture_planner.analysis.coverage import coverage
from capture_planner.engines.export import (
    DRAFT_MODEL,
    Export,
    Loss,
    all_scopes,
    backend_setting,
    both,
    drafter_losses,
    lazy_loss,
)
from capture_planner.engines.launch import refuse_varying
from capture_planner.modes import Chain, GraphMode, Pool, Role
from capture_planner.planning.sizing.minimax import fewest
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.batch_space import DecodeFamily, Domain, decode_families, decode_tiers
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.text import counted
from capture_planner_vllm.emulation.drafter import draft_decode_mode
from capture_planner_vllm.emulation.size_list import SizeList, examine, full_graphs, nearest, size_list

FILE_NAME = "vllm.yaml"

BACKENDS = {"flash_attention": "FLASH_ATTN", "flashinfer": "FLASHINFER", "triton": "TRITON_ATTN"}
"""Our backends' names in vLLM."""
LATENT_BACKENDS = {"flash_attention": "FLASH_ATTN_MLA", "flashinfer": "FLASHINFER_MLA", "triton": "TRITON_MLA"}
"""The same for models with latent attention."""

_WORST = Fraction(3, 2)
"""The most padding of decodes by a replaced list of sizes, padded to real, whatever the plan's own sizes do."""


def export_vllm(plan: Plan, ratio: Fraction | None = None) -> Export:
    """Return the flags of vLLM that come closest to ``plan``.

    Raises ``DispatchError`` without a target, and ``FlagError`` where decodes vary in length.

    :param ratio: pad up to this padded/real ratio, with as few sizes as that takes; None: as the plan does.
    """
    refuse_varying(plan, "vLLM")
    target = plan.role(Role.TARGET)
    sizes, losses = _sizes(plan, target) if ratio is None else (_coarser(plan, target, ratio), ())
    sizes = _with_drafts(plan, sizes)
    # Without sizes, any other mode would capture vLLM's own list.
    compilation: dict[str, Any] = {"cudagraph_mode": GraphMode.NONE.value}
    if sizes:
        compilation = {"cudagraph_mode": target.mode.value, "cudagraph_capture_sizes": list(sizes)}
    settings: dict[str, Any] = {
        "model": plan.model.name,
        "max-num-seqs": plan.limits.max_num_reqs,
        "max-num-batched-tokens": plan.limits.max_num_tokens,
    }
    named = BACKENDS if plan.model.latent is None else LATENT_BACKENDS
    backend, unnamed = backend_setting(plan, named, "vLLM")
    if backend is not None:
        settings["attention-backend"] = backend
    ranks = {
        "tensor-parallel-size": plan.parallel.tensor,
        "data-parallel-size": plan.parallel.data,
        "decode-context-parallel-size": plan.parallel.decode_context,
    }
    settings |= {name: count for name, count in ranks.items() if count > 1}
    if plan.lora is not None:
        settings |= {"enable-lora": True, "max-loras": plan.lora.max_active}
        if plan.lora.specialize:
            settings["specialize-active-lora"] = True
    if plan.speculative is not None:
        settings["speculative-config"] = _speculative_config(plan.speculative)
        named = BACKENDS if plan.speculative.model.latent is None else LATENT_BACKENDS
        drafter, unnamed_drafter = backend_setting(plan, named, "vLLM", drafter=True)
        unnamed += unnamed_drafter
        if drafter is not None:
            settings["speculative-config"]["attention_backend"] = drafter
    settings["compilation-config"] = compilation
    return Export(
        engine="vllm",
        settings=settings,
        file_name=FILE_NAME,
        sizes=sizes,
        drafter_backend=("speculative-config", "attention_backend"),
        coarser=partial(export_vllm, plan) if sizes else None,
        losses=(*losses, *unnamed, *_other_losses(plan, target)),
    )


def plan_sizes(plan: Plan, max_num_tokens: int) -> list[int]:
    """Return every size of a plan that vLLM has buffers for: of all roles, in tokens, ascending."""
    sizes = {entry.num_tokens for role in plan.roles for entry in role.entries}
    return sorted(size for size in sizes if size <= max_num_tokens)


def _speculative_config(speculative: Speculative) -> dict[str, Any]:
    config: dict[str, Any] = {"method": speculative.method.value}
    config["num_speculative_tokens"] = speculative.num_tokens
    if speculative.method is not Method.MTP:  # MTP's modules are in the target's checkpoint
        config["model"] = DRAFT_MODEL
    if speculative.parallel_drafting:
        config["parallel_drafting"] = True
    if speculative.ranges:
        config["num_speculative_tokens_per_batch_size"] = [list(tier) for tier in speculative.ranges]
    return config


def _sizes(plan: Plan, target: RolePlan) -> tuple[tuple[int, ...], tuple[Loss, ...]]:
    """Return the plan's own sizes, or others where its own would hide graphs from decodes."""
    limit = plan.limits.max_num_tokens
    own = tuple(sorted({entry.num_tokens for entry in target.entries if entry.num_tokens <= limit}))
    if not own or not target.mode.is_separate:
        return own, ()
    uniform = [entry for entry in target.entries if entry.query_len is not None]
    widths = sorted({1 + k for *_, k in decode_tiers(plan)})
    mixed = sorted({entry.num_tokens for entry in target.entries if entry.query_len is None} & set(own))
    decodes = {(entry.num_tokens, entry.query_len) for entry in uniform}
    # vLLM captures a decode of 1 + K for each size, rounded up: the sizes of the other graphs may be enough.
    others = mixed or sorted({*own, *(entry.num_tokens for entry in _draft_decodes(plan))})
    if len(widths) == 1 and set(full_graphs(others, widths, plan.limits.max_num_reqs)) == decodes:
        return tuple(others), ()
    # Only a graph of another width can hide one, and with data parallelism vLLM drops the schedule.
    if not uniform or len(widths) < 2 or plan.parallel.data > 1:
        return own, _rounded(own, target)
    covered = _within(decode_families(Role.TARGET, plan), uniform)
    hidden, _ = examine(covered, nearest(own, widths, plan.limits.max_num_reqs))
    if not hidden:
        return own, _rounded(own, target)
    replacement = _replacement(plan, covered, widths, own, mixed)
    message = (
        f"with the plan's own {len(own)} sizes, {len(hidden)} decode batch sizes would miss their graph, hidden "
        f"by a nearer one of another query length; the {len(replacement.sizes)} sizes that replace them hide none, and "
        f"pad decodes by at most {float(replacement.worst - 1):.1%}"
    )
    return replacement.sizes, (Loss(name="sizes-replaced", says=message, scope=both(Role.TARGET)),)


def _coarser(plan: Plan, target: RolePlan, ratio: Fraction) -> tuple[int, ...]:
    """Return the fewest sizes with which no batch that the plan has a graph for is padded beyond a ratio."""
    limits = plan.limits
    own = sorted({entry.num_tokens for entry in target.entries if entry.num_tokens <= limits.max_num_tokens})
    uniform = [entry for entry in target.entries if entry.query_len is not None]
    mixed = sorted({entry.num_tokens for entry in target.entries if entry.query_len is None})
    widths = sorted({1 + k for *_, k in decode_tiers(plan)})
    if target.mode.is_separate and uniform and len(widths) > 1 and plan.parallel.data == 1:
        covered = _within(decode_families(Role.TARGET, plan), uniform)
        wider = fewest(Domain.upto(mixed[-1]), ratio, candidates=mixed) if mixed else ()
        return size_list(covered, limits.max_num_reqs, worst=ratio, wider=wider, query_lens=widths).sizes
    largest = {entry.query_len: entry.num_tokens for entry in sorted(uniform, key=lambda entry: entry.num_tokens)}
    return fewest(Domain.upto(own[-1]), ratio, candidates=own, anchors=sorted(largest.values()))


def _with_drafts(plan: Plan, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Add a size for the widest draft decode where none serves it, unless that hides a target's graph.

    A draft decode has one token per request; sizes above max_num_seqs are captured for wider decodes only.
    """
    most, families = plan.limits.max_num_reqs, decode_families(Role.DRAFT_DECODE, plan)
    captured = [entry.num_reqs or 0 for entry in _draft_decodes(plan)]
    if not captured or not sizes or not families:
        return sizes
    widest = min(max(captured), max(family.requests.intervals[-1][1] for family in families))
    if any(widest <= size <= most for size in sizes):
        return sizes
    more = tuple(sorted({*sizes, widest}))
    widths = sorted({1 + k for *_, k in decode_tiers(plan)})
    before, after = (
        examine(decode_families(Role.TARGET, plan), nearest(some, widths, most))[0] for some in (sizes, more)
    )
    return more if set(after) <= set(before) else sizes


def _draft_decodes(plan: Plan) -> list[Entry]:
    return [entry for each in plan.roles if each.role is Role.DRAFT_DECODE for entry in each.entries]


def _replacement(
    plan: Plan, decodes: Sequence[DecodeFamily], widths: Sequence[int], own: Sequence[int], mixed: Sequence[int]
) -> SizeList:
    """Return the sizes that pad least with at most the graphs of ``own``, or that pad as the plan does."""
    reqs, worst = plan.limits.max_num_reqs, min(_worst(plan), _WORST)
    graphs = len(full_graphs(own, widths, reqs))
    result = size_list(decodes, reqs, graphs=graphs, wider=mixed, query_lens=widths)
    if result.worst > worst:
        result = size_list(decodes, reqs, worst=worst, wider=mixed, query_lens=widths)
    return result


def _within(decodes: Sequence[DecodeFamily], entries: Sequence[Entry]) -> tuple[DecodeFamily, ...]:
    """Return the decodes that the plan has full graphs for; larger ones run eager."""
    within = []
    for tier in decodes:
        most = max((e.num_reqs or 0 for e in entries if e.query_len == tier.query_len), default=0)
        kept = tier.requests.clipped(most)
        if kept:
            within.append(attrs.evolve(tier, requests=kept))
    return tuple(within)


def _worst(plan: Plan) -> Fraction:
    """Return the plan's own worst padded/real ratio of target decodes."""
    cells = [cell for cell in coverage(plan).cells if cell.role is Role.TARGET and cell.kind is Kind.DECODE]
    return max(
        (Fraction(c.entry.num_tokens, c.first * (c.query_len or 1)) for c in cells if c.entry is not None),
        default=Fraction(1),
    )


def _rounded(own: Sequence[int], target: RolePlan) -> tuple[Loss, ...]:
    """Return the loss of having one list for every width and for mixed batches, where that adds graphs."""
    uniform = {entry.num_tokens for entry in target.entries if entry.query_len is not None}
    mixed = {entry.num_tokens for entry in target.entries if entry.query_len is None}
    widths = {entry.query_len for entry in target.entries if entry.query_len is not None}
    if len(widths) < 2 and (not mixed or uniform == mixed):
        return ()
    message = f"vLLM captures each of its {len(own)} sizes for every query length, rounded up, and for mixed batches"
    return (Loss(name="one-size-list", says=message, scope=both(Role.TARGET)),)


def _other_losses(plan: Plan, target: RolePlan) -> Iterator[Loss]:
    yield from lazy_loss(plan, "vLLM")
    yield from drafter_losses(plan, "sizes", "the {role} captures the target's sizes, not its own {graphs}")
    decodes = draft_decode_mode(target.mode)
    for drafter in (each for each in plan.roles if each.role.is_drafter):
        role, mode = drafter.role.value, target.mode if drafter.role is Role.DRAFT_PREFILL else decodes
        if plan.speculative is not None and plan.speculative.is_modules:
            mode = target.mode.without_piecewise
        if plan.speculative is not None and plan.speculative.method is Method.DRAFT_MODEL:
            mode = GraphMode.NONE  # StandaloneARSpeculator.init_cudagraph_manager
        if drafter.mode is not mode:
            message = f"vLLM runs the {role} in {mode.value}, after the target; planned is {drafter.mode.value}"
            yield Loss(name=f"{role.replace('_', '-')}-mode", says=message, scope=both(drafter.role))
    speculative, limits = plan.speculative, plan.limits
    if speculative is not None and speculative.ranges and plan.parallel.data > 1:
        message = f"with data parallelism vLLM drops the schedule and always drafts {speculative.num_tokens} tokens"
        yield Loss(name="schedule-data-parallel", says=message, scope=all_scopes(plan))
    if speculative is not None and speculative.chain is Chain.SINGLE:
        message = "vLLM makes a draft chain one graph wherever its backend can; no flag asks for single steps"
        yield Loss(name="draft-chain", says=message, scope=both(Role.DRAFT_DECODE))
    if plan.pool is Pool.PER_ROLE:
        yield Loss(name="pool", says="vLLM has one memory pool for target and drafter")
    if plan.parallel.sequence and plan.parallel.tensor > 1:
        beyond = sum(
            entry.num_tokens > limits.max_num_tokens or (entry.num_reqs or 0) > limits.max_num_reqs
            for entry in target.entries
        )
        message = (
            "vLLM has no flag for sequence parallelism and aligns no sizes to it; it captures nothing beyond its "
            f"limits, and {counted(beyond, 'graph')} of the plan are aligned beyond them"
        )
        yield Loss(name="sequence-parallel", says=message, scope=all_scopes(plan))
