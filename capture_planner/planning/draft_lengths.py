"""Draft lengths: K by batch size and capture sizes, in one decision that gives the most accepted tokens per second.

The weights are work, not steps and not time. Requests need the same tokens whatever K is, and the traffic says at
which batch sizes those tokens were made. With another K a batch of n requests takes another number of steps for them,
so the number of steps at n is no given: it goes with one over the tokens of a step. Nor is the time at n, which goes
with one over the rate; it is given only where callers wait for nothing, so that a faster engine writes more text. Given
the tokens of each n, W(n), the throughput is

    sum of W(n) / sum of W(n) / rate(n, K(n)),

and its numerator is a constant. So the ratio is largest where the time is least: a sum over batch sizes, which a
dynamic programme minimises exactly. (With steps as weights both halves would depend on K, and Dinkelbach's method would
repeat the same programme; it would also favour a K for the tokens that its extra steps make of nothing.)

What this leaves out: where requests finish sooner, fewer run at once, so the weights themselves move towards smaller
batches. The schedule is best for the batch sizes of the traffic.

A size of a range is a graph of each role that has graphs: target and draft prefill run on the same padded batch
(vLLM 0.33: the draft prefill takes over the target's), and the draft decodes on the same number of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import attrs

from capture_planner.records.model import MAX_TIERS

NOISE = 0.02
"""A range is worth a change of K if the neighbour's K takes longer there by more than this."""


@attrs.frozen(kw_only=True)
class DraftLength:
    """One K: the tokens and the time of its steps, by batch size. ``[n - 1]`` is about n requests."""

    k: int
    tokens: float
    """Tokens that a request gets of a step: 1 and the accepted drafts."""
    padded: tuple[float, ...]
    """Milliseconds of the passes that have graphs, at a size of n requests: non-decreasing."""
    exact: tuple[float, ...]
    """Milliseconds of all else, for n requests without padding."""
    graphs: int
    """Graphs of each size."""

    @property
    def most(self) -> int:
        """The largest batch that the limits admit with this K."""
        return len(self.padded)


@attrs.frozen(order=True)
class Span:
    """Batches of ``first`` to ``last`` requests, padded to ``last``, which draft ``k`` tokens."""

    first: int
    last: int
    k: int


@attrs.frozen
class DraftProblem:
    """The K and the sizes to choose from, and what batch sizes count for."""

    lengths: tuple[DraftLength, ...]
    """By K; one of them at least admits every batch size."""
    weights: tuple[float, ...]
    """Tokens that a request gets while n run, over all of the traffic: ``[n - 1]``."""
    graphs: int | None = None
    """Most graphs; None: every batch size may be a size. At least those of one size of any K."""
    _sums: tuple[float, ...] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_sums", (0.0, *accumulate(self.weights)))

    @property
    def most(self) -> int:
        """The largest batch."""
        return len(self.weights)

    def cost(self, span: Span) -> float:
        """Return the milliseconds that the work of a span takes; infinite where the limits do not admit it."""
        length = next(each for each in self.lengths if each.k == span.k)
        if span.last > length.most:
            return float("inf")
        padded = (self._sums[span.last] - self._sums[span.first - 1]) * length.padded[span.last - 1]
        counts = range(span.first - 1, span.last)
        return (padded + sum(self.weights[n] * length.exact[n] for n in counts)) / length.tokens

    def work(self, first: int, last: int) -> float:
        """Return the tokens that batches of ``first`` to ``last`` requests get."""
        return sum(n * self.weights[n - 1] for n in range(first, last + 1))

    def total(self, spans: Sequence[Span]) -> float:
        """Return the milliseconds of all work."""
        return sum(map(self.cost, spans))

    def num_graphs(self, spans: Sequence[Span]) -> int:
        """Return how many graphs the sizes of the spans need."""
        graphs = {length.k: length.graphs for length in self.lengths}
        return sum(graphs[span.k] for span in spans)

    def fixed(self) -> tuple[Span, ...] | None:
        """Return the spans of the K that is best for all batch sizes together; None where none admits them all."""
        whole = (length for length in self.lengths if length.most == self.most)
        choices = [optimum(attrs.evolve(self, lengths=(length,))) for length in whole]
        return min(choices, key=self.total, default=None)


def schedule(problem: DraftProblem) -> tuple[Span, ...]:
    """Return the spans of the schedule to run: the optimum without ranges that are within noise.

    Where the best fixed K is as good, it is that.
    """
    spans, fixed = _settled(problem, optimum(problem)), problem.fixed()
    return fixed if fixed is not None and problem.total(fixed) <= problem.total(spans) else spans


def optimum(problem: DraftProblem) -> tuple[Span, ...]:
    """Return the spans whose work takes least, within the graphs allowed; of equal ones those of the smaller K.

    Among spans that end in j with the same K, the time is linear in the weight before the span: a lower envelope of
    lines, whose best one only moves on as j grows, since larger sizes take no less time.
    """
    needed = max(length.graphs for length in problem.lengths) * problem.most
    if problem.graphs is None or problem.graphs >= needed:
        single = ([Span(n, n, length.k) for length in problem.lengths] for n in range(1, problem.most + 1))
        return tuple(min(spans, key=lambda span: (problem.cost(span), span.k)) for spans in single)
    layers: list[list[float]] = []
    steps: list[list[tuple[int, DraftLength] | None]] = []
    for allowed in range(problem.graphs + 1):
        times, taken = _layer(problem, layers, allowed)
        layers.append(times)
        steps.append(taken)
    return tuple(reversed([*_walk(steps, problem.graphs, problem.most)]))


def _layer(
    problem: DraftProblem, layers: Sequence[list[float]], allowed: int
) -> tuple[list[float], list[tuple[int, DraftLength] | None]]:
    """Return the least time of batches up to each size with ``allowed`` graphs, and the span that ends there.

    :param layers: the same times with fewer graphs.
    """
    times = [0.0] + [float("inf")] * problem.most
    taken: list[tuple[int, DraftLength] | None] = [None] * (problem.most + 1)
    envelopes = [
        (length, _Envelope(problem, length), times if length.graphs == 0 else layers[allowed - length.graphs])
        for length in problem.lengths
        if length.graphs <= allowed
    ]
    for last in range(1, problem.most + 1):
        for length, envelope, before in envelopes:
            if last > length.most:
                continue
            envelope.add(last - 1, before[last - 1])
            time, start = envelope.least(last)
            if time < times[last]:
                times[last], taken[last] = time, (start, length)
    return times, taken


def _walk(steps: Sequence[Sequence[tuple[int, DraftLength] | None]], graphs: int, last: int) -> Iterator[Span]:
    """Yield the spans of the least time, last one first."""
    while last:
        step = steps[graphs][last]
        assert step is not None, "one size of some K covers every batch"
        start, length = step
        yield Span(start + 1, last, length.k)
        graphs, last = graphs - length.graphs, start


class _Envelope:
    """The least of lines over sizes that only grow: where a span of one K starts best, by where it ends."""

    def __init__(self, problem: DraftProblem, length: DraftLength) -> None:
        self._length, self._sums = length, (0.0, *accumulate(problem.weights))
        products = (weight * time for weight, time in zip(problem.weights, length.exact, strict=False))
        self._exact = (0.0, *accumulate(products))
        self._lines: list[tuple[float, float, int]] = []
        self._at = 0

    def add(self, start: int, before: float) -> None:
        """Add the spans that start after ``start``, behind batches that take ``before``."""
        if before == float("inf"):
            return
        lines, line = self._lines, (-self._sums[start], before * self._length.tokens - self._exact[start], start)
        while len(lines) >= 2 and _is_hidden(lines[-2], lines[-1], line):
            lines.pop()
        lines.append(line)

    def least(self, last: int) -> tuple[float, int]:
        """Return the least time of batches up to ``last`` with a span of this K at the end, and where that starts."""
        lines, size = self._lines, self._length.padded[last - 1]
        if not lines:
            return float("inf"), 0
        self._at = min(self._at, len(lines) - 1)

        def value(line: tuple[float, float, int]) -> float:
            return line[0] * size + line[1]

        while self._at + 1 < len(lines) and value(lines[self._at + 1]) < value(lines[self._at]):
            self._at += 1
        time = value(lines[self._at]) + self._sums[last] * size + self._exact[last]
        return time / self._length.tokens, lines[self._at][2]


def _is_hidden(
    one: tuple[float, float, int], middle: tuple[float, float, int], other: tuple[float, float, int]
) -> bool:
    """Whether the middle one of three lines, steeper downwards in turn, is nowhere the least."""
    return (other[1] - one[1]) * (one[0] - middle[0]) <= (middle[1] - one[1]) * (one[0] - other[0])


@attrs.frozen
class _DraftRun:
    """Neighbouring spans of one K, and what their work takes in the optimum."""

    spans: tuple[Span, ...]
    least: float

    @property
    def k(self) -> int:
        return self.spans[0].k

    def with_k(self, k: int) -> tuple[Span, ...]:
        return tuple(attrs.evolve(span, k=k) for span in self.spans)


def _settled(problem: DraftProblem, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return the spans with fewer changes of K: none of them gains less than ``NOISE`` over a neighbour's K.

    Gains are those over the optimum, so no range ever takes longer than that by more than ``NOISE``.
    """
    runs = [
        _DraftRun(each := tuple(alike), problem.total(each)) for _, alike in groupby(spans, key=lambda span: span.k)
    ]
    graphs = {length.k: length.graphs for length in problem.lengths}
    while len(runs) > 1:
        used = problem.num_graphs([span for run in runs for span in run.spans])
        spare = float("inf") if problem.graphs is None else problem.graphs - used
        changes = [
            (problem.total(run.with_k(k)) / run.least - 1, index, k)
            for index, run in enumerate(runs)
            for k in sorted({runs[near].k for near in (index - 1, index + 1) if 0 <= near < len(runs)})
            if (graphs[k] - graphs[run.k]) * len(run.spans) <= spare
        ]
        loss, index, k = min(changes, default=(float("inf"), 0, 0))
        if loss > NOISE and (len(runs) <= MAX_TIERS or loss == float("inf")):
            break
        runs[index] = attrs.evolve(runs[index], spans=runs[index].with_k(k))
        joined = [list(alike) for _, alike in groupby(runs, key=lambda run: run.k)]
        runs = [_DraftRun(sum((r.spans for r in alike), ()), sum(r.least for r in alike)) for alike in joined]
    return tuple(span for run in runs for span in run.spans)


def ranges(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the ranges of a schedule: neighbouring spans of one K as one."""
    joined = [list(alike) for _, alike in groupby(spans, key=lambda span: span.k)]
    return tuple(Span(alike[0].first, alike[-1].last, alike[0].k) for alike in joined)
