"""The size of the KV cache: as chosen, or the memory that weights, buffers, steps and graphs leave.

Graphs hold the addresses of the cache, so it is reserved before they are captured, and what they will take is
predicted: a trial with few pages captures some of each kind and runs the largest step. vLLM 0.33 does so too
(``gpu_model_runner.profile_cudagraph_memory``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from capture_planner.errors import RunError, one_line
from capture_planner.modes import Pool
from capture_planner.records._base import grouped
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner import host
from capture_planner_runner.capture.variants import at_start, sampled
from capture_planner_runner.launch.request import page_memory
from capture_planner_runner.ledger.rows import CacheMemory, GraphCapture
from capture_planner_runner.models.protocols import TargetModel
from capture_planner_runner.ranks.peers import ALONE, Peers
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request

HOST_MEMORY = 1 << 30
"""Most bytes of the KV cache in a host's memory."""

SHARE = 0.9
"""Default share of a device's memory for a run."""

LEAST_DRIVER = 1 << 20
"""Least bytes of each graph after the first of its kind, as in vLLM."""

NO_TRIAL = 0.25
"""Share of the remaining memory up to which a cache leaves room for any graphs, so that no trial is run."""

MakeRunner = Callable[[Plan, PageFormat], Runner]


class Gauge:
    """Reads the memory of the current CUDA device, in bytes."""

    def used(self) -> tuple[int, int]:
        """Return the bytes used by all processes, after this one freed its caches, and the total."""
        host.give_back(torch.device("cuda"))
        free, total = torch.cuda.mem_get_info()
        return total - free, total

    def allocated(self) -> int:
        """Return the bytes of tensors now, and reset the peak."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())

    def peak(self) -> int:
        """Return the peak of tensors since then."""
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())


@attrs.frozen(kw_only=True)
class PageRange:
    """The number of pages that a workload can use."""

    format: PageFormat
    """Format of a page; the number of pages is not set."""
    least: int
    """Pages for its longest request."""
    most: int
    """Pages for ``max_num_reqs`` requests of the model's full length."""
    memory: int
    """Bytes of a page."""

    @classmethod
    def of(cls, plan: Plan, model: TargetModel, requests: Sequence[Request], page_size: int) -> PageRange:
        size, longest = PageFormat(page_size=page_size, num_pages=1), plan.model.max_model_len
        drafts = plan.speculative.num_tokens + plan.speculative.extra_slots if plan.speculative else 0
        return cls(
            format=size,
            least=size.pages(min(max(request.length for request in requests) + drafts, longest)),
            most=plan.limits.max_num_reqs * size.pages(longest),
            memory=page_memory(plan, model, page_size),
        )

    def of_number(self, pages: int) -> PageFormat:
        """Return the format with that number of pages and the null page."""
        return attrs.evolve(self.format, num_pages=1 + pages)


def stated_pages(pages: int, needed: PageRange, requests: Sequence[Request]) -> tuple[PageFormat, CacheMemory]:
    """Return a cache of ``pages`` pages; raises ``RunError`` where the longest request needs more."""
    if needed.least > pages:
        longest = max(requests, key=lambda request: request.length)
        raise RunError(
            f"the request {longest.name} needs {counted(needed.least, 'page')} of "
            f"{counted(needed.format.page_size, 'token')}, and the KV cache has {pages}; give it more (--pages)"
        )
    return needed.of_number(pages), CacheMemory(share=None, predicted=0, reason=f"--pages {pages}")


def host_pages(needed: PageRange) -> tuple[PageFormat, CacheMemory]:
    """Return a cache in the host's memory: for all requests at full length, within ``HOST_MEMORY``."""
    pages = max(needed.least, min(needed.most, HOST_MEMORY // needed.memory))
    reason = "every request at full length" if pages >= needed.most else "at most 1 GiB of a host's memory"
    return needed.of_number(pages), CacheMemory(share=None, predicted=0, reason=reason)


@attrs.frozen(kw_only=True)
class Trial:
    """Memory of a plan with a small KV cache, in bytes."""

    fixed: int
    """Fields, outputs, workspaces and states: everything a runner reserves except pages."""
    step: int
    """Additional memory of its largest step."""
    graphs: int
    """Prediction for all graphs."""
    captures: int
    """Number of graphs captured for the prediction."""


def device_pages(
    plan: Plan, needed: PageRange, share: float, make: MakeRunner, gauge: Gauge, limit: int | None, peers: Peers = ALONE
) -> tuple[PageFormat, CacheMemory]:
    """Return the largest cache that there is memory for, and use; what a lazy plan captures later has its reservation.

    :param share: of the device's memory that all together may take, other processes included.
    :param limit: bytes that a pool of graphs may hold; None: any.
    :param peers: all ranks. Each gets as many pages as the rank with the least free memory.
    :raises RunError: there is not enough for the longest request, or for the largest step.
    """
    used, total = gauge.used()
    most, reserved = needed.most * needed.memory, plan.capture.memory or 0 if plan.num_lazy else 0
    plan = at_start(plan)
    # All ranks try, or none: a trial has collectives.
    if _least(peers, most <= NO_TRIAL * (share * total - used - reserved)):
        return needed.of_number(needed.most), CacheMemory(
            share=share, predicted=0, reason="every request at full length, which leaves room for any graphs"
        )
    trial = run_trial(plan, needed, make, gauge, limit)
    # Read again: kernels and handles that the trial loaded stay.
    used, _ = gauge.used()
    # The last term is the null page.
    left = int(share * total) - used - trial.fixed - trial.step - trial.graphs - reserved - needed.memory
    parts = (
        f"{share:g} of {_gib(total)} less {_gib(used)} of weights and others, {_gib(trial.fixed)} of buffers, "
        f"{_gib(trial.step)} of the largest step and {_gib(trial.graphs)} of graphs"
        + (f", and {_gib(reserved)} reserved for graphs on first use (capture.memory)" if reserved else "")
    )
    # All ranks take the smallest number: one block table is for all that share a model.
    pages = _least(peers, min(needed.most, left // needed.memory))
    if pages < needed.least:
        raise RunError(
            f"the KV cache has {_gib(max(left, 0))}, and the longest request needs "
            f"{_gib(needed.least * needed.memory)}: {parts}; raise --memory-utilization, free the device, lower "
            "limits.max_num_tokens, or capture less (--graph-memory)"
        )
    source = f"graphs predicted from {counted(trial.captures, 'capture')}"
    ends = "every request at full length; " if pages == needed.most else ""
    return needed.of_number(pages), CacheMemory(share=share, predicted=trial.graphs, reason=f"{ends}{parts}; {source}")


def run_trial(plan: Plan, needed: PageRange, make: MakeRunner, gauge: Gauge, limit: int | None) -> Trial:
    """Reserve a plan with few pages, capture some graphs of each kind, and run its largest step.

    Raises ``RunError`` where that step does not fit into memory.
    """
    requests = largest_step(plan)
    # Enough for the largest step, and for the longest request, which a runner would refuse otherwise.
    pages = needed.of_number(max(needed.least, sum(needed.format.pages(each.length) + 1 for each in requests)))
    before = gauge.allocated()
    runner = make(sampled(plan), pages)
    try:
        with runner:
            reserved = gauge.allocated()
            runner.capture(memory=limit)
            captured = tuple(runner.session.captured)
            filled = gauge.allocated()
            runner.serve(requests)
            step = gauge.peak() - filled
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"a step of {counted(plan.limits.max_num_tokens, 'token')} does not fit into the device's memory: "
            f"{one_line(error)}; lower limits.max_num_tokens, or free the device"
        ) from error
    finally:
        # A reference that is left somewhere must not keep buffers and graphs.
        vars(runner).clear()
    return Trial(
        fixed=reserved - before - pages.num_pages * needed.memory,
        step=step,
        graphs=predicted_graphs(plan, captured, limit),
        captures=len(captured),
    )


def largest_step(plan: Plan) -> tuple[Request, ...]:
    """Return requests whose prompts fill the first step of all: ``max_num_tokens`` tokens, as far as limits admit."""
    # One position is left for the token that each request generates.
    left, longest = plan.limits.max_num_tokens, plan.model.max_model_len - 1
    found: list[Request] = []
    while left > 0 and len(found) < plan.limits.max_num_reqs:
        prompt = (0,) * min(left, longest)
        found.append(Request(name=f"trial-{len(found)}", arrival=0.0, prompt=prompt, max_new_tokens=1))
        left -= len(prompt)
    return tuple(found)


def predicted_graphs(plan: Plan, captured: Sequence[GraphCapture], limit: int | None) -> int:
    """Return what all graphs of a plan will take, in bytes: of each kind the first, and the mean of others so often.

    :param captured: of each kind the largest first, then others.
    """
    numbers = grouped(
        ((role.role, entry) for role in plan.roles for entry in role.entries),
        lambda item: (item[0], item[1].mode, item[1].tokens_each is None),
    )
    memory = driver = 0.0
    kinds = grouped(captured, lambda graph: (graph.role, graph.entry.mode, graph.entry.tokens_each is None))
    for kind, graphs in kinds.items():
        first, others, more = graphs[0], graphs[1:], len(numbers[kind]) - 1
        memory += first.memory + more * _mean([graph.memory for graph in others])
        driver += first.driver + more * max(_mean([graph.driver for graph in others]), LEAST_DRIVER)
    # The limit is of each pool, and executable graphs of the driver are outside of pools.
    pools = 1 if plan.pool is Pool.SHARED else len(plan.roles)
    return int((memory if limit is None else min(memory, limit * pools)) + driver)


def _least(peers: Peers, number: int) -> int:
    return int(peers.agree([number]).min())


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
