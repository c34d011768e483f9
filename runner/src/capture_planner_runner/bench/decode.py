"""A decode step of the runner, against its graphs alone and against the same step without graphs.

Steps are timed in windows, because the runner may run ahead of its tokens when one step returns: a
window begins in the middle of serving and holds whole periods. Windows of bare replays alternate with
them, so that both see the same lengths and the same state of the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import attrs

from capture_planner.records.text import counted
from capture_planner_runner.bench.record import Decode, GraphReplays
from capture_planner_runner.bench.rig import Absence, Decoding, Rig, trimmed
from capture_planner_runner.plan_variants import without_graphs
from capture_planner_runner.runner import Runner

WARM = 3
"""Steps before each window, after which the runner is as far ahead as before the pause."""


def decode(rig: Rig, advance: Callable[[str], None]) -> tuple[Decode, ...]:
    """Measure at each number of requests whose step is served by graphs alone."""
    count = rig.effort.windows
    results: dict[int, Decode] = {}
    with rig.runner(trimmed(rig.plan, rig.sizes)) as runner:
        runner.capture()
        for size in rig.sizes:
            with rig.trying("decode"):
                results[size] = row(rig, runner, size, count, graphs=True)
                advance(counted(size, "request"))
    with rig.runner(without_graphs(rig.plan)) as runner:
        for size, result in results.items():
            with rig.trying("decode"):
                # An eager step takes several times as long, and fewer windows tell as much.
                eager = row(rig, runner, size, max(2, count // 2), graphs=False)
                results[size] = attrs.evolve(result, eager=eager.step)
                advance(f"{counted(size, 'request')}, eager")
    return tuple(results.values())


def row(rig: Rig, runner: Runner, size: int, count: int, *, graphs: bool) -> Decode:
    """Measure up to ``count`` windows, with one of bare replays after each if there are graphs.

    Raises ``Absence`` if not even one window fits.
    """
    effort = rig.effort
    steps: list[float] = []
    replays: list[float] = []
    with rig.decoding(runner, size, effort.windows * (effort.steps + WARM)) as decoding:
        replayed = decoding.replayed() if graphs else ()
        for _ in range(count):
            seconds = window(rig, decoding)
            if seconds is None:
                break
            steps.append(seconds)
            if graphs:
                replays.append(bare_replay(rig, runner, replayed))
        host = decoding.host_seconds(len(steps) * effort.steps)
    if not steps:
        raise Absence(
            f"a window of {counted(effort.steps, 'step')} is longer than a decode of {counted(size, 'request')}: the "
            f"model is at most {rig.plan.model.max_model_len} tokens long; try --quick, whose windows are shorter"
        )
    return Decode(
        num_reqs=size,
        graphs=replayed,
        windows=len(steps),
        steps=effort.steps,
        step=statistics.median(steps),
        bare=statistics.median(replays) if graphs else 0.0,
        eager=None,
        host=host,
    )


def window(rig: Rig, decoding: Decoding) -> float | None:
    """Return the seconds of a step, from a window of them; None if a request ended in it."""
    if not decoding.step(WARM):
        return None
    complete: list[bool] = []
    seconds = rig.clock.time(lambda: complete.append(decoding.step(rig.effort.steps)))
    return seconds / rig.effort.steps if complete[0] else None


def bare_replay(rig: Rig, runner: Runner, graphs: tuple[GraphReplays, ...]) -> float:
    """Return the seconds of one replay of all ``graphs``, on the staged values."""
    sequence = [runner.roles[each.role].graphs[each.entry] for each in graphs for _ in range(each.times)]

    def replays() -> None:
        for graph in sequence:
            graph.replay()

    return rig.repeated(runner, replays)
