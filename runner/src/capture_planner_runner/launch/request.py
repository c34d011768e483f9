"""The request of a run, a frozen ``RunRequest``: loading what it names, and the checks before that.

A large model takes minutes to load; a wrong argument should be reported within seconds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
import torch

from capture_planner.analysis.lint import Severity, lint
from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import digest
from capture_planner.records.backend import Attention
from capture_planner.records.environment import DeviceKind
from capture_planner.records.fingerprint import digest_of
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner import host
from capture_planner_runner.execution.context import ContextRanks, refuse_context
from capture_planner_runner.execution.fields import Fields
from capture_planner_runner.launch.assembly import (
    capacity_of,
    dtype_of,
    kv_dtype_of,
    refuse_planning_backends,
    reserve_all,
    windows_of,
)
from capture_planner_runner.models.protocols import Adapters, Drafter, TargetModel
from capture_planner_runner.options import ExecutionPolicy, Options
from capture_planner_runner.ranks.collectives import WHOLE, AllReduce, Collectives
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request

if TYPE_CHECKING:
    from capture_planner_runner.models.huggingface import HuggingFaceModel


ORACLES = ("copy", "miss", "chance")
"""Drafters that know the target's answers, from a rehearsal."""

Drafting = Literal["copy", "miss", "chance", "random"] | Path


@attrs.frozen(kw_only=True)
class RunRequest:
    """The values of a run that a person gives; everything else is in the plan."""

    model: Path | None = None
    """Folder or configuration; None: a Llama of the plan's shape with random weights."""
    drafter: Drafting = "random"
    chance: float = 0.5
    """Probability that the drafter ``chance`` is right."""
    adapters: int | tuple[Path, ...] = ()
    """LoRA adapters, assigned to requests round-robin: a number of random ones, or folders saved by peft."""
    seed: int = 0
    page_size: int = 16
    """Tokens per page of the KV cache."""
    pages: int | None = None
    """Pages of the KV cache; None: for ``max_num_reqs`` requests of full length, as far as memory allows."""
    memory_utilization: float | None = None
    """Share of a device's memory for the whole run; None: ``cache_memory.SHARE``. Refused without a device."""
    warm_up: bool | None = None
    """Run steps of the workload's shapes before the clock starts; None: on a device. Never where steps are compared
    or verified, which would count them."""
    graph_memory: int | None = None
    """Limit of each graph pool in bytes; None: the plan's budget, if it has one."""
    step_seconds: float = 0.01
    """Seconds of simulated arrival time per step."""
    slower: str = ""
    """Advice for the report: the option that makes requests arrive more slowly; empty if no option does."""
    clip: bool = False
    """Truncate requests that are longer than the model, instead of refusing them."""
    eager: bool = False
    """Capture no graphs."""
    dump_graphs: Path | None = None
    """Folder for the contents of each captured graph."""
    timeline: bool = False
    """Return the timeline of all ranks."""
    verify: bool = False
    """Compare tokens and hidden states with the model in a higher precision, see ``numerics.verification``."""
    any_environment: bool = False
    """Run although the plan is for another machine."""
    any_plan: bool = False
    """Run although lint finds errors in the plan."""
    all_reduce: AllReduce = "auto"
    """Algorithm that sums over ranks of one model, on GPUs."""
    options: Options = attrs.Factory(Options)

    @property
    def facts(self) -> dict[str, str]:
        """The seed, how tokens are sampled, and the synthetic draft lengths where there are any, for the report."""
        options, found = self.options, {"seed": str(self.seed)}
        if options.temperature:
            found["sampling"] = f"temperature {options.temperature:g}, top-p {options.top_p:g}, a seed per request"
        if options.proposals:
            found["draft lengths"] = f"synthetic: {', '.join(f'{rate:g}' for rate in options.proposals)}"
        return found


def model_of(
    plan: Plan, source: Path | None, *, device: torch.device, seed: int, among: Collectives = WHOLE
) -> HuggingFaceModel:
    """Return the model at ``source``, or one of the plan's shape, as ``load_target`` does.

    Raises ``RunError`` for a model that cannot be executed, or is not the one that was planned for.
    """
    # Here, since transformers takes seconds to import, and earlier refusals do not need it.
    from capture_planner_runner.models.huggingface import differences, load_target

    dtype = dtype_of(plan.model.dtype)
    windows = windows_of(plan.role(Role.TARGET)) if source is None else None
    model = load_target(source, plan.model, device=device, dtype=dtype, seed=seed, among=among, windows=windows)
    if wrong := differences(model, plan.model):
        raise RunError(
            f"the plan is for another model than {model.name}: {'; '.join(wrong)}; plan the model that is run"
        )
    return model


def drafter_of(
    plan: Plan, model: TargetModel, choice: Drafting, *, chance: float = 0.5, seed: int = 0
) -> Drafter | None:
    """Return the chosen drafter, sized for the plan; None for a plan without one. ``seed`` is the model's."""
    if plan.speculative is None:
        return None
    from capture_planner_runner.models.drafters import choose_drafter

    states, length = plan.limits.max_num_reqs, plan.model.max_model_len + plan.speculative.num_tokens + 1
    # Another seed than the model's, or weights of the same shapes would have its numbers.
    return choose_drafter(
        choice, plan.speculative, model, num_states=states, length=length, chance=chance, seed=seed + 1
    )


def adapters_of(plan: Plan, model: HuggingFaceModel, choice: int | tuple[Path, ...], *, seed: int) -> Adapters | None:
    """Return the chosen LoRA adapters; None for none.

    Raises ``RunError`` for adapters of a plan without LoRA, and as ``load_adapters`` does.
    """
    if not choice:
        return None
    if model.among.size > 1:
        raise RunError("adapters were chosen, and parallel.tensor is more than 1, which adapters are not spread over")
    if plan.lora is None:
        raise RunError("adapters were chosen, and the plan has no LoRA; plan with lora: {max_active: N}")
    from capture_planner_runner.models.adapters import load_adapters

    return load_adapters(choice, model.linears(), seed=seed + 2)


def page_memory(plan: Plan, model: TargetModel, page_size: int) -> int:
    """Return the bytes of one page: keys and values in all layers of target and drafter."""
    layers = {Role.TARGET: len(model.windows)}
    if plan.speculative is not None:
        layers[Role.DRAFT_PREFILL] = plan.speculative.model.num_layers
    widths = 0
    for role, count in layers.items():
        each = Attention.of(plan, role, layers=1, window=None)
        widths += count * each.num_kv_heads * each.head_dim
    return 2 * widths * page_size // plan.parallel.decode_context * kv_dtype_of(plan.model).itemsize


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
    refuse_context(plan)


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
    if asked.options.temperature and asked.drafter in ORACLES:
        raise RunError(
            f"--drafter {asked.drafter} drafts by greedy answers, and --temperature samples others; leave one out"
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
        # The null page and one more.
        pages = PageFormat(page_size=page_size, num_pages=2)
        ContextRanks.of(plan, WHOLE, page_size)
        refuse_planning_backends(plan, registry)
        windows = {role.role.is_drafter: windows_of(role) for role in plan.roles}
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
    # Sizes and not contents: to read all weights would take minutes.
    return digest_of(content, *(f"{path.name} {path.stat().st_size}" for path in others))
