"""Measure the chosen figures of a plan, one after the other, into one report."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from capture_planner.errors import RunError
from capture_planner.plugins.profiler import Progress
from capture_planner.plugins.registry import Registry
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner import host
from capture_planner_runner.bench.capturing import capture, pool_lengths, pools
from capture_planner_runner.bench.decode import HOST_STEPS, MOST, WARM, chain, decode
from capture_planner_runner.bench.preparation import preparation
from capture_planner_runner.bench.record import FIGURES, AbsentFigure, BenchReport
from capture_planner_runner.bench.rig import QUICK, Effort, Rig, decoding_lengths, served_sizes
from capture_planner_runner.bench.throughput import Load, throughput
from capture_planner_runner.launch.request import refuse_plan
from capture_planner_runner.options import Options, refuse_acceptance

QUICK_LOAD = Load(requests=8, prompt=16, output=16)
CACHE_SHARE = 0.6
"""Largest share of a device's free memory for the KV cache, if its pages are not stated."""

PACKAGES = ("capture-planner", "transformers", "numpy", *host.PACKAGES)


@attrs.frozen(kw_only=True)
class Bench:
    model: Path | None = None
    """Folder or configuration; None: a Llama of the plan's numbers with random weights."""
    seed: int = 0
    requests: tuple[int, ...] | None = None
    """Numbers of requests, each of which a graph must serve; None: the ``rig.REQUESTS`` with a graph."""
    page_size: int | None = None
    """Tokens per KV-cache page; None: 64 on a GPU, 16 on a CPU."""
    pages: int | None = None
    """Pages of the KV cache, enough for each figure; None: enough for all figures, within memory."""
    load: Load = attrs.Factory(Load)
    """The load of a throughput; lengths that were not stated are shortened to fit the model."""
    only: tuple[str, ...] = FIGURES
    acceptance: tuple[float, ...] = ()
    """Shares of synthetic acceptance, see ``Options.acceptance``; empty: the target verifies the drafts."""
    compare: bool = True
    """Whether to compare the throughput with transformers."""
    compile: bool | None = None
    """Compile the layers; None: on a GPU."""
    quick: bool = False
    """Fewer repeats, to try a bench rather than to quote its numbers."""
    any_environment: bool = False
    any_plan: bool = False
    command: str = ""
    """The command line, for the report."""

    @property
    def effort(self) -> Effort:
        return QUICK if self.quick else Effort()


def default_load(
    *, quick: bool, load_requests: int | None = None, prompt_tokens: int | None = None, output_tokens: int | None = None
) -> Load:
    """Return the load with defaults for everything that is None; stated lengths are never shortened."""
    base = QUICK_LOAD if quick else Load()
    lengths = {"prompt": prompt_tokens, "output": output_tokens}
    return Load(
        requests=load_requests or base.requests,
        prompt=prompt_tokens or base.prompt,
        output=output_tokens or base.output,
        stated=frozenset(name for name, tokens in lengths.items() if tokens is not None),
    )


def measure(plan: Plan, registry: Registry, bench: Bench, progress: Progress) -> BenchReport:
    """Measure a plan. A figure that fails is recorded as failed, and the others are measured.

    An interruption ends in a report of the figures that were measured before it; partial measurements
    are discarded.

    Raises ``RunError`` or ``BackendError`` if the plan is for another machine, has errors, a backend that
    does not run here or no graph of a decode, or if the pages are too few; all this before a model is
    loaded. A model that does not match the plan is rejected after loading.
    """
    refuse_plan(plan, any_environment=bench.any_environment, any_plan=bench.any_plan)
    sizes = served_sizes(plan, bench.requests)
    refuse_acceptance(plan, bench.acceptance)
    page_size = bench.page_size or (64 if host.device_of(plan.environment).type == "cuda" else 16)
    if "throughput" in bench.only:
        bench = attrs.evolve(bench, load=bench.load.within(plan.model.max_model_len))
    needs = tuple(page_needs(plan, bench.effort, sizes, bench.load, bench.only, page_size))
    if bench.pages is not None:
        refuse_few_pages(needs, bench.pages, page_size)
    longest = max((pages for _, pages in needs), default=0)

    def pages(page: int, free: float) -> int:
        """Return the pages for the whole load and for the longest figure, within a GPU's memory."""
        drafts = 0 if plan.speculative is None else plan.speculative.num_tokens
        num_reqs = min(bench.load.requests, plan.limits.max_num_reqs)
        each = -(-(bench.load.prompt + bench.load.output + drafts) // page_size)
        return bench.pages or int(max(1, min(max(64, num_reqs * each, longest), CACHE_SHARE * free / page)))

    rig = Rig.of(
        plan,
        registry,
        model=bench.model,
        seed=bench.seed,
        page_size=page_size,
        pages=pages,
        effort=bench.effort,
        sizes=sizes,
        options=Options(acceptance=bench.acceptance, seed=bench.seed, compile=bench.compile),
    )
    results, interrupted = _figures(rig, bench, progress)
    facts = host.facts()
    if plan.num_lazy:
        facts["captured"] = f"all at start; run captures {counted(plan.num_lazy, 'graph')} on first use"
    if capability := host.this_environment("here").device.capability:
        facts["capability"] = capability
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    facts["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts["seed"] = str(bench.seed)
    if bench.acceptance:
        facts["acceptance"] = f"synthetic: {', '.join(f'{rate:g}' for rate in bench.acceptance)}"
    if bench.quick:
        facts["quick"] = "yes: few repeats, not to be quoted"
    if bench.command:
        facts["command"] = bench.command
    return BenchReport(
        plan=plan,
        model=rig.name,
        backends={name: registry[name].version for name in sorted({g.backend for r in plan.roles for g in r.groups})},
        facts=facts | rig.compilation.facts(),
        clock=rig.clock.name,
        page_size=page_size,
        absent=tuple(rig.absent),
        interrupted=interrupted,
        **results,
    )


def _figures(rig: Rig, bench: Bench, progress: Progress) -> tuple[dict[str, Any], bool]:
    """Measure the chosen figures; return them by name, and whether they were interrupted."""
    sizes, graphs, runs = len(rig.sizes), rig.plan.num_graphs, rig.effort.runs
    captures = 1 + 2 * runs if rig.device.type == "cuda" else 1  # the first one, then ours and bare ones by turns
    # Each figure with the number of times that it reports progress.
    figures: dict[str, tuple[Callable[[Callable[[str], None]], Any], int]] = {
        "decode": (partial(decode, rig), 2 * sizes),
        "preparation": (partial(preparation, rig), sizes),
        "chain": (partial(chain, rig), 3 * sum(size <= MOST for size in rig.sizes)),
        "throughput": (partial(throughput, rig, bench.load, compare=bench.compare), runs + 2),
        "capture": (partial(capture, rig), graphs * captures),
        "pools": (partial(pools, rig), 2 * graphs),
    }
    results: dict[str, Any] = {}
    pending = [name for name in figures if name in bench.only]
    try:
        while pending:
            figure, parts = figures[pending[0]]
            with rig.trying(pending[0]), progress(pending[0], parts) as advance:
                results[pending[0]] = figure(advance)
            # Only now, so that a figure that is interrupted is among those that were not measured.
            del pending[0]
    except KeyboardInterrupt:
        rig.absent.extend(AbsentFigure(figure=name, says="interrupted before it was measured") for name in pending)
    return results, bool(pending)


def refuse_few_pages(needs: Iterable[tuple[str, int]], pages: int, page_size: int) -> None:
    """Raise ``RunError`` for the first figure that needs more than ``pages``."""
    for figure, number in needs:
        if number > pages:
            raise RunError(
                f"{figure} needs {counted(number, 'page')} of {counted(page_size, 'token')}, but --pages is "
                f"{pages}; raise it, or skip that figure (--only, --requests)"
            )


def page_needs(
    plan: Plan, effort: Effort, sizes: tuple[int, ...], load: Load, only: tuple[str, ...], page_size: int
) -> Iterator[tuple[str, int]]:
    """Yield each measurement with the pages that it needs, including pages of drafts past the end."""
    k = 0 if plan.speculative is None else plan.speculative.num_tokens

    def pages(prompt: int, output: int) -> int:
        return -(-min(prompt + output + k, plan.model.max_model_len) // page_size)

    chained = tuple(size for size in sizes if size <= MOST) if k else ()
    for figure, steps, sizes_of_figure in (
        ("decode", effort.windows * (effort.steps + WARM), sizes),
        ("preparation", effort.prepared, sizes),
        ("chain", HOST_STEPS, chained),
    ):
        if figure in only:
            for size in sizes_of_figure:
                number = size * pages(*decoding_lengths(plan, size, steps))
                yield f"{figure} of {counted(size, 'request')}", number
    if "throughput" in only:
        yield "a request of throughput", pages(load.prompt, load.output)
    if "pools" in only and k:
        yield "a request of pools", pages(*pool_lengths(plan))
