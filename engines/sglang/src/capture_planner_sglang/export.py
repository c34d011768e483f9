"""From a plan to the flags of SGLang 0.5.23: decode sizes in requests, prefill sizes in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capture_planner.engines.export.export import (
    DRAFT_MODEL,
    Export,
    Loss,
    all_scopes,
    backend_setting,
    decode_sizes,
    drafter_backend_setting,
    drafter_losses,
    fallback_loss,
    lazy_loss,
    longest_draft,
    parallel_loss,
)
from capture_planner.engines.varying import refuse_varying
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_tiers
from capture_planner.records.model import Method
from capture_planner.records.plan import Plan, RolePlan

FILE_NAME = "sglang.yaml"

BACKENDS = {"flash_attention": "fa3", "flashinfer": "flashinfer", "triton": "triton"}
"""Our backends' names in SGLang."""

_LORA_RANK = 16
"""Stands where the adapters' rank belongs, which a plan does not know and graphs do not depend on."""

ALGORITHMS = {Method.EAGLE: "EAGLE", Method.EAGLE3: "EAGLE3", Method.MTP: "NEXTN", Method.DRAFT_MODEL: "STANDALONE"}
"""SGLang's name of each method; it takes NEXTN as EAGLE."""
_KINDS = {GraphMode.FULL: "full", GraphMode.PIECEWISE: "breakable", GraphMode.NONE: "disabled"}


def export_sglang(plan: Plan) -> Export:
    """Return the flags of SGLang that come closest to ``plan``.

    Raises ``DispatchError`` without a target, and ``FlagError`` where decodes vary in length.
    """
    refuse_varying(plan, "SGLang")
    target = plan.role(Role.TARGET)
    width = 1 + longest_draft(plan)
    decode, prefill = decode_sizes(plan, target, width), prefill_sizes(target)
    settings: dict[str, Any] = {
        "model-path": plan.model.name,
        "max-running-requests": plan.limits.max_num_reqs,
        "chunked-prefill-size": plan.limits.max_num_tokens,
        "max-prefill-tokens": plan.limits.max_num_tokens,
    }
    backend, unnamed = backend_setting(plan, BACKENDS, "SGLang")
    if backend is not None:
        settings["attention-backend"] = backend
    for name, count in (("tp-size", plan.parallel.tensor), ("dp-size", plan.parallel.data)):
        if count > 1:
            settings[name] = count
    if plan.lora is not None and not _is_standalone(plan):
        # SGLang counts the rows without an adapter as one more.
        settings |= {
            "enable-lora": True,
            "max-loras-per-batch": plan.lora.max_active + 1,
            "max-lora-rank": _LORA_RANK,
            "lora-target-modules": ["all"],
        }
    if plan.speculative is not None and width > 1:
        settings["speculative-algorithm"] = ALGORITHMS[plan.speculative.method]
        if plan.speculative.method is not Method.MTP:
            settings["speculative-draft-model-path"] = DRAFT_MODEL
        settings |= {
            "speculative-num-steps": width - 1,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": width,
        }
        drafter, unnamed_drafter = drafter_backend_setting(plan, BACKENDS, "SGLang")
        unnamed += unnamed_drafter
        # A drafter has the target's backend unless it is given its own (model_executor/model_runner.py).
        if drafter is not None and drafter != backend:
            settings["speculative-draft-attention-backend"] = drafter
    settings["cuda-graph-backend-decode"] = _KINDS[target.mode.decode_mode if decode else GraphMode.NONE]
    if decode:
        settings |= {"cuda-graph-max-bs-decode": decode[-1], "cuda-graph-bs-decode": list(decode)}
    settings["cuda-graph-backend-prefill"] = _KINDS[target.mode.mixed_mode if prefill else GraphMode.NONE]
    if prefill:
        settings |= {"cuda-graph-max-bs-prefill": prefill[-1], "cuda-graph-bs-prefill": list(prefill)}
    return Export(
        engine="sglang",
        settings=settings,
        file_name=FILE_NAME,
        sizes=decode,
        losses=(*unnamed, *_losses(plan, target, width, prefill), *fallback_loss(plan, "SGLang")),
    )


def _is_standalone(plan: Plan) -> bool:
    """Whether a whole model drafts anything."""
    found = plan.speculative
    return found is not None and found.method is Method.DRAFT_MODEL and longest_draft(plan) > 0


def prefill_sizes(target: RolePlan) -> tuple[int, ...]:
    """Return the token counts of mixed batches."""
    return tuple(sorted({entry.num_tokens for entry in target.entries if entry.query_len is None}))


def _losses(plan: Plan, target: RolePlan, width: int, prefill: tuple[int, ...]) -> Iterator[Loss]:
    decodes, mixed = (Role.TARGET, Kind.DECODE), (Role.TARGET, Kind.MIXED)
    if len(decode_tiers(plan)) > 1:
        says = (
            f"no flag of SGLang takes a schedule: its graphs have {width} tokens a request, and batches of "
            "another width run eager"
        )
        yield Loss("schedule", says, all_scopes(plan))
    yield from parallel_loss(plan, "SGLang")
    yield from lazy_loss(plan, "SGLang")
    yield from drafter_losses(plan, "sizes", "the {role} captures the target's decode sizes, not its own {graphs}")
    if _is_standalone(plan) and plan.lora is not None:
        yield Loss("lora", "SGLang has no adapters with STANDALONE drafts, so they are left out", (decodes, mixed))
    elif plan.lora is not None:
        says = (
            "SGLang has no graphs by the number of adapters; it wants their rank, which a plan does not know: "
            f"--max-lora-rank {_LORA_RANK} is to be replaced"
        )
        yield Loss("lora-cases", says, (decodes, mixed))
    if prefill:
        wide = [(before, after) for before, after in zip((0, *prefill), prefill, strict=False) if after > 2 * before]
        refused = sum(max(0, (after - 1) // 2 - before) for before, after in wide)
        if refused:
            says = (
                f"SGLang refuses a prefill graph that pads a batch to more than twice its tokens: {refused} "
                "token counts run eager for it"
            )
            yield Loss("prefill-padding", says, (mixed,))
    if target.mode.mixed_mode is GraphMode.FULL:
        says = "SGLang's full prefill graphs have a fixed number of request slots, from the prefill chunk"
        yield Loss("full-prefill", says, (mixed,))
    if plan.parallel.decode_context > 1:
        says = (
            "decode-context parallelism is not emulated and so not exported: add "
            f"--dcp-size {plan.parallel.decode_context}"
        )
        yield Loss("decode-context-parallel", says)
    if plan.pool is Pool.PER_ROLE:
        yield Loss("pool", "SGLang has one memory pool for target and drafter")
    if plan.parallel.sequence:
        says = "SGLang drops decode sizes whose tokens its attention ranks do not divide; no flag sets the step"
        yield Loss("sequence-parallel", says, all_scopes(plan))
