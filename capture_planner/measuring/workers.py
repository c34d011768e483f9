"""The observations of all workers of one engine, read as one: what the engine as a whole captured and ran.

Tensor-parallel workers take the same steps, so those of one count; data-parallel ranks take their own, which add up.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import attrs

from capture_planner import codec
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.records._base import grouped, replace
from capture_planner.records.observation import BatchCount, Observation, ObservedRole
from capture_planner.records.text import counted

T = TypeVar("T")

_PLACE = re.compile(r"(?P<place>.*rank\d+)\.\d+(\.\d+)?\.ya?ml")
"""The names of files that engines write for a worker: what comes before its process."""

_HEAD = re.compile(r'^started: \W?([\d:T.-]+).*?^model: "?([^"\n]*)', re.MULTILINE | re.DOTALL)

_SHAPE = attrgetter("num_reqs", "num_tokens", "query_len", "past_prompt", "active_loras", "graph", "reason")

_COMMON = ("engine", "engine_version", "model", "plan", "limits", "speculative", "lora", "parallel", "world_size")
"""What the workers of an engine have in common."""


def read_workers(folder: str | Path) -> Observation:
    """Return the newest observations of a folder's workers as one.

    Raises ``InvalidDocument`` without any, or where they differ in what workers have in common.
    """
    newest: dict[str, Path] = {}
    # Files of earlier processes of a worker stay in the folder; the latest replaces them.
    heads = sorted(map(_head, Path(folder).glob("*.y*ml")))
    for *_, path in heads:
        # Files of other names count as one worker, so that copies are not added up.
        newest[match["place"] if (match := _PLACE.fullmatch(path.name)) else ""] = path
    of_models = {model: path for *_, model, path in heads if model}
    if len(of_models) > 1:
        *others, (_, name) = of_models.items()
        raise InvalidDocument(_differs(path, f"model is {model}", name) for model, path in others)
    documents = map(codec.Document.read, newest.values())
    named = [(each.name, each.load(Observation)) for each in documents if each.is_observation]
    if not named:
        message = "cannot be read: it is a folder, and has no observation"
        remedy = "name the folder that an engine observed into, or a file"
        raise InvalidDocument([Problem(file=str(folder), message=message, remedy=remedy)])
    return as_one(named)


def _head(path: Path) -> tuple[bool, str, int, str, Path]:
    """Return what tells the latest file without parsing any: whether it is damaged, its start, change, and model."""
    text = ""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(4096)
    started, model = head.groups() if (head := _HEAD.search(text)) else ("", "")
    # Without a start, what a worker wrote is damaged: taken for the latest, it is an error.
    is_damaged = head is None and _PLACE.fullmatch(path.name) is not None
    return is_damaged, started, path.stat().st_mtime_ns, model, path


def _differs(file: str | Path, text: str, name: str | Path) -> Problem:
    return Problem(file=str(file), message=f"{text}, compared with {name}", remedy="read each file by itself")


def as_one(named: Sequence[tuple[str, Observation]]) -> Observation:
    """Return the observations of the workers of one engine as one; each has its file's name.

    Times are the slowest worker's, memory is the tightest one's. Raises ``InvalidDocument`` where they differ in what
    all workers have in common: the engine, its settings, or the graphs of a role.
    """
    # The lowest rank comes first, and gives what all have in common.
    named = sorted(named, key=lambda each: (each[1].replica, each[1].rank))
    if len(named) == 1:
        return named[0][1]
    (name, first), *others = named
    problems = [_differs(file, text, name) for file, other in others for text in _differences(first, other)]
    places = Counter((each.replica, each.rank) for _, each in named)
    problems += [
        Problem(file=file, message=f"another file is of rank {each.rank}, too", remedy="name one file of each worker")
        for file, each in named
        if places[each.replica, each.rank] > 1
    ]
    if problems:
        raise InvalidDocument(problems)
    seen = [each for _, each in named]
    teams = [*grouped(seen, speaker).values()]
    speaking = [team[0] for team in teams]
    return replace(
        first,
        started=min(each.started for each in seen),
        seconds=round(sum(each.seconds for each in speaking), 3),
        kv_blocks=_of(seen, "kv_blocks", min),
        capture_seconds=_of(seen, "capture_seconds", max),
        graph_mib=_of(seen, "graph_mib", max),
        roles=tuple(
            _role([[each.roles[place] for each in team] for team in teams]) for place in range(len(first.roles))
        ),
        decisions=tuple(dict.fromkeys(decision for each in seen for decision in each.decisions)),
        # Of the workers of a data-parallel rank, one has the tokens.
        **drafts_of([max(team, key=lambda each: sum(each.drafted)) for team in teams]),
        idle_steps=sum(each.idle_steps for each in speaking),
        notes=tuple(dict.fromkeys(_notes(seen))),
    )


def speaker(seen: Observation) -> tuple[int, int]:
    """Return the replica and the data-parallel rank of a worker: those of one take the same steps."""
    # A file may state more data-parallel ranks than workers, which leaves none for each.
    return seen.replica, seen.rank // max(seen.world_size // seen.parallel.data, 1)


def _differences(first: Observation, other: Observation) -> Iterator[str]:
    for name in _COMMON:
        ours, theirs = getattr(first, name), getattr(other, name)
        if ours != theirs:
            yield f"{name} is {theirs if isinstance(theirs, str | int) else 'another'}"
    roles, own = ({role.role: [graph.entry for graph in role.graphs] for role in each.roles} for each in (first, other))
    if list(roles) != list(own):
        yield f"rank {other.rank} has other roles"
        return
    for role, entries in roles.items():
        if own[role] != entries:
            had = f"{counted(len(own[role]), 'graph')} of {role.value}, not the {len(entries)} of rank {first.rank}"
            yield f"rank {other.rank} captured {had} in this order"


def _notes(seen: Sequence[Observation]) -> Iterator[str]:
    for each in seen:
        yield from each.notes
    for own in grouped(seen, attrgetter("replica")).values():
        missing = sorted(set(range(own[0].world_size)) - {each.rank for each in own})
        if missing:
            ranks = ", ".join(map(str, missing))
            yield f"of {counted(own[0].world_size, 'worker')}, there is no observation of rank {ranks}"


def _of(items: Sequence[Any], name: str, choose: Callable[..., T]) -> T | None:
    return choose((value for each in items if (value := getattr(each, name)) is not None), default=None)


def drafts_of(parts: Sequence[Any]) -> dict[str, Any]:
    """Return ``drafted`` and ``accepted`` of all parts together, by position."""
    names = ("drafted", "accepted")
    return {name: tuple(map(sum, zip_longest(*map(attrgetter(name), parts), fillvalue=0))) for name in names}


def _role(teams: Sequence[Sequence[ObservedRole]]) -> ObservedRole:
    """:param teams: the role of each worker, by those that take the same steps."""
    every, speaking = [role for team in teams for role in team], [team[0] for team in teams]
    graphs = tuple(
        attrs.evolve(
            _slowest(graphs),
            replays=sum(role.graphs[place].replays for role in speaking),
            **{name: _of(graphs, name, max) for name in ("seconds", "mib")},
        )
        for place, graphs in enumerate(zip(*(role.graphs for role in every), strict=True))
    )
    trials = grouped((graph for role in every for graph in role.trials), attrgetter("entry"))
    eager = grouped((cost for role in every for cost in role.eager), attrgetter("num_reqs", "num_tokens", "query_len"))
    batches = grouped((count for team in teams for count in _team(team)), _SHAPE)
    # A vector is counted by each rank that had work: the largest count comes last, and is kept.
    by_steps = sorted((each for role in speaking for each in role.vectors), key=attrgetter("steps"))
    vectors = {replace(each, steps=0): each for each in by_steps}
    return replace(
        every[0],
        graphs=graphs,
        trials=tuple(map(_slowest, trials.values())),
        eager=tuple(map(_slowest, eager.values())),
        batches=tuple(map(_batch, batches.values())),
        rounded_batches=sum(role.rounded_batches for role in speaking),
        other_batches=sum(role.other_batches for role in speaking),
        vectors=tuple(vectors.values()),
        other_vectors=max(role.other_vectors for role in speaking),
        stalls=sum(role.stalls for role in speaking),
    )


def _slowest(items: Sequence[T]) -> T:
    """Return what took longest; the first of those that are equal."""
    return max(items, key=lambda each: [getattr(each, name, None) or 0.0 for name in ("interval", "milliseconds")])


def _team(team: Sequence[ObservedRole]) -> Iterator[BatchCount]:
    """Yield the steps of one of the workers that take the same ones, each with the times of the slowest."""
    alike = grouped((count for role in team for count in role.batches), _SHAPE)
    for count in team[0].batches:
        yield attrs.evolve(_slowest(alike[_SHAPE(count)]), steps=count.steps)


def _batch(counts: Sequence[BatchCount]) -> BatchCount:
    return attrs.evolve(
        counts[0],
        steps=sum(count.steps for count in counts),
        samples=sum(count.samples for count in counts),
        milliseconds=_mean(counts, "milliseconds", "samples"),
        interval=_mean(counts, "interval", "intervals"),
        intervals=sum(count.intervals for count in counts),
        interval_error=_error(counts),
    )


def _mean(counts: Sequence[BatchCount], *names: str) -> float | None:
    """Return the mean of figures, by how many steps each is of; both by name."""
    # A figure of an unknown number of steps counts once.
    timed = [(value, steps or 1) for value, steps in map(attrgetter(*names), counts) if value is not None]
    weight = sum(samples for _, samples in timed)
    return round(sum(value * samples for value, samples in timed) / weight, 5) if timed else None


def _error(counts: Sequence[BatchCount]) -> float | None:
    """Return the standard error of the mean interval of all, from those of each."""
    known = [(count.intervals, count.interval_error) for count in counts if count.interval_error is not None]
    weight = sum(steps for steps, _ in known)
    return round(math.hypot(*(steps * error for steps, error in known)) / weight, 5) if weight else None
