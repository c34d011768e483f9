"""From a plan to the options file of TensorRT-LLM: decode graphs by batch size, padded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from capture_planner.engines.export import (
    DRAFT_MODEL,
    Export,
    Loss,
    all_scopes,
    decode_sizes,
    drafter_losses,
    fallback_loss,
    lazy_loss,
    longest_draft,
    parallel_loss,
)
from capture_planner.engines.launch import refuse_varying
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_tiers
from capture_planner.records.model import Method
from capture_planner.records.plan import Plan, RolePlan

FILE_NAME = "tensorrt-llm.yaml"

_METHODS = {Method.EAGLE: "Eagle", Method.EAGLE3: "Eagle3", Method.MTP: "MTP", Method.DRAFT_MODEL: "Draft_Target"}
_DECODES, _MIXED = (Role.TARGET, Kind.DECODE), (Role.TARGET, Kind.MIXED)


def export_tensorrt_llm(plan: Plan) -> Export:
    """Return the options that come closest, only emulated ones.

    Raises ``DispatchError`` without a target, and ``FlagError`` where decodes vary in length.
    """
    refuse_varying(plan, "TensorRT-LLM")
    target, drafts = plan.role(Role.TARGET), longest_draft(plan)
    sizes: tuple[int, ...] = ()
    # Its graphs of decodes are full ones.
    if target.mode.decode_mode is GraphMode.FULL:
        most = plan.limits.max_num_reqs
        # Alignment to ranks may have rounded a size beyond the limit, where the engine captures none.
        sizes = tuple(sorted({min(size, most) for size in decode_sizes(plan, target, 1 + drafts)}))
    options: dict[str, Any] = {
        "max_batch_size": plan.limits.max_num_reqs,
        "max_num_tokens": plan.limits.max_num_tokens,
        # Attention DP divides the tensor-parallel ranks: the product is all of them.
        "tensor_parallel_size": plan.parallel.tensor * plan.parallel.data,
        "enable_attention_dp": plan.parallel.data > 1,
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": list(sizes)} if sizes else None,
    }
    backends = {group.backend for role in plan.roles for group in role.groups}
    if backends == {"flashinfer"} and plan.speculative is None:
        options["attn_backend"] = "FLASHINFER"  # _torch/attention_backend/utils.py
    speculative = plan.speculative
    schedule = draft_len_schedule(plan)
    if speculative is not None and drafts:
        options["speculative_config"] = {"decoding_type": _METHODS[speculative.method], "max_draft_len": drafts}
        # MTP modules are in the target's own checkpoint.
        if speculative.method is not Method.MTP:
            options["speculative_config"]["speculative_model"] = DRAFT_MODEL
        if schedule is not None:
            options["speculative_config"]["draft_len_schedule"] = schedule
    return Export(
        engine="tensorrt-llm",
        settings=options,
        file_name=FILE_NAME,
        by_file=True,
        front=(plan.model.name,),
        sizes=sizes,
        losses=(*_losses(plan, target, schedule, options.get("attn_backend")), *fallback_loss(plan, "TensorRT-LLM")),
    )


def draft_len_schedule(plan: Plan) -> dict[int, int] | None:
    """Return the schedule as the largest batch of each draft length, or None where it has none such.

    The engine drafts nothing above the last key, has the longest drafts at the first one, and looks
    for graphs as if lengths only fell.
    """
    tiers = decode_tiers(plan)
    if len(tiers) < 2 or not all(before > after for before, after in itertools.pairwise([k for *_, k in tiers])):
        return None
    return {last: k for _, last, k in tiers if k}


def _losses(plan: Plan, target: RolePlan, schedule: dict[int, int] | None, backend: str | None) -> Iterator[Loss]:
    speculative = plan.speculative
    wanted = ", ".join(dict.fromkeys(f"{group.backend}" for role in plan.roles for group in role.groups))
    if wanted and backend is None:
        says = f"the attention backends {wanted} are not exported: the engine runs its own (attn_backend: TRTLLM)"
        yield Loss("backend", says)
    if target.mode.mixed_mode is not GraphMode.NONE:
        count = sum(entry.query_len is None for entry in target.entries)
        says = f"graphs of prompts are not emulated, and not exported: the {count} graphs of mixed batches are lost"
        yield Loss("mixed-graphs", says, (_MIXED,))
    if plan.lora is not None:
        yield Loss("lora", "graphs with adapters are not emulated, and adapters not exported", (_DECODES, _MIXED))
    yield from drafter_losses(plan, "inside", "the {role} runs inside the target's graphs; its own {graphs} are gone")
    yield from parallel_loss(plan, "TensorRT-LLM")
    yield from lazy_loss(plan, "TensorRT-LLM")
    if speculative is not None:
        if len(decode_tiers(plan)) > 1 and schedule is None:
            says = (
                "TensorRT-LLM takes a schedule only where it falls from tier to tier; without it every batch drafts "
                f"{longest_draft(plan)} tokens"
            )
            yield Loss("schedule", says, all_scopes(plan))
        elif schedule is not None:
            # The engine merges the thresholds into the sizes, so that each tier ends with a graph.
            added = [last for last in schedule if last not in decode_sizes(plan, target, 1)]
            if added:
                says = f"the engine adds the last batch of each draft length to the sizes: {len(added)} more"
                yield Loss("schedule-sizes", says, (_DECODES,))
    if plan.parallel.data > 1:
        says = "data-parallel ranks need batches of one size to use a graph (attention DP)"
        yield Loss("data-parallel", says, (_DECODES,))
    if any((entry.num_reqs or 0) > plan.limits.max_num_reqs for entry in target.entries):
        says = "the engine aligns no sizes to the tensor-parallel ranks, and captures none beyond max_batch_size"
        yield Loss("sequence-parallel", says, (_DECODES,))
    if plan.parallel.decode_context > 1:
        yield Loss("decode-context-parallel", "decode-context parallelism is not exported")
