"""The timeline of a run: captures, steps and forwards as Chrome trace events, for Perfetto and ``chrome://tracing``.

The format is that of the Trace Event Format document of Chromium: complete events (``X``) with ``ts`` and ``dur`` in
microseconds, counters (``C``) and names of processes and threads (``M``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from capture_planner.codec.plain import plain_some
from capture_planner.modes import Role
from capture_planner_runner.ledger.rows import Forward
from capture_planner_runner.ledger.session import RunReport
from capture_planner_runner.ranks.peers import Place

Events = Sequence[dict[str, Any]]
"""Trace events, as JSON values."""

CAPTURES, STEPS = "captures", "steps"
"""Names of tracks; the others are of roles."""


def events_of(report: RunReport, place: Place) -> list[dict[str, Any]]:
    """Return the events of one rank, whose ``pid`` it is, on the clock of its host.

    A track each for captures, steps and the forwards of each role, so that events of one track never overlap: a step
    that is launched ahead begins before the one before it has ended. Of a long run, those of the sampled steps.
    """
    tracks = [CAPTURES, STEPS, *(role.role.value for role in report.plan.roles)]
    names = [
        {"name": name, "ph": "M", "pid": place.rank, "tid": tid, "args": args}
        for name, tid, args in (
            ("process_name", 0, {"name": f"rank {place.rank}" if place.size > 1 else "run"}),
            ("process_labels", 0, {"labels": place.host}),
            *(("thread_name", tid, {"name": track}) for tid, track in enumerate(tracks)),
            *(("thread_sort_index", tid, {"sort_index": tid}) for tid, _ in enumerate(tracks)),
        )
    ]
    found = [*_captures(report), *_steps(report), *(each for row in report.forwards for each in _forward(row))]
    return names + [
        # `track` is our own key; the format has the number of a thread.
        {name: value for name, value in each.items() if name != "track"}
        | {"pid": place.rank, "tid": tracks.index(each["track"])}
        for each in found
    ]


def timeline(ranks: Sequence[Events]) -> dict[str, Any]:
    """Return the document of all ranks. It begins at 0 on each host, since clocks of hosts differ."""
    hosts = [
        next((each["args"]["labels"] for each in events if each["name"] == "process_labels"), "") for events in ranks
    ]
    begun: dict[str, float] = {}
    for host, events in zip(hosts, ranks, strict=True):
        moments = [each["ts"] for each in events if "ts" in each]
        begun[host] = min([*moments, begun[host]] if host in begun else moments, default=0.0)
    shown = [
        each | {"ts": round(each["ts"] - begun[host], 3)} if "ts" in each else each
        for host, events in zip(hosts, ranks, strict=True)
        for each in events
    ]
    return {"traceEvents": shown, "displayTimeUnit": "ms"}


def _captures(report: RunReport) -> Iterator[dict[str, Any]]:
    for graph in report.captured:
        # A graph that was refused without a try took no time.
        if graph.tried:
            dropped = None if graph.waiver is None else graph.waiver.message
            args = {"bytes": graph.memory, "on_first_use": graph.step is not None, "dropped": dropped}
            yield _complete(CAPTURES, f"{graph.role.value} {graph.entry}", "capture", graph.ended, graph.seconds, args)


def _steps(report: RunReport) -> Iterator[dict[str, Any]]:
    for step in report.steps:
        args = plain_some(step, "num_reqs", "num_tokens", "prompts", "drafted", "accepted", "waiting")
        yield _complete(STEPS, f"step {step.index}", "step", step.ended, step.seconds, args)


def _forward(forward: Forward) -> Iterator[dict[str, Any]]:
    track, graph = forward.role.value, forward.entry
    name = f"eager: {forward.reason.value}" if forward.reason is not None else str(graph)
    args = plain_some(
        forward, "step", "num_reqs", "num_tokens", "padded_tokens", "padded_reqs", "active_loras", "repeats"
    )
    yield _complete(track, name, "eager" if graph is None else "graph", forward.ended, forward.seconds, args)
    begun = forward.ended - forward.seconds
    # Of several forwards the host's part is known as a sum alone.
    if forward.repeats == 1:
        yield _complete(track, "host", "host", begun + forward.host_seconds, forward.host_seconds, {})
    if forward.role is Role.TARGET:
        counts = {"real": forward.num_tokens, "padding": forward.padded_tokens}
        yield {"track": track, "name": "tokens of the target", "ph": "C", "ts": _micros(begun), "args": counts}


def _complete(
    track: str, name: str, category: str, ended: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    start, end = _micros(ended - seconds), _micros(ended)
    return {
        "track": track,
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "args": args,
    }


def _micros(seconds: float) -> float:
    """Return microseconds, to the nanosecond, so that what touches does not overlap."""
    return round(seconds * 1e6, 3)
