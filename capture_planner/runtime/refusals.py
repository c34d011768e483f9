"""What is refused before a model is loaded: a plan that is not for here, and backends that do not run here.

A large model takes minutes to load; a wrong argument should be reported within seconds.
"""

from __future__ import annotations

import torch

from capture_planner.analysis.lint import Severity, lint
from capture_planner.errors import RunError
from capture_planner.plugins.registry import Registry
from capture_planner.records.environment import DeviceKind
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner.runtime import host
from capture_planner.runtime.assembly import capacity_of, refuse_planning_backends, reserve_all
from capture_planner.runtime.execution.fields import Fields
from capture_planner.runtime.serving.kv import PageFormat


def refuse_plan(plan: Plan, *, any_environment: bool, any_plan: bool, size: int = 1) -> None:
    """Refuse a plan with errors, for another machine, or for a number of ranks other than ``size``.

    ``any_plan`` admits errors that the lint finds, ``any_environment`` other versions than were planned
    for. Raises ``RunError``.
    """
    errors = [str(finding) for finding in lint(plan) if finding.rule.severity is Severity.ERROR]
    if errors and not any_plan:
        raise RunError(f"the plan has errors: {'; '.join(errors)}; see check (--any-plan runs it all the same)")
    if plan.environment.device.kind is DeviceKind.CUDA and not torch.cuda.is_available():
        raise RunError(
            f"the plan is for {plan.environment.device.name}, and this machine has no CUDA device; run it on that "
            "machine, or plan its spec for the processor (capture-planner plan SPEC -e cpu -o PLAN)"
        )
    wrong = host.differences(plan.environment)
    if wrong and not any_environment:
        raise RunError(
            f"the plan is for the environment {plan.environment.name}: {'; '.join(wrong)}; plan for this machine "
            "(capture-planner environment --name here -o here.yaml, then capture-planner plan SPEC -e here.yaml "
            "-o PLAN), or run it all the same (--any-environment)"
        )
    refuse_other_size(plan, size)
    if plan.parallel.decode_context > 1:
        raise RunError(
            f"parallel.decode_context is {plan.parallel.decode_context}: the runner does not divide the KV of a "
            "request; plan it with 1"
        )


def refuse_other_size(plan: Plan, size: int) -> None:
    """Raise ``RunError`` for a number of ranks that is not the plan's: none runs without those that it waits for."""
    parallel = plan.parallel
    needed = parallel.tensor * parallel.data
    if needed == size:
        return
    started = "this is one process" if size == 1 else f"{size} were started"
    how = "run it as one process" if needed == 1 else f"use --ranks {needed}, or torchrun --nproc-per-node {needed}"
    raise RunError(
        f"the plan is for {counted(needed, 'rank')} (parallel.tensor {parallel.tensor} x parallel.data "
        f"{parallel.data}), and {started}; {how}"
    )


def refuse_backends(plan: Plan, registry: Registry, device: torch.device, page_size: int) -> None:
    """Reserve every backend of the plan with a KV cache of one page, and release it again.

    Only the backend knows whether it runs here: its library may be missing, or be another version.
    Raises ``RunError`` for one that only plans or declares other fields by now, ``BackendError`` for one
    that is not installed, and what its ``reserve`` raises.
    """
    try:
        _reserve_all(plan, registry, device, PageFormat(page_size=page_size, num_pages=2))
    finally:
        # How many pages there are is decided by what is free: neither garbage nor cached blocks are.
        host.give_back(device)


def _reserve_all(plan: Plan, registry: Registry, device: torch.device, pages: PageFormat) -> None:
    refuse_planning_backends(plan, registry)
    windows = {
        role.role.is_drafter: tuple(group.window for group in role.groups for _ in range(group.layers))
        for role in plan.roles
    }
    fields = {role.role: Fields(role, capacity_of(plan, pages), device) for role in plan.roles}
    for groups in reserve_all(plan, windows, fields, registry, pages, device).values():
        for group in groups:
            group.executor.release()
