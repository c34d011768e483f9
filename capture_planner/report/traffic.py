"""Reports of traffic: which batches ran, how often, and what its sources do not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from capture_planner.codec.plain import plain_some
from capture_planner.modes import Role
from capture_planner.records._base import grouped
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner.report.writing import Grid, Report, Section, warned

MAX_ROWS = 12
"""Shapes that a table lists, the most frequent first; ``--format json`` has all."""

_KINDS = {True: "decode", False: "with prompts", None: "not known"}


def traffic_json(traffic: Traffic, unreadable: Sequence[str] = (), notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON of traffic: null is what the sources do not say.

    ``batches`` has each role, num_reqs, num_tokens and query_len once; a file has more detail. ``unreadable``: some of
    the lines that were skipped; ``notes``: what to add to its own.
    """
    counts: Counter[tuple[Role, int | None, int | None, int | None]] = Counter()
    for batch in traffic.batches:
        counts[batch.role, batch.num_reqs, batch.num_tokens, batch.query_len] += batch.count
    names = ("role", "num_reqs", "num_tokens", "query_len")
    return {
        **plain_some(traffic, "steps", "lines", "seconds", "skipped"),
        "batches": [dict(zip(names, shape, strict=True)) | {"count": count} for shape, count in counts.items()],
        "sources": traffic.sources,
        "notes": (*traffic.notes, *notes),
        "unreadable": tuple(unreadable),
    }


def traffic_report(traffic: Traffic) -> Report:
    """Return the report: a summary by role, the most frequent shapes of each, and notes."""
    roles = grouped(traffic.batches, lambda batch: batch.role)
    # An answer that rests on an assumption says so in its first line.
    assumed = next((note for note in traffic.notes if note.startswith("assumed ")), None)
    title = counted(traffic.steps, "step") if assumed is None else f"{counted(traffic.steps, 'step')} ({assumed})"
    rows = [_summary(role, batches) for role, batches in roles.items()]
    columns = ("role", "steps", "shapes", "decodes", "with prompts", "not known", "most requests", "most tokens")
    first = Section(
        name="traffic", title=title, parts=(Grid.facts(_facts(traffic)), "", Grid.of(columns, rows, text=1))
    )
    shapes = (
        Section(name=role.value, title=f"{role.value}: most frequent shapes", parts=(_shapes(batches),))
        for role, batches in roles.items()
    )
    notes = Section(name="notes", title="", parts=warned(*(f"note: {note}" for note in traffic.notes)))
    return Report(kind="traffic file", title=title, sections=(first, *shapes, notes))


def _facts(traffic: Traffic) -> Iterator[tuple[str, str]]:
    for source in traffic.sources:
        yield "source", source
    if traffic.lines is not None:
        yield "lines", f"{traffic.lines:,}: what the target's steps rest on"
    yield "time", "not known" if traffic.seconds is None else f"{traffic.seconds:,.1f} s"
    if traffic.skipped:
        yield "skipped", f"{counted(traffic.skipped, 'line')} that could not be read"
    if sum(traffic.drafted):
        shares = zip(traffic.drafted, traffic.accepted, strict=True)
        yield "accepted", ", ".join(f"{taken / count:.1%}" if count else "-" for count, taken in shares)


def _summary(role: Role, batches: Sequence[TrafficCount]) -> tuple[str, ...]:
    steps = sum(batch.count for batch in batches)
    # None is counted too: not every source tells decodes from prompts.
    kinds: Counter[bool | None] = Counter()
    for batch in batches:
        kinds[batch.past_prompt] += batch.count
    largest = (max(getattr(batch, name) or 0 for batch in batches) for name in ("num_reqs", "num_tokens"))
    shares = (f"{kinds[kind] / steps:.1%}" for kind in _KINDS)
    return role.value, f"{steps:,}", f"{len(batches):,}", *shares, *(str(most) if most else "-" for most in largest)


def _shapes(batches: Sequence[TrafficCount]) -> Grid:
    steps = sum(batch.count for batch in batches)
    frequent = sorted(batches, key=lambda batch: -batch.count)[:MAX_ROWS]
    rows = [
        (
            _KINDS[batch.past_prompt],
            *("-" if each is None else str(each) for each in (batch.num_reqs, batch.query_len, batch.num_tokens)),
            f"{batch.count:,}",
            f"{batch.count / steps:.1%}",
        )
        for batch in frequent
    ]
    # The last row makes the shares add up to all steps.
    if len(batches) > len(rows):
        others = steps - sum(batch.count for batch in frequent)
        others_text = f"{len(batches) - len(rows):,} others"
        rows.append((others_text, "", "", "", f"{others:,}", f"{others / steps:.1%}"))
    columns = ("batch", "requests", "tokens each", "tokens", "steps", "share")
    return Grid.of(columns, rows, text=1)
