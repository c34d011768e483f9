"""A lower bound on the mean step of a table of so many graphs, which may be chosen by the steps that judge it.

Tables have FULL graphs for all decodes, PIECEWISE graphs for mixed batches, and the target's sizes for the draft
prefill, as vLLM's have. Each kind of graphs is a dynamic program over its sizes; all numbers of graphs for each kind
are tried. Where the host may hide the drafter's passes of a step, they cost nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch

if TYPE_CHECKING:
    from traces_held_out import Judge

Floats = NDArray[np.float64]


@attrs.frozen
class Passes:
    """Passes of one size, and what the rest of their steps takes in milliseconds."""

    tokens: int
    count: float
    others: float = 0.0
    """Least time of the step's other passes."""
    floor: float = 0.0
    """Least time of all passes of the step."""
    overhead: float = 0.0
    """Host overhead of the step."""
    eager: float = math.inf
    """Time of the step, or of a drafter's pass alone, if the pass runs eager; infinite for decodes."""


def least_mean(judge: Judge, steps: Mapping[Batch, int], graphs: int) -> float:
    """Return the milliseconds that a mean step takes at least under any table of so many graphs."""
    kinds: dict[tuple[bool, GraphMode, int | None], dict[Role, list[Passes]]] = defaultdict(lambda: defaultdict(list))
    fixed, profile, eager = 0.0, judge.profile, (GraphMode.NONE, None)
    for batch, count in steps.items():
        (role, each, _, tokens, _), *drafts = judge.passes(batch)
        own = _mode(each), each
        ways = (own, eager) if each is None else (own,)
        least = [_least(judge, other, length, size) for other, length, _, size, _ in drafts]
        others = sum(time * repeats for time, (*_, repeats) in zip(least, drafts, strict=True))
        row = Passes(tokens, count, others, profile.floor(*own), profile.overhead(*own))
        if each is None:
            alone = max(judge.time(role, *eager, tokens) + others, profile.floor(*eager)) + profile.overhead(*eager)
            row = attrs.evolve(row, eager=alone)
        kinds[False, *own][role].append(row)
        fixed += count * (profile.step(batch.num_reqs, 0.0) - profile.base_overhead)
        # Above the floor, however the target runs, each millisecond of the drafter counts.
        if all(judge.time(role, *way, tokens) + others >= profile.floor(*way) for way in ways):
            fixed -= count * others
            for other, length, _, size, repeats in drafts:
                alone = math.inf if length is not None else judge.time(other, *eager, size)
                passes = Passes(size, count * repeats, eager=alone)
                kinds[other is Role.DRAFT_DECODE, _mode(length), length][other].append(passes)
    total: Floats = np.zeros(graphs + 1)
    for (_, mode, each), roles in kinds.items():
        least_by = _by_graphs(judge, mode, each, roles, graphs)
        total = np.array([np.min(total[: k + 1] + least_by[k::-1]) for k in range(graphs + 1)])
    return float(fixed + total[graphs]) / sum(steps.values())


def _mode(query_len: int | None) -> GraphMode:
    """Return how passes run that have a graph."""
    return GraphMode.PIECEWISE if query_len is None else GraphMode.FULL


def _least(judge: Judge, role: Role, query_len: int | None, tokens: int) -> float:
    """Return the milliseconds of a drafter's pass on a graph of its own size, or eager if that may be less."""
    modes = (_mode(query_len), *((GraphMode.NONE,) if query_len is None else ()))
    return min(judge.time(role, mode, query_len, tokens) for mode in modes)


def _by_graphs(
    judge: Judge, mode: GraphMode, query_len: int | None, roles: Mapping[Role, Sequence[Passes]], graphs: int
) -> Floats:
    """Return what the passes of one kind take at least in all, by the number of graphs; a size is a graph per role."""
    sizes = sorted({row.tokens for rows in roles.values() for row in rows})
    served, eager = np.zeros((len(sizes), len(sizes))), np.zeros(len(sizes))
    for role, rows in roles.items():
        times = np.array([judge.time(role, mode, query_len, size) for size in sizes])
        # Else a larger size, or one that no count has, could cost less.
        assert (np.diff(times) >= 0).all(), f"times of {role} {mode} fall with the size"
        table = np.array([attrs.astuple(row) for row in rows])
        places, (count, others, floor, overhead, alone) = np.searchsorted(sizes, table[:, 0]), table[:, 1:].T
        steps = np.maximum(times + others[:, None], floor[:, None]) + overhead[:, None]
        np.add.at(served, places, count[:, None] * np.minimum(steps, alone[:, None]))
        np.add.at(eager, places, count * alone)
    # ``upto[i, j]``: the passes of the first i sizes on a graph of size j.
    upto = np.vstack([np.zeros(len(sizes)), np.cumsum(served, axis=0)])
    first = np.diagonal(upto[1:]).copy()
    after = np.triu(first - upto[1:], 1) + np.where(np.tri(len(sizes), dtype=bool), math.inf, 0.0)
    above = np.append(np.cumsum(eager[::-1])[::-1], 0.0)
    best, row = [float(above[0])] * len(roles), first
    while len(best) <= graphs:
        best += [min(best[-1], float(np.min(row + above[1:])))] * len(roles)
        row = np.min(row[:, None] + after, axis=0)
    return np.array(best[: graphs + 1])
