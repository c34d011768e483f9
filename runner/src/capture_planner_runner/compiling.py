"""Compiling of bodies, once for all sizes; and the time of kernels that no cache on disk has."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from capture_planner_runner.compilation.compilers import compiler_for
from capture_planner_runner.compilation.forwards import Compilation, Inputs
from capture_planner_runner.execution.fields import Extents
from capture_planner_runner.execution.role import RoleRun


def compile_bodies(roles: Sequence[RoleRun], device: torch.device, compilation: Compilation) -> None:
    """Compile the bodies of all roles. What cannot be compiled runs as it is; ``compilation`` has the reason.

    All of its ranks do so together, and what one of them cannot compile runs as it is on all.
    """
    weights = [weight for role in roles for weight in role.body.weights()]  # a drafter may read the target's
    compiler = compiler_for(device, compilation.peers.place)
    with torch.no_grad():
        for role, variant, inputs in _variants(roles):
            body, label = role.body, f"{role.role.value}{f' ({variant})' if variant else ''}"
            body.forwards.compile(body.forward, body.network, variant, inputs, weights, compiler, compilation, label)


def _variants(roles: Sequence[RoleRun]) -> Iterator[tuple[RoleRun, int, Inputs]]:
    """Yield each variant of a forward that graphs hold, and the one without adapters, with inputs for it."""
    for role in roles:
        for adapters in sorted({0} | {role.adapters_of(entry) for entry in role.plan.entries}):
            extents = Extents(tokens=1, reqs=1, pages=role.fields.capacity.pages, adapters=adapters)
            yield from ((role, *example) for example in role.body.examples(extents))


@contextlib.contextmanager
def compiled_seconds() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each kernel that Triton compiles within the context, in order.

    Kernels that are in Triton's cache on disk are not among them, nor what other libraries compile. The list stays
    empty without Triton 3.4 or later.
    """
    seconds: list[float] = []
    try:
        compilation = importlib.import_module("triton.knobs").compilation
    except ImportError:
        yield seconds
        return
    before = compilation.listener

    def listener(*, times: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            seconds.append(times.total * 1e-6)
        if before is not None:
            before(times=times, cache_hit=cache_hit, **others)

    compilation.listener = listener
    try:
        yield seconds
    finally:
        compilation.listener = before
