"""Measure: the figures that were asked for, one after the other, into one record."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
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
from capture_planner.bench.record import FIGURES, Absent, BenchReport
from capture_planner.bench.refusals import needs, refuse_few_pages
from capture_planner.bench.rig import QUICK, Effort, Progress, Rig, served_sizes
from capture_planner.bench.throughput import Load, throughput
from capture_planner.modes import Role
from capture_planner.plugins.registry import Registry
from capture_planner.records.backend import Attention
from capture_planner.records.plan import Plan
from capture_planner.runtime import host, launch
from capture_planner.runtime.assembly import dtype_of
from capture_planner.runtime.models.auxiliary import choose_drafter
from capture_planner.runtime.models.huggingface import HuggingFaceModel
from capture_planner.runtime.refusals import refuse_backends, refuse_plan
from capture_planner.runtime.serving.kv import PageFormat

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
    requests: tuple[int, ...] | None = None
    """Numbers of requests, each of which a graph must serve; None: ``rig.REQUESTS``, as far as they are."""
    page_size: int | None = None
    """Tokens a page; None: 64 on a GPU, 16 on a CPU."""
    pages: int | None = None
    """Pages of the KV cache, enough for each figure; None: what they need, as far as there is memory."""
    load: Load = attrs.Factory(Load)
    """What is served for a throughput; lengths that nobody named are cut until they fit the model."""
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
    """Return what is served where nobody says all of it; the lengths that are given are never cut."""
    base = QUICK_LOAD if quick else Load()
    return Load(
        requests=load_requests or base.requests,
        prompt=prompt_tokens or base.prompt,
        output=output_tokens or base.output,
        stated=frozenset(
            name
            for name, given in (("prompt", prompt_tokens), ("output", output_tokens))
            if given is not None
        ),
    )


def measure(plan: Plan, registry: Registry, bench: Bench, progress: Progress) -> BenchReport:
    """Measure a plan. A figure that breaks is recorded as such, and the others are measured.

    An interruption ends in a record of the figures that were measured before it; of the one under way
    nothing is kept.

    Raises ``RunError`` or ``BackendError`` where what was chosen cannot be measured, and, but for a model
    that is not the plan's, before a model is loaded: the plan is for another machine, has errors or a
    backend that does not run here, has no graph of a decode, or the pages do not do.
    """
    refuse_plan(plan, any_environment=bench.any_environment, any_plan=bench.any_plan)
    sizes = served_sizes(plan, bench.requests)
    device = host.device_of(plan.environment)
    page_size = bench.page_size or (64 if device.type == "cuda" else 16)
    bench = attrs.evolve(
        bench,
        load=bench.load.within(plan.model.max_model_len) if "throughput" in bench.only else bench.load,
    )
    if bench.pages is not None:
        refuse_few_pages(_needs(plan, bench, sizes, page_size), bench.pages, page_size)
    refuse_backends(plan, registry, device, page_size)
    model = launch.model_of(plan, bench.model, device=device, seed=bench.seed)
    rig = _rig(plan, registry, model, bench, sizes, page_size)
    found: dict[str, Any] = {}
    figures: dict[str, Callable[[Callable[[str], None]], Any]] = {
        "decode": lambda advance: decode(rig, advance),
        "preparation": lambda advance: preparation(rig, advance),
        "chain": lambda advance: chain(rig, advance),
        "throughput": lambda advance: throughput(rig, bench.load, advance, compare=bench.compare),
        "capture": lambda advance: capture(rig, advance),
        "pools": lambda advance: pools(rig, advance),
    }
    wanted = [name for name in figures if name in bench.only]
    ended: list[str] = []
    interrupted = False
    try:
        for name in wanted:
            with rig.trying(name), progress(name, _parts(rig, name)) as advance:
                found[name] = figures[name](advance)
            ended.append(name)
    except KeyboardInterrupt:
        interrupted = True
        rig.absent.extend(
            Absent(figure=name, says="interrupted before it was measured")
            for name in wanted
            if name not in ended
        )
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
        interrupted=interrupted,
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
    plan: Plan,
    registry: Registry,
    model: HuggingFaceModel,
    bench: Bench,
    sizes: tuple[int, ...],
    page_size: int,
) -> Rig:
    device = host.device_of(plan.environment)
    grapher = launch.grapher_for(device)
    drafter = None
    if plan.speculative is not None:
        drafter = choose_drafter(
            "random",
            plan.speculative,
            model,
            num_states=plan.limits.max_num_reqs,
            length=plan.model.max_model_len + plan.speculative.num_tokens + 1,
            seed=bench.seed + 1,
        )
    pages = bench.pages or _pages(plan, model, device, bench, sizes, page_size)
    return Rig(
        plan=plan,
        model=model,
        drafter=drafter,
        registry=registry,
        grapher=grapher,
        device=device,
        pages=PageFormat(page_size=page_size, num_pages=1 + pages),
        clock=clock_of(device),
        effort=_effort(bench),
        sizes=sizes,
    )


def _effort(bench: Bench) -> Effort:
    return QUICK if bench.quick else Effort()


def _needs(plan: Plan, bench: Bench, sizes: tuple[int, ...], page_size: int) -> Iterable[tuple[str, int]]:
    return needs(plan, _effort(bench), sizes, bench.load, bench.only, page_size)


def _pages(
    plan: Plan,
    model: HuggingFaceModel,
    device: torch.device,
    bench: Bench,
    sizes: tuple[int, ...],
    size: int,
) -> int:
    """Return the pages that the longest figure takes, as far as there is memory for them."""
    load = bench.load
    k = 0 if plan.speculative is None else plan.speculative.num_tokens
    served = min(load.requests, plan.limits.max_num_reqs)
    together = served * -(-(load.prompt + load.output + k) // size)
    wanted = max(64, together, *(pages for _, pages in _needs(plan, bench, sizes, size)))
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
