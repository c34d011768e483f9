"""Capture sizes for vLLM at which no decode batch misses a graph that was captured for it.

vLLM has one list of token counts for all query lengths, rounds each up to a multiple of each query
length, and looks only at the *smallest* captured count that holds a batch. A graph of another query
length that lies nearer hides the right one (vllm#53407, #56136).

A list without such holes always exists: with the exact count of every batch in it, nothing is nearer
than the batch's own graph. The search finds one with the fewest FULL graphs, and then the fewest
sizes, whose padding stays under a bound. It walks the sizes upward: when the next size is chosen, all
graphs below it are final, so only the graphs at or above it need to be remembered.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import attrs

from capture_planner.planning.sizing.engine_lists import vllm_requests
from capture_planner.records.batch_space import DecodeFamily

Answer = Callable[[int, int], int | None]
"""From requests and query length to the tokens of the FULL graph that serves them, or None."""

RATIOS = tuple(1 + Fraction(1, part) for part in (64, 48, 32, 24, 16, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1))
"""Bounds on padding that are tried where only a number of graphs is given."""

_EXACT_UPTO = 1024
"""Above so many tokens only common multiples of the query lengths are tried, where the bound allows it."""

_KEPT = 256
"""Most states kept at a size. The published schedules, with 256 requests, have the same lists without it;
wider ones at loose bounds may then need a few graphs more than the fewest."""


@attrs.frozen(kw_only=True)
class SizeList:
    """A list of sizes with which every batch has a graph, and its cost, by enumeration of all batches."""

    sizes: tuple[int, ...]
    """In tokens, ascending."""
    graphs: int
    """FULL graphs that vLLM captures with it, for each adapter case."""
    worst: Fraction
    """Largest padded/real ratio of a decode."""


def full_graphs(sizes: Iterable[int], query_lens: Iterable[int], max_num_reqs: int) -> tuple[tuple[int, int], ...]:
    """Return uniform decode graphs as (tokens, query length), ascending; ``query_lens`` are all of the schedule's."""
    tokens, lengths = tuple(sizes), tuple(query_lens)
    widest = max(lengths, default=1)
    return tuple(
        sorted(
            (reqs * length, length)
            for length in set(lengths)
            for reqs in vllm_requests(tokens, query_len=length, max_query_len=widest, max_num_reqs=max_num_reqs)
        )
    )


def nearest(sizes: Iterable[int], query_lens: Iterable[int], max_num_reqs: int) -> Answer:
    """Return vLLM's rule for FULL decode graphs: of the nearest count, the one of the query length."""
    graphs = full_graphs(sizes, query_lens, max_num_reqs)
    held = frozenset(graphs)
    tokens = sorted({t for t, _ in graphs})

    def answer(num_reqs: int, query_len: int) -> int | None:
        index = bisect_left(tokens, num_reqs * query_len)
        # A graph of this length behind the nearest count is hidden by it (vllm#53407).
        if index == len(tokens) or (tokens[index], query_len) not in held:
            return None
        return tokens[index]

    return answer


def examine(decodes: Sequence[DecodeFamily], answer: Answer) -> tuple[tuple[int, ...], Fraction]:
    """Ask for every batch: return the requests of those without a graph, and the worst padding."""
    missed, worst = [], Fraction(1)
    for tier in decodes:
        for count, _ in tier.requests.counts():
            tokens = answer(count, tier.query_len)
            if tokens is None:
                missed.append(count)
            else:
                worst = max(worst, Fraction(tokens, count * tier.query_len))
    return tuple(missed), worst


def _most_tokens(tier: DecodeFamily) -> int:
    """Return the tokens of the largest batch."""
    return tier.requests.intervals[-1][1] * tier.query_len


def size_list(
    decodes: Sequence[DecodeFamily],
    max_num_reqs: int,
    *,
    worst: Fraction | None = None,
    graphs: int | None = None,
    wider: Iterable[int] = (),
    query_lens: Iterable[int] = (),
) -> SizeList:
    """Return the smallest list of sizes with which no decode misses its graph.

    ``worst`` bounds the padded/real ratio of every decode. Without it, the least of ``RATIOS`` is
    taken that needs at most ``graphs`` FULL graphs (no bound: 1.25); where none does, the last.
    ``wider`` are sizes for larger, mixed batches that the list has to have as well; ``query_lens`` those
    that the engine captures, where it captures more than ``decodes`` have.
    """
    # vLLM captures each length of a schedule at each size, so lengths that no decode here has can hide graphs too.
    lengths = tuple(sorted({*query_lens, *(tier.query_len for tier in decodes)}))
    top = max((_most_tokens(tier) for tier in decodes), default=0)
    above = tuple(sorted({size for size in wider if size > top}))
    bounds = (worst,) if worst is not None else RATIOS if graphs is not None else (Fraction(5, 4),)
    sizes: tuple[int, ...] = ()
    for bound in bounds:
        cap = above[-1] if above else top
        sizes = (*smallest(tuple(decodes), lengths, max_num_reqs, bound, cap), *above)
        if graphs is None or len(full_graphs(sizes, lengths, max_num_reqs)) <= graphs:
            break
    missed, found = examine(decodes, nearest(sizes, lengths, max_num_reqs))
    assert not missed  # The search covers every batch.
    return SizeList(sizes=sizes, graphs=len(full_graphs(sizes, lengths, max_num_reqs)), worst=found)


@lru_cache(maxsize=64)
def smallest(
    decodes: tuple[DecodeFamily, ...], query_lens: tuple[int, ...], max_num_reqs: int, worst: Fraction, cap: int
) -> tuple[int, ...]:
    """Return the list with the fewest FULL graphs, then the fewest sizes, that hides no graph.

    ``query_lens`` are all that are captured, ascending. ``cap`` is the largest size of the
    final list: vLLM drops graphs beyond it. The fixes of several findings want the same list, so it is kept.
    """
    if not decodes:
        return ()
    exact = {count * tier.query_len for tier in decodes for count, _ in tier.requests.counts()}
    return _Search(decodes, query_lens, max_num_reqs, worst, cap).run() or tuple(sorted(exact))


Points = tuple[tuple[int, frozenset[int]], ...]
"""Token counts with graphs, ascending, each with the query lengths that it has."""


class _State(NamedTuple):
    """What matters of a list so far: its last size, the last final count, and the counts not final."""

    size: int
    final: int
    open: Points


_Value = tuple[int, int]
"""FULL graphs that are final, and sizes."""


class _Search:
    """Shortest path over lists of sizes, in ascending order of their last size."""

    def __init__(
        self, decodes: Sequence[DecodeFamily], query_lens: Sequence[int], max_num_reqs: int, worst: Fraction, cap: int
    ) -> None:
        self._max_num_reqs, self._worst, self._cap = max_num_reqs, worst, cap
        self._lengths = query_lens
        self._top = max(_most_tokens(tier) for tier in decodes)
        tiers = {tier.query_len: tier for tier in decodes}
        # Sizes are whole numbers, and comparing with a Fraction takes many times longer.
        self._most = [tokens * worst.numerator // worst.denominator for tokens in range(self._top + 1)]
        """The most tokens that a batch of so many may be padded to."""
        self._next = {q: self._successors(tiers.get(q)) for q in query_lens}
        self._candidates = self._useful([_most_tokens(tier) for tier in decodes])
        self._new = {size: self._fresh(size) for size in self._candidates}

    def _successors(self, tier: DecodeFamily | None) -> list[int | None]:
        """Return, at each token count, the least batch above it."""
        exact = set() if tier is None else {count * tier.query_len for count, _ in tier.requests.counts()}
        found: list[int | None] = [None] * (self._top + 1)
        for tokens in range(self._top, 0, -1):
            found[tokens - 1] = tokens if tokens in exact else found[tokens]
        return found

    def _useful(self, tops: Sequence[int]) -> list[int]:
        """Return the sizes worth trying: one that no query length divides gives the same graphs as the next one."""
        every = [s for s in range(1, self._top + 1) if any(s % q == 0 for q in self._lengths)]
        common = math.lcm(*self._lengths)
        # Steps of a common multiple that are coarse for the bound would leave no list within it.
        if self._top <= _EXACT_UPTO or common > (self._worst - 1) * _EXACT_UPTO / 2:
            return every
        kept = {size for size in every if size <= _EXACT_UPTO} | set(tops)
        size = _EXACT_UPTO // common * common
        while size < self._top:
            size += max(common, int(size * (self._worst - 1) / 8) // common * common)
            kept.add(min(size, self._top))
        return sorted(kept)

    def _settle(self, final: int, points: Points, upto: int) -> tuple[int, int, Points] | None:
        """Make counts below ``upto`` final: graphs, last, rest; None where one hides a graph or pads too far."""
        graphs = settled = 0
        for tokens, held in points:
            if tokens >= upto:
                break
            # Above the top no batch is left.
            for q in self._lengths if final < self._top else ():
                batch = self._next[q][final]
                if batch is None or batch > tokens:
                    continue
                # Without a graph of this length, the count hides the one behind it from the batch.
                if q not in held or tokens > self._most[batch]:
                    return None
            graphs, final, settled = graphs + len(held), tokens, settled + 1
        return graphs, final, points[settled:]

    def _least(self, query_len: int, above: int) -> int | None:
        return self._next[query_len][above] if above < self._top else None

    def _fresh(self, size: int) -> Points:
        """Return the counts that one size gives graphs at."""
        found: dict[int, frozenset[int]] = {}
        for q in self._lengths:
            tokens = -(-size // q) * q
            if tokens <= self._cap and tokens // q <= self._max_num_reqs:
                found[tokens] = found.get(tokens, frozenset()) | {q}
        return tuple(sorted(found.items()))

    def run(self) -> tuple[int, ...]:
        """Return the sizes found, or none."""
        start = _State(0, 0, ())
        layers: dict[int, dict[_State, tuple[_Value, _State | None]]] = {0: {start: ((0, 0), None)}}
        best: tuple[_Value, _State] | None = None
        for size in [0, *self._candidates]:
            layer = layers.get(size, {})
            if len(layer) > _KEPT:
                # Those that have settled most, at the least cost: they have the fewest batches left to cover.
                kept = sorted(layer.items(), key=lambda item: (-item[0].final, item[1][0]))[:_KEPT]
                layer = layers[size] = dict(kept)
            for state, (value, _) in layer.items():
                total = self._whole(state, value)
                if total is not None and (best is None or total < best[0]):
                    best = total, state
                for reached, total in self._steps(state, value):
                    into = layers.setdefault(reached.size, {})
                    if reached not in into or total < into[reached][0]:
                        into[reached] = total, state
        if best is None:
            return ()
        sizes, at = [], best[1]
        while at.size:
            sizes.append(at.size)
            before = layers[at.size][at][1]
            assert before is not None  # only the start has none
            at = before
        return tuple(reversed(sizes))

    def _whole(self, state: _State, value: _Value) -> _Value | None:
        """Return what a list costs that ends here, or None where batches are left or hidden."""
        if state.size < self._top == self._cap:
            return None  # the cap is the largest size: it has to be one
        settled = self._settle(state.final, state.open, self._cap + 1)
        if settled is None or any(self._least(q, settled[1]) is not None for q in self._lengths):
            return None
        return value[0] + settled[0], value[1]

    def _steps(self, state: _State, value: _Value) -> Iterator[tuple[_State, _Value]]:
        """Return the states that one more size leads to."""
        graphs, final, points = 0, state.final, state.open
        furthest = state.open[-1][0] if state.open else state.final
        waiting = [n for q in self._lengths if (n := self._least(q, furthest)) is not None]
        reach = max(furthest, self._most[min(waiting)] if waiting else 0)
        # With a larger one a batch that waits would be padded beyond the bound. The top is tried in
        # any case, since every list ends there.
        start, end = bisect_right(self._candidates, state.size), bisect_right(self._candidates, reach)
        for size in (*self._candidates[start:end], *self._candidates[max(start, end, len(self._candidates) - 1) :]):
            if points:
                settled = self._settle(final, points, size)
                # A larger next size makes the same counts final, so it fails as well.
                if settled is None:
                    return
                more, final, points = settled
                graphs += more
            new = self._new[size]
            if points:
                merged = dict(points)
                for tokens, held in new:
                    merged[tokens] = merged.get(tokens, frozenset()) | held
                new = tuple(sorted(merged.items()))
            yield _State(size, final, new), (value[0] + graphs, value[1] + 1)
