"""Laws of every timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Event = Mapping[str, Any]


def tracks_of(document: Mapping[str, Any]) -> dict[tuple[int, str], list[Event]]:
    """Return the complete events by rank and name of the track, in order; they begin at 0, and nest in each track."""
    events = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], names[event["pid"], event["tid"]]].append(event)
    assert min(event["ts"] for event in events if "ts" in event) == 0
    for track in tracks.values():
        assert [each["ts"] for each in track] == sorted(each["ts"] for each in track)
        around: list[Event] = []
        for event in track:
            while around and end_of(around[-1]) <= event["ts"] + NANOSECOND:
                around.pop()
            assert event["dur"] >= 0
            assert not around or end_of(event) <= end_of(around[-1]) + NANOSECOND
            around.append(event)
    return dict(tracks)


NANOSECOND = 1e-3
"""In microseconds: times are rounded to it."""


def end_of(event: Event) -> float:
    """Return the end of an event, in microseconds."""
    return float(event["ts"] + event["dur"])


def assert_timeline_of(document: Mapping[str, Any], report: Mapping[str, Any], rank: int = 0) -> None:
    """Check a rank's events against its report: each row once, with its time, and forwards inside their step."""
    tracks = tracks_of(document)
    steps = {event["name"]: event for event in tracks[rank, "steps"]}
    assert list(steps) == [f"step {step['index']}" for step in report["steps"]]
    seconds = sum(step["seconds"] for step in report["steps"])
    assert sum(event["dur"] for event in steps.values()) == pytest.approx(seconds * 1e6)
    assert len(tracks.get((rank, "captures"), ())) == report["captured"]["graphs"]
    roles: Sequence[str] = list(dict.fromkeys(forward["role"] for forward in report["forwards"]))
    for role in roles:
        rows = [forward for forward in report["forwards"] if forward["role"] == role]
        events = [event for event in tracks[rank, role] if event["cat"] != "host"]
        kinds = ["eager" if row["mode"] == "NONE" else "graph" for row in rows]
        assert [event["cat"] for event in events] == kinds
        assert [event["dur"] for event in events] == pytest.approx([row["seconds"] * 1e6 for row in rows], abs=0.01)
        for event, row in zip(events, rows, strict=True):
            assert event["args"]["padded_tokens"] == row["padded_tokens"]
            step = steps[f"step {row['step']}"]
            assert step["ts"] - NANOSECOND <= event["ts"]
            assert end_of(event) <= end_of(step) + NANOSECOND
