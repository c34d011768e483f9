"""Checks before a model is loaded: the plan, the request, the other ranks and the backends.

A large model takes minutes to load; a wrong argument should be reported within seconds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from capture_planner.analysis.lint import Severity, lint
from capture_planner.errors import RunError
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import digest
from capture_planner.records.environment import DeviceKind
from capture_planner.records.fingerprint import digest_of
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner import host
from capture_planner_runner.execution.fields import Fields
from capture_planner_runner.launch.assembly import capacity_of, refuse_planning_backends, reserve_all
from capture_planner_runner.launch.request import ORACLES, RunRequest
from capture_planner_runner.options import ExecutionPolicy
from capture_planner_runner.serving.kv import PageFormat
from capture_planner_runner.serving.workload import Request

COLLECTIVE_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
"""Environment variables that change which collectives run."""

PACKAGES = ("capture-planner", "transformers", "triton")


def refuse_plan(plan: Plan, *, any_environment: bool, any_plan: bool, size: int = 1) -> None:
    """Refuse a plan with errors, for another machine, or for a number of ranks other than ``size``.

    ``any_plan`` admits errors that lint finds, ``any_environment`` other versions than were planned
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
    # Versions and devices decide support and workspaces, so another one is refused unless it was admitted.
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
    """Raise ``RunError`` for a number of ranks that is not the plan's: the missing ones would be waited for."""
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


def refuse_contradictions(plan: Plan, registry: Registry, asked: RunRequest, device: torch.device) -> None:
    """Raise ``RunError`` for values of a request that do not go together, or not with the plan."""
    acceptance = asked.options.acceptance
    if plan.speculative is None and asked.drafter != "random":
        raise RunError(f"--drafter {asked.drafter}: the plan has no drafter; plan with speculative, or leave it out")
    ExecutionPolicy.of(plan, registry, asked.options, is_gpu=device.type == "cuda")
    if acceptance and asked.verify:
        raise RunError(
            "--check tokens compares with the model, and with --acceptance tokens are not the model's; leave one out"
        )
    if acceptance and asked.drafter in ORACLES:
        raise RunError(
            f"--drafter {asked.drafter} decides which drafts are accepted, and so does --acceptance; leave one out"
        )
    if asked.memory_utilization is not None and (device.type != "cuda" or asked.pages is not None):
        other = "--pages gives the size of the KV cache" if asked.pages is not None else "the plan is for a processor"
        raise RunError(f"--memory-utilization is a share of a device's memory, and {other}; leave it out")


def refuse_backends(plan: Plan, registry: Registry, device: torch.device, page_size: int) -> None:
    """Reserve every backend of the plan with a KV cache of one page, and release it again.

    Only the backend knows whether it runs here: its library may be missing, or be another version.
    Raises ``RunError`` for one that only plans or declares other fields by now, ``BackendError`` for one
    that is not installed, and what its ``reserve`` raises.
    """
    try:
        pages = PageFormat(page_size=page_size, num_pages=2)
        refuse_planning_backends(plan, registry)
        windows = {
            role.role.is_drafter: tuple(group.window for group in role.groups for _ in range(group.layers))
            for role in plan.roles
        }
        fields = {role.role: Fields(role, capacity_of(plan, pages), device) for role in plan.roles}
        for groups in reserve_all(plan, windows, fields, registry, pages, device).values():
            for group in groups:
                group.executor.release()
    finally:
        # The number of pages depends on free memory, which neither garbage nor cached blocks are.
        host.give_back(device)


def start_facts(plan: Plan, registry: Registry, asked: RunRequest) -> dict[str, str]:
    """Return values that must match on every rank before anything is loaded: digests, versions, devices, choices."""
    used = {group.backend for role in plan.roles for group in role.groups}
    here = host.facts()
    facts = {"plan": digest(plan), "environment": digest(plan.environment)}
    facts |= {f"backend {name}": registry[name].version for name in sorted(used & set(registry))}
    facts |= {name: here[name] for name in ("device", "python", "torch", "threads", "cuda", "driver") if name in here}
    facts |= {name: host.installed_version(name) or "not installed" for name in PACKAGES}
    if torch.cuda.is_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call, unused-ignore]
    facts |= {name: os.environ.get(name, "not set") for name in COLLECTIVE_VARIABLES}
    # Each rank dumps into a folder of its own, and may find the same model under another path.
    chosen = {k: v for k, v in attrs.asdict(asked, recurse=False).items() if k not in ("dump_graphs", "model")}
    facts["model"] = _model_digest(asked.model)
    return facts | {f"the choice {name}": str(value) for name, value in chosen.items()}


def request_facts(requests: Sequence[Request]) -> dict[str, str]:
    """Return values that must match before requests are served: files of prompts may differ between machines."""
    return {"requests": f"{len(requests)} with the digest {digest_of(*requests)}"}


def _model_digest(source: Path | None) -> str:
    """Return the digest of a model's configuration, and of the names and sizes of its other files."""
    if source is None:
        return "random weights"
    config = source / "config.json" if source.is_dir() else source
    if not config.is_file():
        return "missing"
    others = sorted(source.glob("*.safetensors*")) if source.is_dir() else []
    content = hashlib.sha256(config.read_bytes()).hexdigest()
    return digest_of(content, *(f"{path.name} {path.stat().st_size}" for path in others))
