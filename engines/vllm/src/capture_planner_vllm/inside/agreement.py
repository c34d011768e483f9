"""Where vLLM's configuration differs from a plan, line by line; reads a ``VllmConfig`` and imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capture_planner.engines.launch import WITHOUT_VARYING, varying_obstacle
from capture_planner.modes import Role
from capture_planner.records.plan import Decision, Plan
from capture_planner.records.text import counted
from capture_planner_vllm.emulation.export import export_vllm, plan_sizes
from capture_planner_vllm.emulation.schedule import draft_tokens, normalized


def differences(plan: Plan, config: Any, mode: str) -> Iterator[str]:
    """Yield where a ``VllmConfig`` and the mode that its target is captured with differ from a plan.

    For a vLLM that captures by its own list: the sizes are compared too.
    """
    target = plan.role(Role.TARGET)
    captured = sorted(config.compilation_config.cudagraph_capture_sizes or ())
    # A configuration made by ``export`` may have other sizes than the plan, chosen to hide no graph.
    exported = list(export_vllm(plan).sizes)
    planned = exported if exported == captured else sorted({entry.num_tokens for entry in target.entries})
    if planned != captured:
        missing = ", ".join(str(size) for size in planned if size not in captured)
        added = ", ".join(str(size) for size in captured if size not in planned)
        parts = [f"vLLM lacks {missing}"] if missing else []
        parts += [f"vLLM adds {added}"] if added else []
        yield f"cudagraph_capture_sizes: {' and '.join(parts)}"
    ours, theirs = max(planned, default=0), config.compilation_config.max_cudagraph_capture_size or 0
    if ours != theirs:
        yield f"max_cudagraph_capture_size: the plan has {ours}, vLLM has {theirs}"
    if target.mode.value != mode:
        yield f"cudagraph_mode: the plan has {target.mode.value}, vLLM has {mode}"
    yield from limit_differences(plan, config)
    yield from speculation_differences(plan, config)


def limit_differences(plan: Plan, config: Any) -> Iterator[str]:
    """Yield where the scheduler's limits differ."""
    scheduler = config.scheduler_config
    for name, ours, theirs in (
        ("max_num_seqs", plan.limits.max_num_reqs, scheduler.max_num_seqs),
        ("max_num_batched_tokens", plan.limits.max_num_tokens, scheduler.max_num_batched_tokens),
    ):
        if ours != theirs:
            yield f"{name}: the plan has {ours}, vLLM has {theirs}"


def speculation_differences(plan: Plan, config: Any) -> Iterator[str]:
    """Yield where speculation differs in its method or in the tokens that it drafts."""
    planned, found = plan.speculative, config.speculative_config
    if planned is None or found is None:
        if planned is not None or found is not None:
            has, has_not = ("vLLM", "the plan") if planned is None else ("the plan", "vLLM")
            yield f"speculative_config: {has} speculates, {has_not} does not"
        return
    # vLLM has one such name for each family of models, such as deepseek_mtp.
    method = "mtp" if str(found.method).endswith("mtp") else str(found.method)
    if planned.method.value != method:
        yield f"speculative_config.method: the plan has {planned.method.value}, vLLM has {found.method}"
    elif planned.parallel_drafting != (getattr(found, "parallel_drafting", False) is True):
        plan_does, vllm_does = ("does", "does not") if planned.parallel_drafting else ("does not", "does")
        yield f"speculative_config.parallel_drafting: the plan {plan_does} draft in parallel, vLLM {vllm_does}"
    tokens = found.num_speculative_tokens
    if planned.num_tokens != tokens:
        # With another K every batch size differs; once is enough.
        yield f"speculative_config.num_speculative_tokens: the plan has {planned.num_tokens}, vLLM has {tokens}"
        return
    name, max_num_seqs = "num_speculative_tokens_per_batch_size", config.scheduler_config.max_num_seqs
    schedule = getattr(found, name, None)
    tiers = normalized(list(schedule)) if schedule else ()
    theirs = draft_tokens(tiers, max_num_reqs=max_num_seqs, num_speculative=tokens)
    wrong = [reqs for reqs in range(1, max_num_seqs + 1) if planned.draft_tokens(reqs) != theirs[reqs]]
    if wrong:
        first, count = wrong[0], f"{len(wrong)} of {max_num_seqs} batch sizes"
        values = f"the plan drafts {planned.draft_tokens(first)}, vLLM {theirs[first]}"
        yield f"speculative_config.{name}: {count} differ, the first at {first} requests: {values}"


def roles_without_graphs(plan: Plan, config: Any) -> Iterator[Decision]:
    """Yield a decision for each planned role that has no graph manager in vLLM (``spec_decode/__init__.py``, 0.33)."""
    found = config.speculative_config
    several = getattr(found, "use_multi_module_mtp", None)
    if found is not None and found.method == "draft_model":
        roles, why = [Role.DRAFT_PREFILL, Role.DRAFT_DECODE], "an independent draft model"
    elif several is not None and several():
        roles, why = [Role.DRAFT_DECODE], "draft decodes of their own with MTP of several modules"
    else:
        return
    for role in roles:
        if role in plan.planned and plan.role(role).entries:
            graphs = counted(len(plan.role(role).entries), "graph")
            message = f"{graphs} not captured: vLLM has no graphs for {why}"
            before = plan.role(role).mode.value
            yield Decision(rule="engine-no-manager", before=before, after="NONE", role=role, message=message)


def obstacle(plan: Plan, config: Any) -> str | None:
    """Return why no role of a plan can be applied under a configuration, with the flag to give; None where it can."""
    if getattr(config.parallel_config, "enable_dbo", False):
        return "with --enable-dbo vLLM captures decodes in two halves too, which no plan has; leave it out"
    if (varying := varying_obstacle(plan, "vLLM")) is not None:
        return f"{varying}; {WITHOUT_VARYING}"
    found = config.speculative_config
    tokens = 0 if found is None else found.num_speculative_tokens
    planned = 0 if plan.speculative is None else plan.speculative.num_tokens
    if tokens == planned:
        return None
    value = f'give --speculative-config with "num_speculative_tokens": {planned}'
    remedy = value if planned else "leave --speculative-config out"
    return f"the plan drafts {planned} tokens, vLLM {tokens}, so the decodes of one do not fit the other; {remedy}"


def bound_obstacle(plan: Plan, config: Any) -> str | None:
    """Return why ``max_cudagraph_capture_size`` is too low for a plan, with the flag to give; None where it is not.

    FlashAttention bounds its splits by it, for one; on an H200 200 requests ran 30 % slower on graphs above it.
    """
    largest = max(plan_sizes(plan, config.scheduler_config.max_num_batched_tokens), default=0)
    bound = config.compilation_config.max_cudagraph_capture_size or 0
    if bound >= largest:
        return None
    return (
        f"max_cudagraph_capture_size is {bound}, below the plan's largest graph of {largest} tokens, and attention "
        f"backends choose slower kernels above it; give --max-cudagraph-capture-size {largest}"
    )
