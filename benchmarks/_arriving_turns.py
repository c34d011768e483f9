"""Plans that take turns of a few steps in one engine: what an equal step takes under each.

A host's speed drifts: the same graphs in the same engine took 0.8 to 1.2 times as long from one load to the next. Turns
of a few steps have the same host, so that their ratio is of the plans alone. A batch under one plan is compared with
equal batches under the others, by kind and tokens.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from capture_planner.records._base import replace
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan

Times = Mapping[str, tuple[int, float]]
"""Steps and their milliseconds, by kind and size of the target's batch."""

STALL = 10
"""Times the median of its kind; such a step is left out, as an observation does."""

GRAPH = 6
"""Where an outcome has its graph; None: it ran without one."""


def own_plan(observed: Observation, like: Plan) -> Plan:
    """Return a plan with the graphs that an engine captured by itself; what is no graph is that of another plan."""
    own = {role.role: role for role in observed.roles}
    roles = (
        replace(
            role,
            mode=own[role.role].mode,
            entries=tuple(graph.entry for graph in own[role.role].graphs),
            lazy=(),
            waivers=(),
        )
        for role in like.roles
        if role.role in own
    )
    return replace(like, roles=tuple(roles))


def merged_plan(plans: Sequence[Plan]) -> Plan:
    """Return the first plan with the graphs of all, each once."""
    roles = []
    for role in plans[0].roles:
        entries = {
            (entry.mode, entry.num_tokens, entry.num_reqs, entry.query_len, entry.active_loras): entry
            for plan in plans
            for entry in plan.role(role.role).entries
        }
        roles.append(replace(role, entries=tuple(entries.values()), lazy=(), waivers=()))
    return replace(plans[0], roles=tuple(roles))


def by_turn(
    steps: Iterable[tuple[float, Any, float]], turns: Sequence[tuple[float, str]]
) -> dict[str, tuple[Times, Times]]:
    """Return the times of each plan's steps: of its even turns, and of its odd ones.

    The first step of a turn starts behind the last one of another plan, and the last one waits while another plan's
    step is launched: both are left out.

    :param steps: when each began, its outcome (``capture_planner.measuring.coarsening``), and its seconds.
    :param turns: when each began, and whose it is; ascending.
    """
    starts = [start for start, _ in turns]
    whole: list[list[tuple[Any, float]]] = [[] for _ in turns]
    for began, outcome, seconds in steps:
        if (turn := bisect_right(starts, began)) > 0:
            whole[turn - 1].append((outcome, seconds * 1e3))
    inner: dict[str, list[list[tuple[Any, float]]]] = {column: [] for _, column in turns}
    for (_, column), each in zip(turns, whole, strict=True):
        inner[column].append(each[1:-1])
    return {column: (_times(every[::2]), _times(every[1::2])) for column, every in inner.items()}


def _times(turns: Iterable[Iterable[tuple[Any, float]]]) -> Times:
    # A step without a graph may take ten times as long as one with: each is held to its own.
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for outcome, milliseconds in (step for turn in turns for step in turn):
        found[kind_of(outcome), outcome[GRAPH] is None].append(milliseconds)
    kept = {key: [each for each in times if each <= STALL * statistics.median(times)] for key, times in found.items()}
    return added({kind: (len(times), sum(times))} for (kind, _), times in sorted(kept.items()))


def kind_of(outcome: Any) -> str:
    """Return the kind and size of a batch: four sizes to the next power of two, each the most tokens that it has."""
    _, _, tokens, query_len, past_prompt, *_ = outcome
    step = 1 << max(0, (tokens - 1).bit_length() - 3)
    return f"{'decode' if query_len is not None and past_prompt else 'mixed'} {-(-tokens // step) * step}"


def added(every: Iterable[Times]) -> Times:
    """Return the sum of times."""
    found: dict[str, tuple[int, float]] = {}
    for times in every:
        for kind, (steps, total) in times.items():
            before = found.get(kind, (0, 0.0))
            found[kind] = before[0] + steps, round(before[1] + total, 3)
    return found


def equal_steps(columns: Mapping[str, Times]) -> dict[str, float] | None:
    """Return the mean milliseconds of a step in each column, at the batches of all; None where none is common.

    A kind counts where every column had it, as often as all had it together. Where a column lacks one, all kinds of its
    doubling count as one.
    """
    kinds = {kind for times in columns.values() for kind in times}
    rare = {doubling(kind) for kind in kinds if not all(kind in times for times in columns.values())}
    columns = {
        column: added({doubling(kind) if doubling(kind) in rare else kind: each} for kind, each in times.items())
        for column, times in columns.items()
    }
    common = set.intersection(*({*times} for times in columns.values()))
    weights = {kind: sum(times[kind][0] for times in columns.values()) for kind in common}
    if not weights:
        return None
    return {
        column: sum(weight * times[kind][1] / times[kind][0] for kind, weight in weights.items())
        / sum(weights.values())
        for column, times in columns.items()
    }


def doubling(kind: str) -> str:
    """Return the kinds that share the next power of two."""
    name, size = kind.split()
    return f"{name} to {1 << (int(size) - 1).bit_length()}"


def compared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what an equal step took under each plan over all rounds, and by how much that may be off.

    ``step_ms``: by column; ``mixed_ms`` and ``decode_ms`` are of one kind alone. None where no batch is common to all.
    ``errors``: standard error of the ratio of two columns, by the jackknife: how it varies without a half of a round.

    :param rows: of one load or several, each with ``turns`` as ``by_turn`` gives them.
    """
    parts = [{column: halves[half] for column, halves in row["turns"].items()} for row in rows for half in (0, 1)]
    found = {f"{kinds or 'step'}_ms": _mean_steps(parts, kinds) for kinds in ("", "mixed", "decode")}
    without = [_mean_steps([*parts[:index], *parts[index + 1 :]]) for index in range(len(parts))]
    return {
        **{name: steps and {column: round(each, 4) for column, each in steps.items()} for name, steps in found.items()},
        "errors": {
            f"{one} / {other}": round(_jackknife([math.log(each[one] / each[other]) for each in without if each]), 4)
            for one, other in itertools.combinations(found["step_ms"] or (), 2)
        },
    }


def error_of(found: Mapping[str, Any], one: str, other: str) -> float:
    """Return the standard error of the ratio of two columns; 0.0 of a column that is the other."""
    errors = found["errors"]
    return float(errors.get(f"{one} / {other}", errors.get(f"{other} / {one}", 0.0)))


def _mean_steps(parts: Sequence[Mapping[str, Times]], kinds: str = "") -> dict[str, float] | None:
    """Return the mean equal step of parts of rounds, of kinds that begin so."""
    columns = {
        column: added(
            {kind: each for kind, each in part.get(column, {}).items() if kind.startswith(kinds)} for part in parts
        )
        for column in dict.fromkeys(column for part in parts for column in part)
    }
    return equal_steps(columns) if columns else None


def _jackknife(values: Sequence[float]) -> float:
    """Return the standard error of a figure, by its values without one part each; infinite with fewer than two."""
    if len(values) < 2:
        return math.inf
    return math.sqrt((len(values) - 1) * statistics.pvariance(values))
