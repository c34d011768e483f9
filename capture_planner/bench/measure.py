"""Measure: the figures that were asked for, one after the other, into one record."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import torch

from capture_planner.bench.capturing import capture
from capture_planner.bench.chain import chain
from capture_planner.bench.clock import clock_of
from capture_planner.bench.decode import decode
from capture_planner.bench.pools import pools
from capture_planner.bench.preparation import preparation
from capture_planner.bench.record import FIGURES, BenchReport
from capture_planner.bench.rig import QUICK, Effort, Progress, Rig, served_sizes
from capture_planner.bench.throughput import Load, throughput
from capture_planner.contract import Attention
from capture_planner.errors import RunError
from capture_planner.models.auxiliary import choose_drafter
from capture_planner.models.huggingface import HuggingFaceModel, differences, load_target
from capture_planner.modes import Role
from capture_planner.plan import Plan
from capture_planner.registry import Registry
from capture_planner.runtime import host, launch
from capture_planner.runtime.assembly import dtype_of
from capture_planner.runtime.kv import PageFormat

REQUESTS = (1, 8, 64, 256)
QUICK_LOAD = Load(requests=8, prompt=16, output=16)
CACHE_SHARE = 0.6
"""Most of a device's free memory that the KV cache takes where nobody says how many pages it has."""

PACKAGES = (
    "capture-planner",
    "torch",
    "triton",
    "transformers",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "numpy",
)


@attrs.frozen(kw_only=True)
class Bench:
    """What a person chooses about a bench."""

    model: Path | None = None
    """Folder or configuration; None: a Llama of the plan's numbers with random weights."""
    seed: int = 0
    requests: tuple[int, ...] = REQUESTS
    """Numbers of requests; those that no graph serves are left out."""
    page_size: int | None = None
    """Tokens a page; None: 64 on a GPU, 16 on a CPU."""
    pages: int | None = None
    """Pages of the KV cache; None: what the figures need, as far as there is memory."""
    load: Load = attrs.Factory(Load)
    """What is served for a throughput."""
    only: tuple[str, ...] = FIGURES
    compare: bool = True
    """Compare the throughput with that of transformers."""
    quick: bool = False
    """Fewer repeats: to see that it works, not to quote."""
    any_environment: bool = False
    any_plan: bool = False
    command: str = ""
    """The command line, for the record."""


def default_load(
    *,
    quick: bool,
    load_requests: int | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
) -> Load:
    """Return what is served where nobody says all of it."""
    base = QUICK_LOAD if quick else Load()
    return Load(
        requests=load_requests or base.requests,
        prompt=prompt_tokens or base.prompt,
        output=output_tokens or base.output,
    )


def measure(plan: Plan, registry: Registry, bench: Bench, progress: Progress) -> BenchReport:
    """Measure a plan. A figure that breaks is recorded as such, and the others are measured.

    Raises ``RunError`` where nothing can be measured: the plan is for another machine or model, has
    errors, or has no graph of a decode.
    """
    launch.refuse_plan(plan, launch.Choices(any_environment=bench.any_environment, any_plan=bench.any_plan))
    sizes = served_sizes(plan, bench.requests)
    device = host.device_of(plan.environment)
    model = load_target(
        bench.model, plan.model, device=device, dtype=dtype_of(plan.model.dtype), seed=bench.seed
    )
    if wrong := differences(model, plan.model):
        raise RunError(
            f"the plan is for another model than {model.name}: {'; '.join(wrong)}; plan the model that is run"
        )
    rig = _rig(plan, registry, model, bench, sizes)
    found: dict[str, Any] = {}
    figures: dict[str, Callable[[Callable[[str], None]], Any]] = {
        "decode": lambda advance: decode(rig, advance),
        "preparation": lambda advance: preparation(rig, advance),
        "chain": lambda advance: chain(rig, advance),
        "throughput": lambda advance: throughput(rig, bench.load, advance, compare=bench.compare),
        "capture": lambda advance: capture(rig, advance),
        "pools": lambda advance: pools(rig, advance),
    }
    for name, figure in figures.items():
        if name not in bench.only:
            continue
        with rig.trying(name), progress(name, _parts(rig, name)) as advance:
            found[name] = figure(advance)
    return BenchReport(
        plan=plan,
        model=model.name if rig.drafter is None else f"{model.name}, drafts by {rig.drafter.name}",
        backends={
            name: registry[name].version for name in sorted({g.backend for r in plan.roles for g in r.groups})
        },
        facts=_facts(bench),
        clock=rig.clock.name,
        page_size=rig.pages.page_size,
        absent=tuple(rig.absent),
        **found,
    )


def _parts(rig: Rig, figure: str) -> int:
    """Return how often a figure reports progress."""
    sizes, graphs, runs = len(rig.sizes), rig.plan.num_graphs, rig.effort.runs
    return {
        "decode": 2 * sizes,
        "preparation": sizes,
        "chain": 3 * sum(size <= 8 for size in rig.sizes),
        "throughput": runs + 2,
        "capture": graphs * (1 + 2 * runs if rig.device.type == "cuda" else 1),
        "pools": 2 * graphs,
    }[figure]


def _rig(
    plan: Plan, registry: Registry, model: HuggingFaceModel, bench: Bench, sizes: tuple[int, ...]
) -> Rig:
    device = host.device_of(plan.environment)
    effort = QUICK if bench.quick else Effort()
    grapher = launch.grapher_for(device)
    drafter = None
    if plan.speculative is not None:
        drafter = choose_drafter(
            "random",
            plan.speculative,
            model,
            places=plan.limits.max_num_reqs,
            length=plan.model.max_model_len + plan.speculative.num_tokens + 1,
            seed=bench.seed + 1,
        )
    size = bench.page_size or (64 if device.type == "cuda" else 16)
    pages = bench.pages or _pages(plan, model, device, size, effort, sizes, bench.load)
    return Rig(
        plan=plan,
        model=model,
        drafter=drafter,
        registry=registry,
        grapher=grapher,
        device=device,
        pages=PageFormat(page_size=size, num_pages=1 + pages),
        clock=clock_of(device),
        effort=effort,
        sizes=sizes,
    )


def _pages(
    plan: Plan,
    model: HuggingFaceModel,
    device: torch.device,
    size: int,
    effort: Effort,
    sizes: tuple[int, ...],
    load: Load,
) -> int:
    """Return the pages that the longest figure takes, as far as there is memory for them."""
    k = 0 if plan.speculative is None else plan.speculative.num_tokens
    steps = max(effort.windows * (effort.steps + 3), 2 * effort.prepared) + 128
    longest = min(plan.model.max_model_len, 128 + steps * (1 + k))
    served = min(load.requests, plan.limits.max_num_reqs)
    wanted = max(max(sizes) * -(-longest // size), served * -(-(load.prompt + load.output + k) // size), 64)
    if device.type != "cuda":
        return wanted
    each = Attention.of(plan, Role.TARGET, layers=1, window=None)
    layers = model.num_layers + (plan.speculative.model.num_layers if plan.speculative else 0)
    width = dtype_of(plan.model.kv_dtype or plan.model.dtype).itemsize
    page = 2 * layers * size * each.num_kv_heads * each.head_dim * width
    return max(1, min(wanted, int(CACHE_SHARE * torch.cuda.mem_get_info()[0]) // page))


def _facts(bench: Bench) -> dict[str, str]:
    """Return machine, driver, versions, date and command line."""
    found = host.facts()
    environment = host.this_environment("here")
    if environment.driver is not None:
        found["driver"] = environment.driver
    if environment.device.capability is not None:
        found["capability"] = environment.device.capability
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found["seed"] = str(bench.seed)
    if bench.quick:
        found["quick"] = "yes: few repeats, not to be quoted"
    if bench.command:
        found["command"] = bench.command
    return found
