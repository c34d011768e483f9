"""Checks that a KV cache has enough pages for the figures, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from capture_planner.bench import pools
from capture_planner.bench.chain import HOST_STEPS, MOST
from capture_planner.bench.decode import WARM
from capture_planner.bench.rig import Effort, decoding_lengths
from capture_planner.bench.throughput import Load
from capture_planner.errors import RunError
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted


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
    for figure, steps, measured in (
        ("decode", effort.windows * (effort.steps + WARM), sizes),
        ("preparation", effort.prepared, sizes),
        ("chain", HOST_STEPS, chained),
    ):
        if figure in only:
            for size in measured:
                number = size * pages(*decoding_lengths(plan, size, steps))
                yield f"{figure} of {counted(size, 'request')}", number
    if "throughput" in only:
        yield "a request of throughput", pages(load.prompt, load.output)
    if "pools" in only and k:
        yield "a request of pools", pages(*pools.lengths(plan))
