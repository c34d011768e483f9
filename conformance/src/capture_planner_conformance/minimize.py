"""Minimize a failing case, and find its causes.

To minimize, something is cut, the case is run again, and the cut is kept if the same check still fails.

Hypothesis's own shrinker does not do, for two reasons. It stops by the clock (five minutes) as well as by
count, so that the same seed gives different cases on machines of different speed; here only plays count. And it
shrinks the sequence of draws: to drop an arrival, all later rows must be renumbered, and to drop an early
forward, its requests must arrive with what it computed. No deletion of draws gives those cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import Any

import attrs

from capture_planner.records._base import replace
from capture_planner_conformance.failure import Check, Failure, Law
from capture_planner_conformance.machine import play as play_case
from capture_planner_conformance.scene import (
    Arrive,
    CaptureAttack,
    Case,
    Depart,
    DraftScheme,
    Move,
    RunBatch,
    Serve,
    Shape,
    Step,
)
from capture_planner_conformance.stage import Subject

PLAYS = 250
"""Most cases that are run: twice what any known bug takes until nothing more can be cut."""

CHUNK = 4
"""Fewer steps than this are dropped one by one."""

Cut = Callable[[Case], Iterator[Case]]
"""Yields smaller cases; their order does not change when one of them is taken."""


def minimize(
    found: Failure,
    case: Case,
    play: Callable[[Case], Failure | None],
    shapes: Sequence[Shape],
    drafts: Sequence[int],
    plays: int = PLAYS,
) -> Iterator[Failure | None]:
    """Yield the result of each play: a smaller failure of the same check, or None if the cut was too much.

    The first play is of the case itself, and the last of the minimized one: if either is None, the case does
    not fail at every run. ``play`` runs a case anew. Shapes and K are replaced by others of ``shapes`` and
    ``drafts`` only. With ``plays`` of 1 nothing is cut.
    """
    wanted = _kind(found)

    def attempt(candidate: Case) -> Failure | None:
        nonlocal wanted
        failure = play(candidate)
        # A failure that names the graph and the batch explains a wrong token.
        is_cause = failure is not None and wanted[0] is Check.TOKENS and failure.entry is not None
        if failure is None or not (_kind(failure) == wanted or is_cause):
            return None
        # If the cause of a wrong token was found, it is what is minimized from here on.
        wanted = _kind(failure)
        return failure

    cuts: tuple[Cut, ...] = (
        # The largest first: what they remove need not be minimized.
        _history,
        _stepwise,
        _settled,
        _steps,
        _rows,
        partial(_shapes, tuple(shapes)),
        partial(_drafts, tuple(drafts)),
        _scenes,
        _arrivals,
        _numbers,
    )
    yield (first := attempt(case))
    if first is None:
        return
    small, before, seen, left = case, None, {case}, plays - 2  # 2: the case as it came, and the smallest one
    while small != before and left > 0:
        before = small
        for cut in cuts:
            candidates, number = cut(small), 0
            while left > 0 and (candidate := next(candidates, None)) is not None:
                number += 1
                if candidate in seen:
                    continue
                seen.add(candidate)
                left -= 1
                yield (failure := attempt(candidate))
                if failure is not None:
                    # Earlier cuts that failed are tried again in the next round.
                    small, number = candidate, number - 1
                    candidates = islice(cut(small), number, None)
    if plays > 1:
        yield attempt(small)


def _kind(failure: Failure) -> tuple[Law, str]:
    """Return what must not change: the check and, for an error, its type."""
    return failure.check, failure.message.partition(": ")[0] if failure.check is Check.RAN else ""


# Steps.


def _history(case: Case) -> Iterator[Case]:
    """Drop what is between the arrivals and the last step: all of it, halves, quarters, and so on."""
    between = [index for index, step in enumerate(case.steps[:-1]) if not isinstance(step, Arrive)]
    length = len(between)
    while length:
        for first in range(0, len(between), length):
            yield _without(case, set(between[first : first + length]))
        # Shorter runs end the loop: `_steps` drops what is left one by one.
        length //= 2 if length > CHUNK else length + 1


def _stepwise(case: Case) -> Iterator[Case]:
    """Replace the last step, if it serves, by single steps: they show which one goes wrong."""
    scene = case.scene
    if not case.steps or not isinstance(served := case.steps[-1], Serve):
        return
    # Requests that arrived before keep their numbers.
    first = sum(isinstance(step, Arrive) for step in case.steps)
    # More requests have no place at the same time.
    asked = served.requests[: scene.num_reqs]
    numbers = range(first, first + len(asked))
    past = [Arrive(prompt=prompt, computed=prompt) for prompt, _, _ in asked]
    fresh = [Arrive(prompt=prompt) for prompt, _, _ in asked]
    decodes = RunBatch(rows=tuple((number, 1 + scene.drafts, 0) for number in numbers))
    singles = [RunBatch(rows=((number, 1 + scene.drafts, 0),)) for number in numbers]
    prompts = [
        RunBatch(rows=((number, min(step.prompt, scene.num_tokens), 0),))
        for number, step in zip(numbers, fresh, strict=True)
    ]
    tries: tuple[tuple[Step, ...], ...] = (
        (*past, decodes),
        (*past, decodes, *singles),
        (*fresh, *prompts, decodes, *singles),
    )
    for steps in tries:
        yield replace(case, steps=(*case.steps[:-1], *steps))


def _settled(case: Case) -> Iterator[Case]:
    """Drop forwards before the last step: their requests arrive with what they would have computed."""
    forwards = [index for index, step in enumerate(case.steps[:-1]) if isinstance(step, RunBatch)]
    # First all at once, then one by one from the last.
    for dropped in (forwards, *([index] for index in reversed(forwards))):
        more: Counter[int] = Counter()
        for index in dropped:
            for request, count, _ in getattr(case.steps[index], "rows", ()):
                more[request] += count
        arrived, steps = 0, list(case.steps)
        for index, step in enumerate(steps):
            if isinstance(step, Arrive):
                steps[index] = replace(step, computed=step.computed + more[arrived])
                arrived += 1
        yield _without(replace(case, steps=tuple(steps)), set(dropped))


def _steps(case: Case) -> Iterator[Case]:
    """Drop one step; with an arrival, every step of its request."""
    # From the end, since later steps depend on earlier ones.
    for index in reversed(range(len(case.steps))):
        yield _without(case, {index})


def _without(case: Case, dropped: set[int]) -> Case:
    arrivals = [index for index, step in enumerate(case.steps) if isinstance(step, Arrive)]
    kept = [number for number, index in enumerate(arrivals) if index not in dropped]
    numbers = {number: new for new, number in enumerate(kept)}
    renamed = (_renamed(step, numbers) for index, step in enumerate(case.steps) if index not in dropped)
    return replace(case, steps=tuple(step for step in renamed if step is not None))


def _renamed(step: Step, numbers: dict[int, int]) -> Step | None:
    """Return a step with its requests' new numbers; None if none of them is left."""
    match step:
        case Arrive():
            return replace(step, shares=None if step.shares is None else numbers.get(step.shares))
        case Depart() | Move():
            number = numbers.get(step.request)
            return None if number is None else replace(step, request=number)
        case RunBatch():
            rows = tuple((numbers[request], count, kept) for request, count, kept in step.rows if request in numbers)
            return replace(step, rows=rows) if rows else None
        case _:
            return step


def _changed(case: Case, index: int, **changes: Any) -> Case:
    """Return the case with other values in one step."""
    return replace(case, steps=(*case.steps[:index], replace(case.steps[index], **changes), *case.steps[index + 1 :]))


def _rows(case: Case) -> Iterator[Case]:
    """Drop one row of a forward, or one served request."""
    for index, step in reversed(tuple(enumerate(case.steps))):
        if isinstance(step, RunBatch | Serve):
            name, _ = _NUMBERS[type(step)]
            rows = getattr(step, name)
            for row in reversed(range(len(rows))) if len(rows) > 1 else ():
                yield _changed(case, index, **{name: (*rows[:row], *rows[row + 1 :])})


_NUMBERS: dict[type[Step], tuple[str, dict[int, int]]] = {
    RunBatch: ("rows", {1: 1, 2: 0}),
    Serve: ("requests", {0: 1, 1: 1, 2: 0}),
}
"""The rows of a step, and the least value in each of their columns."""


def _arrivals(case: Case) -> Iterator[Case]:
    """Replace an arrival by one of a single token, computed or not, with pages of its own."""
    for index, step in enumerate(case.steps):
        if isinstance(step, Arrive):
            yield _changed(case, index, prompt=1, computed=1, shares=None)
            yield _changed(case, index, prompt=1, computed=0, shares=None)
            yield _changed(case, index, shares=None)


def _numbers(case: Case) -> Iterator[Case]:
    """Lower each number of a step. A row of 0 tokens stays: it is no simpler than one of 1."""
    for index, step in enumerate(case.steps):
        if isinstance(step, Arrive):
            for name, least in (("prompt", 1), ("computed", 0)):
                for value in _lower(getattr(step, name), least):
                    yield _changed(case, index, **{name: value})
        elif isinstance(step, RunBatch | Serve):
            if isinstance(step, RunBatch) and step.loras:
                yield _changed(case, index, loras=0)
            if isinstance(step, Serve) and step.stop:
                yield _changed(case, index, stop=0)
            name, columns = _NUMBERS[type(step)]
            rows = getattr(step, name)
            for row, (column, least) in product(range(len(rows)), columns.items()):
                for value in _lower(rows[row][column], least):
                    lower = (*rows[row][:column], value, *rows[row][column + 1 :])
                    yield _changed(case, index, **{name: (*rows[:row], lower, *rows[row + 1 :])})


def _lower(value: int, least: int) -> tuple[int, ...]:
    """Return the least, the middle and the next lower value: always three, so that the order is stable."""
    return (min(value, least), min(value, (value + least) // 2), min(value, max(value - 1, least)))


# The scene. Only ones that ``deployments.scenes`` can draw: a scene that no spec allows fails in other ways.


def _scened(case: Case, **changes: Any) -> Case:
    """Return the case with another scene, whose sizes and schedule are cut to its limits."""
    scene = replace(case.scene, **changes)
    # The limit of a valid spec: a token for each request, and room for the decode of one.
    num_tokens = max(scene.num_tokens, scene.num_reqs, scene.decode_width)
    schedule = tuple(
        (first, min(last, scene.num_reqs), min(k, scene.drafts))
        for first, last, k in scene.schedule
        if first <= scene.num_reqs
    )
    # A schedule of K alone is the same as none.
    if {k for _, _, k in schedule} == {scene.drafts}:
        schedule = ()
    scene = replace(
        scene,
        num_tokens=num_tokens,
        # Law 1: the ceiling is a size itself; decodes above their largest graph run as any batch does.
        size_tokens=_within((*scene.size_tokens, num_tokens), num_tokens) if scene.size_tokens else (),
        size_reqs=_within(scene.size_reqs, scene.num_reqs) if scene.size_tokens else (),
        schedule=schedule,
    )
    return replace(case, scene=scene)


def _within(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return sizes cut to a limit."""
    return tuple(sorted({min(size, most) for size in sizes}))


def _shapes(shapes: tuple[Shape, ...], case: Case) -> Iterator[Case]:
    """Replace the shape by a smaller one: they are in the order of their size."""
    for shape in shapes[: shapes.index(case.scene.shape)] if case.scene.shape in shapes else ():
        yield _scened(case, shape=shape)


def _drafts(drafts: tuple[int, ...], case: Case) -> Iterator[Case]:
    """Drop the schedule or a tier of it, or lower K, with and without shortening rows to a decode's length."""
    scene = case.scene
    yield _scened(case, schedule=())
    for tier in reversed(range(1, len(scene.schedule))):
        # Its requests join the tier before.
        (first, _, k), (_, last, _) = scene.schedule[tier - 1 : tier + 1]
        joined = (*scene.schedule[: tier - 1], (first, last, k), *scene.schedule[tier + 1 :])
        yield _scened(case, schedule=joined)
    for k in sorted(k for k in drafts if k < scene.drafts):
        fewer = _scened(case, drafts=k)
        steps = tuple(_shortened(step, 1 + scene.drafts, 1 + k) for step in case.steps)
        yield replace(fewer, steps=steps)
        yield fewer


def _shortened(step: Step, length: int, new: int) -> Step:
    if not isinstance(step, RunBatch):
        return step
    rows = ((request, new if count == length else count, kept) for request, count, kept in step.rows)
    return replace(step, rows=tuple((request, count, min(kept, max(count - 1, 0))) for request, count, kept in rows))


def _scenes(case: Case) -> Iterator[Case]:
    """Use the sizes of the default policy, lower a number, switch off a flag, or drop a size."""
    scene = case.scene
    yield _scened(case, size_tokens=(), size_reqs=())
    # Chains only differ with a drafter.
    flags = {
        "ahead": False,
        "per_role": False,
        "drafter": DraftScheme.EAGLE,
        "full_cache": False,
        "varying": False,
        "agreeing": False,
        "window": 0,
        "fused": not scene.drafts,
    }
    flags |= {name: feature.values[0] for name, feature in scene.features.items()}
    least = {"num_reqs": 1, "num_tokens": max(scene.num_reqs, scene.decode_width), "layers": 1, "seed": 0}
    if scene.beyond:
        least["beyond"] = 1
    numbers = [(name, value) for name in least for value in _lower(getattr(scene, name), least[name])]
    for name, value in (*numbers, *flags.items()):
        yield _scened(case, **{name: value})
    yield _scened(case, capture=CaptureAttack())
    for name in ("order", "alone", "breaks", "stays_eager"):
        value = getattr(scene.capture, name)
        for lower in (type(value)(), type(value)(max(value - 1, 0))):
            yield _scened(case, capture=replace(scene.capture, **{name: lower}))
    for name in ("size_tokens", "size_reqs"):
        sizes = getattr(scene, name)
        for index in reversed(range(len(sizes) - 1)):  # the last one is the limit
            yield _scened(case, **{name: (*sizes[:index], *sizes[index + 1 :])})


# Causes: the garbage that a finding needs, and the padding.

EXACT = "it passes at exact sizes and fails padded"

NAN = "a weight of 0 times a value of NaN is NaN: mask the values too (docs/extending/backend-contract.md)"


def with_causes(subject: Subject, failure: Failure) -> Failure:
    """Return the failure with its causes: one source of garbage at a time is spared, to see if it is gone.

    If one of them is a field, the failure names it with its axis. A failure that does not come at every run has no
    causes: its absence proves nothing.
    """
    if not failure.case or failure.failed is not None:
        return failure
    case = subject.loads(failure.case)
    try:
        with subject.stage(subject, case.scene) as stage:
            buffers = [buffer for role in stage.runner.roles.values() for buffer in role.fields]
            axes = {buffer.key: buffer.field.axis.value for buffer in buffers}
            sources = stage.watch.sources()
    except Exception:  # A scene that cannot be set up has no garbage.
        return failure
    causes = tuple(source for source in sources if play_case(subject, case, spared=(source,)).failure is None)
    field, axis = failure.field, failure.axis
    if not field:
        field = next((source for source in causes if source in axes), "")
        axis = axes.get(field, axis)
    notes: tuple[str, ...] = (EXACT,) if failure.entry is not None and _passes_exact(subject, case) else ()
    if "NaN" in failure.message:
        notes += (NAN,)
    return attrs.evolve(failure, causes=causes, field=field, axis=axis, notes=(*failure.notes, *notes))


def _passes_exact(subject: Subject, case: Case) -> bool:
    """Say whether a case passes where each of its batches has a graph of exactly its size."""
    batches = [step.rows for step in case.steps if isinstance(step, RunBatch)]
    if not batches or not case.scene.size_tokens:
        return False
    tokens = {sum(count for _, count, _ in rows) for rows in batches}
    reqs = {len(rows) for rows in batches}
    scene = case.scene
    exact = replace(
        scene,
        size_tokens=tuple(sorted({*tokens, scene.num_tokens})),
        size_reqs=tuple(sorted({*reqs, scene.num_reqs})),
        ranks=1,  # sequence parallelism pads every batch
        beyond=0,
    )
    played = play_case(subject, replace(case, scene=exact))
    graphs = sum(count for name, count in played.log.forwards.items() if not name.endswith("NONE"))
    # If it ran eager or padded, or skipped a step, it says nothing about exact sizes.
    return played.failure is None and graphs > 0 and not played.log.padded and not played.skipped
