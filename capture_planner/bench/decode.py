"""A decode step of the runner against its graphs alone, and against the same step without graphs.

Steps are timed by windows, since the runner may be ahead of its tokens when one step returns: a window
begins in the middle of serving and holds whole periods. Windows of bare replays stand between them, so
that both see the same lengths and the same state of the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import attrs
import torch

from capture_planner.bench.record import Decode, Replayed
from capture_planner.bench.rig import Absence, Decoding, Kept, Rig, trimmed
from capture_planner.records.text import counted
from capture_planner.runtime.plan_variants import without_graphs
from capture_planner.runtime.runner import Runner

WARM = 3
"""Steps before each window: what was ahead before a pause is ahead again."""


@attrs.frozen
class _Measured:
    graphs: tuple[Replayed, ...]
    steps: list[float]
    bare: list[float]
    host: float


def decode(rig: Rig, advance: Callable[[str], None]) -> tuple[Decode, ...]:
    """Measure at each number of requests; those where a step is not served by graphs alone are left out."""
    effort = rig.effort
    served: dict[int, _Measured] = {}
    eager: dict[int, float] = {}
    with rig.runner(trimmed(rig.plan, rig.sizes)) as runner:
        runner.capture()
        for size in rig.sizes:
            with rig.trying("decode"):
                served[size] = _graphs(rig, runner, size, advance)
    with rig.runner(without_graphs(rig.plan)) as runner:
        for size in served:
            with rig.trying("decode"):
                eager[size] = _eager(rig, runner, size, advance)
    return tuple(
        Decode(
            num_reqs=size,
            graphs=found.graphs,
            windows=len(found.steps),
            steps=effort.steps,
            step=statistics.median(found.steps),
            bare=statistics.median(found.bare),
            eager=eager.get(size),
            host=found.host,
        )
        for size, found in served.items()
    )


def window(rig: Rig, decoding: Decoding) -> float | None:
    """Return the seconds of a step from a window of them; None where a request ended in it."""
    if not decoding.step(WARM):
        return None
    alike: list[bool] = []
    seconds = rig.clock.time(lambda: alike.append(decoding.step(rig.effort.steps)))
    return seconds / rig.effort.steps if alike[0] else None


def bare(rig: Rig, runner: Runner, graphs: tuple[Replayed, ...]) -> float:
    """Return the seconds of one replay of all ``graphs``, from many in a row on what is staged.

    Graphs move their fields on; what they change is put back, so that serving can go on.
    """
    kept = Kept(runner)
    sequence = [
        runner.parts.roles[each.role].graphs[each.entry] for each in graphs for _ in range(each.times)
    ]

    def replays() -> None:
        for _ in range(rig.effort.steps):
            for graph in sequence:
                graph.replay()

    with torch.no_grad():
        seconds = rig.clock.time(replays)
        kept.restore()
    return seconds / rig.effort.steps


def _graphs(rig: Rig, runner: Runner, size: int, advance: Callable[[str], None]) -> _Measured:
    effort = rig.effort
    decoding = rig.decoding(runner, size, effort.windows * (effort.steps + WARM))
    try:
        graphs = decoding.replayed()
        steps: list[float] = []
        replays: list[float] = []
        for _ in range(effort.windows):
            seconds = window(rig, decoding)
            if seconds is None:
                break
            steps.append(seconds)
            replays.append(bare(rig, runner, graphs))
        host = decoding.host_seconds(len(steps) * effort.steps)
    finally:
        decoding.end()
    if not steps:
        raise Absence(_too_short(rig, size))
    advance(counted(size, "request"))
    return _Measured(graphs, steps, replays, host)


def _eager(rig: Rig, runner: Runner, size: int, advance: Callable[[str], None]) -> float:
    effort = rig.effort
    decoding = rig.decoding(runner, size, effort.windows * (effort.steps + WARM))
    found = []
    try:
        # An eager step takes several times as long: fewer windows tell as much.
        for _ in range(max(2, effort.windows // 2)):
            seconds = window(rig, decoding)
            if seconds is None:
                break
            found.append(seconds)
    finally:
        decoding.end()
    if not found:
        raise Absence(_too_short(rig, size))
    advance(f"{counted(size, 'request')}, eager")
    return statistics.median(found)


def _too_short(rig: Rig, size: int) -> str:
    return (
        f"a window of {counted(rig.effort.steps, 'step')} is longer than a decode of {counted(size, 'request')}: the "
        f"model is at most {rig.plan.model.max_model_len} tokens long; try --quick, whose windows are shorter"
    )
