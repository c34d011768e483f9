"""What a bench refuses before a model is loaded: too few pages for its figures."""

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
