"""What is refused before a model is loaded: backends that do not run here, and too few pages.

A large model takes minutes to make, and whoever typed the wrong thing should know within seconds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import cast

import torch

from capture_planner.bench import pools
from capture_planner.bench.chain import HOST_STEPS, MOST
from capture_planner.bench.decode import WARM
from capture_planner.bench.rig import Effort, decoding_lengths
from capture_planner.bench.throughput import Load
from capture_planner.errors import RunError
from capture_planner.models.contract import Drafter, TargetModel
from capture_planner.plan import Plan
from capture_planner.registry import Registry
from capture_planner.runtime.assembly import caches_of, capacity_of, refuse_backend, reserved_groups
from capture_planner.runtime.fields import Fields
from capture_planner.runtime.kv import PageFormat
from capture_planner.words import counted


def refuse_backends(plan: Plan, registry: Registry, device: torch.device, page_size: int) -> None:
    """Reserve every backend of the plan with a KV cache of one page, and release it again.

    Only the backend knows whether it runs here: its library may be missing, or be another version.
    Raises ``RunError`` for one that only plans or declares other fields by now, ``BackendError`` for one
    that is not installed, and what its ``reserve`` raises.
    """
    try:
        _reserve_all(plan, registry, device, PageFormat(page_size=page_size, num_pages=2))
    finally:
        gc.collect()
        if device.type == "cuda":
            # How many pages there are is decided by what is free, and cached blocks are not.
            torch.cuda.empty_cache()


def _reserve_all(plan: Plan, registry: Registry, device: torch.device, pages: PageFormat) -> None:
    shapes = {
        role.role.is_drafter: SimpleNamespace(
            num_layers=sum(group.layers for group in role.groups),
            windows=[group.window for group in role.groups for _ in range(group.layers)],
        )
        for role in plan.roles
    }
    model = cast(TargetModel, shapes[False])
    for role in plan.roles:
        for group in role.groups:
            refuse_backend(plan, role, group, registry[group.backend])
    caches = caches_of(plan, model, cast("Drafter | None", shapes.get(True)), pages, device)
    for role in plan.roles:
        fields = Fields(role, capacity_of(plan, pages), device)
        for group_run in reserved_groups(plan, role, model, caches, fields, registry, pages, device):
            group_run.executor.release()


def refuse_few_pages(needed: Iterable[tuple[str, int]], pages: int, page_size: int) -> None:
    """Raise ``RunError`` where a figure needs more than ``pages``, and say which, and how many."""
    for what, number in needed:
        if number > pages:
            raise RunError(
                f"{what} needs {counted(number, 'page')} of {counted(page_size, 'token')}, and --pages is "
                f"{pages}; give it more, or leave that out (--only, --requests)"
            )


def needs(
    plan: Plan, effort: Effort, sizes: tuple[int, ...], load: Load, only: tuple[str, ...], page_size: int
) -> Iterator[tuple[str, int]]:
    """Give what cannot be measured with fewer pages, with their number: drafts past the end included."""
    k = 0 if plan.speculative is None else plan.speculative.num_tokens

    def pages(prompt: int, output: int) -> int:
        return -(-min(prompt + output + k, plan.model.max_model_len) // page_size)

    short = tuple(size for size in sizes if size <= MOST) if k else ()
    for figure, steps, together in (
        ("decode", effort.windows * (effort.steps + WARM), sizes),
        ("preparation", effort.prepared, sizes),
        ("chain", HOST_STEPS, short),
    ):
        if figure in only:
            for size in together:
                needed = size * pages(*decoding_lengths(plan, size, steps))
                yield f"{figure} of {counted(size, 'request')}", needed
    if "throughput" in only:
        yield "a request of throughput", pages(load.prompt, load.output)
    if "pools" in only and k:
        yield "a request of pools", pages(*pools.lengths(plan))
