"""Make a failing case small: cut something, do it again, and keep what still breaks the same check.

Bounded by a number of plays and not by time, so that the same seed gives the same case on any machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from capture_planner.conformance.finding import Check, Finding, Violation
from capture_planner.conformance.scene import (
    Arrive,
    Case,
    Depart,
    Forward,
    Move,
    Serve,
    Shape,
    Step,
    loads,
)

PLAYS = 250
"""Most cases that are done: twice what any mutant of the gallery takes until nothing more can be cut."""

Cut = Callable[[Case], Iterator[Case]]
"""Yields a case with less in it, in an order that stays when one of them is taken."""


Row = tuple[int, int, int]


def smaller(
    found: Violation,
    play: Callable[[Case], Violation | None],
    shapes: Sequence[Shape],
    drafts: Sequence[int],
    plays: int = PLAYS,
) -> Iterator[Violation | None]:
    """Yield what came of each play: a smaller violation of the same check, or None for a cut too many.

    The first play is of the case itself, and the last one of what it has become: where either is None, it
    does not fail at every run. ``play`` does a case anew. Shapes and K are only exchanged for others of
    ``shapes`` and ``drafts``. With ``plays`` of 1 nothing is made smaller.
    """
    wanted, case = _kind(found.finding), loads(found.finding.case)

    def attempt(candidate: Case) -> Violation | None:
        nonlocal wanted
        violation = play(candidate)
        if violation is None or not (_kind(violation.finding) == wanted or _is_cause(violation, wanted[0])):
            return None
        wanted = _kind(violation.finding)
        return violation

    yield (first := attempt(case))
    if first is None:
        return
    small, seen, left = case, {case}, plays - 2
    while left > 0:
        before = small
        for cut in _cuts(shapes, drafts):
            reached: int | None = 0
            while reached is not None:
                start, reached = reached, None
                for number, candidate in enumerate(cut(small)):
                    if number < start or candidate in seen or left <= 0:
                        continue
                    seen.add(candidate)
                    left -= 1
                    yield (violation := attempt(candidate))
                    if violation is not None:
                        # What was cut in vain before it is tried again when all cuts begin anew.
                        small, reached = candidate, number
                        break
        if small == before:
            break
    if plays > 1:
        yield attempt(small)


def _kind(finding: Finding) -> tuple[Check, str]:
    """Return what must stay: the check, and of what ended with an error which error it was."""
    return finding.check, finding.says.partition(": ")[0] if finding.check is Check.RAN else ""


def _is_cause(violation: Violation, wanted: Check) -> bool:
    """Say whether it is a check that says where a wrong token comes from: a graph, a batch and a row."""
    return wanted is Check.TOKENS and violation.finding.entry is not None


def _cuts(shapes: Sequence[Shape], drafts: Sequence[int]) -> tuple[Cut, ...]:
    """Return all cuts, the boldest first: what they take away need not be made small."""
    return (
        _history,
        _stepwise,
        _settled,
        _steps,
        _rows,
        partial(_shapes, tuple(shapes)),
        partial(_drafts, tuple(drafts)),
        _sizes,
        _limits,
        _flags,
        _arrivals,
        _numbers,
    )


# Steps.


def _history(case: Case) -> Iterator[Case]:
    """The last step with the arrivals before it, then half of what was between."""
    between = [index for index, step in enumerate(case.steps[:-1]) if not isinstance(step, Arrive)]
    middle = len(between) // 2
    for dropped in (between, between[:middle], between[middle:]):
        yield _without(case, set(dropped))


def _stepwise(case: Case) -> Iterator[Case]:
    """Single steps for what is served last: they show which of them goes wrong."""
    scene = case.scene
    if not case.steps or not isinstance(served := case.steps[-1], Serve):
        return
    # Whatever is there already stays so: these are named after it.
    first = sum(isinstance(step, Arrive) for step in case.steps)
    asked = served.requests[: scene.num_reqs]
    numbers = range(first, first + len(asked))
    past = [Arrive(prompt=prompt, computed=prompt) for prompt, _, _ in asked]
    fresh = [Arrive(prompt=prompt) for prompt, _, _ in asked]
    decodes = Forward(rows=tuple((number, 1 + scene.drafts, 0) for number in numbers))
    singles = [Forward(rows=((number, 1 + scene.drafts, 0),)) for number in numbers]
    prompts = [
        Forward(rows=((number, min(step.prompt, scene.num_tokens), 0),))
        for number, step in zip(numbers, fresh, strict=True)
    ]
    tries: tuple[tuple[Step, ...], ...] = (
        (*past, decodes),
        (*past, decodes, *singles),
        (*fresh, *prompts, decodes, *singles),
    )
    for steps in tries:
        yield attrs.evolve(case, steps=(*case.steps[:-1], *steps))


def _settled(case: Case) -> Iterator[Case]:
    """Without forwards before the last step: their requests arrive with what these would have computed."""
    forwards = [index for index, step in enumerate(case.steps[:-1]) if isinstance(step, Forward)]
    for dropped in (forwards, *([index] for index in reversed(forwards))):
        more: Counter[int] = Counter()
        for index in dropped:
            for who, count, _ in getattr(case.steps[index], "rows", ()):
                more[who] += count
        arrived, steps = 0, list(case.steps)
        for index, step in enumerate(steps):
            if isinstance(step, Arrive):
                steps[index] = attrs.evolve(step, computed=step.computed + more[arrived])
                arrived += 1
        yield _without(attrs.evolve(case, steps=tuple(steps)), set(dropped))


def _steps(case: Case) -> Iterator[Case]:
    """Without one step. With an arrival goes all that its request does."""
    for index in reversed(range(len(case.steps))):
        yield _without(case, {index})


def _without(case: Case, dropped: set[int]) -> Case:
    arrivals = [index for index, step in enumerate(case.steps) if isinstance(step, Arrive)]
    kept = [number for number, index in enumerate(arrivals) if index not in dropped]
    numbers = {number: new for new, number in enumerate(kept)}
    renamed = (_renamed(step, numbers) for index, step in enumerate(case.steps) if index not in dropped)
    return attrs.evolve(case, steps=tuple(step for step in renamed if step is not None))


def _renamed(step: Step, numbers: dict[int, int]) -> Step | None:
    """Return a step with its requests' new numbers; None where none of them is there any more."""
    match step:
        case Arrive():
            return attrs.evolve(step, shares=None if step.shares is None else numbers.get(step.shares))
        case Depart() | Move():
            number = numbers.get(step.request)
            return None if number is None else attrs.evolve(step, request=number)
        case Forward():
            rows = tuple((numbers[who], count, kept) for who, count, kept in step.rows if who in numbers)
            return Forward(rows=rows) if rows else None
        case _:
            return step


def _exchanged(case: Case, index: int, step: Step) -> Case:
    return attrs.evolve(case, steps=(*case.steps[:index], step, *case.steps[index + 1 :]))


def _rows(case: Case) -> Iterator[Case]:
    """Without one row of a step, or one request of those that are served."""
    for index, step in reversed(tuple(enumerate(case.steps))):
        match step:
            case Forward():
                for rows in _fewer(step.rows):
                    yield _exchanged(case, index, Forward(rows=rows))
            case Serve():
                for rows in _fewer(step.requests):
                    yield _exchanged(case, index, Serve(requests=rows))


def _fewer(rows: tuple[Row, ...]) -> Iterator[tuple[Row, ...]]:
    for row in reversed(range(len(rows))) if len(rows) > 1 else ():
        yield (*rows[:row], *rows[row + 1 :])


def _arrivals(case: Case) -> Iterator[Case]:
    """A request of one token, computed or not, with pages of its own."""
    for index, step in enumerate(case.steps):
        if isinstance(step, Arrive):
            yield _exchanged(case, index, Arrive(prompt=1, computed=1))
            yield _exchanged(case, index, Arrive(prompt=1))
            yield _exchanged(case, index, attrs.evolve(step, shares=None))


def _numbers(case: Case) -> Iterator[Case]:
    """Each number of a step lower. A row without a token stays one: it is no simpler than one with a token."""
    for index, step in enumerate(case.steps):
        match step:
            case Arrive():
                for name, least in (("prompt", 1), ("computed", 0)):
                    for value in _lower(getattr(step, name), least):
                        yield _exchanged(case, index, attrs.evolve(step, **{name: value}))
            case Forward():
                for rows in _lower_rows(step.rows, (None, 1, 0)):
                    yield _exchanged(case, index, Forward(rows=rows))
            case Serve():
                for rows in _lower_rows(step.requests, (1, 1, 0)):
                    yield _exchanged(case, index, Serve(requests=rows))


def _lower_rows(rows: tuple[Row, ...], least: tuple[int | None, ...]) -> Iterator[tuple[Row, ...]]:
    for row, numbers in enumerate(rows):
        for column, bottom in enumerate(least):
            for value in () if bottom is None else _lower(numbers[column], bottom):
                first, second, third = (
                    value if index == column else number for index, number in enumerate(numbers)
                )
                yield (*rows[:row], (first, second, third), *rows[row + 1 :])


def _lower(value: int, least: int) -> tuple[int, ...]:
    """Return the least, the middle and the next: always as many, so that the order stays."""
    return (min(value, least), min(value, (value + least) // 2), min(value, max(value - 1, least)))


# The scene. Only ones that ``machine.scenes`` could draw: what no spec may have breaks in other ways.


def _scened(case: Case, **changes: Any) -> Case:
    """Return the case in another scene, whose sizes and schedule are cut to what its limits are then."""
    scene = attrs.evolve(case.scene, **changes)
    num_tokens = max(scene.num_tokens, scene.num_reqs, 1 + scene.drafts)
    schedule = tuple(
        (first, min(last, scene.num_reqs), min(k, scene.drafts))
        for first, last, k in scene.schedule
        if first <= scene.num_reqs
    )
    if {k for _, _, k in schedule} == {scene.drafts}:
        schedule = ()
    scene = attrs.evolve(
        scene,
        num_tokens=num_tokens,
        size_tokens=_within(scene.size_tokens, num_tokens),
        size_reqs=_within(scene.size_reqs, scene.num_reqs) if scene.size_tokens else (),
        schedule=schedule,
    )
    return attrs.evolve(case, scene=scene)


def _within(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return sizes cut to a limit, and with it; none stay none."""
    return tuple(sorted({min(size, most) for size in sizes} | {most})) if sizes else ()


def _shapes(shapes: tuple[Shape, ...], case: Case) -> Iterator[Case]:
    """One of the shapes before it: they stand in the order of their size."""
    for shape in shapes[: shapes.index(case.scene.shape)] if case.scene.shape in shapes else ():
        yield _scened(case, shape=shape)


def _drafts(drafts: tuple[int, ...], case: Case) -> Iterator[Case]:
    """Another schedule, or a smaller K: with rows that are as long as a decode is then, or as they were."""
    scene = case.scene
    yield _scened(case, schedule=())
    for tier in reversed(range(1, len(scene.schedule))):
        # What was its is the tier's before it.
        (first, _, k), (_, last, _) = scene.schedule[tier - 1 : tier + 1]
        joined = (*scene.schedule[: tier - 1], (first, last, k), *scene.schedule[tier + 1 :])
        yield _scened(case, schedule=joined)
    for k in sorted(k for k in drafts if k < scene.drafts):
        fewer = _scened(case, drafts=k)
        steps = tuple(_shortened(step, 1 + scene.drafts, 1 + k) for step in case.steps)
        yield attrs.evolve(fewer, steps=steps)
        yield fewer


def _shortened(step: Step, length: int, new: int) -> Step:
    if not isinstance(step, Forward):
        return step
    rows = ((who, new if count == length else count, kept) for who, count, kept in step.rows)
    return Forward(rows=tuple((who, count, min(kept, max(count - 1, 0))) for who, count, kept in rows))


def _sizes(case: Case) -> Iterator[Case]:
    """The sizes of the default policy, or fewer of one's own."""
    scene = case.scene
    yield _scened(case, size_tokens=(), size_reqs=())
    for name in ("size_tokens", "size_reqs"):
        sizes = getattr(scene, name)
        for index in reversed(range(len(sizes) - 1)):
            fewer: dict[str, Any] = {name: (*sizes[:index], *sizes[index + 1 :])}
            yield _scened(case, **fewer)


def _limits(case: Case) -> Iterator[Case]:
    """Each number of the scene lower."""
    scene = case.scene
    for name, least in (
        ("num_reqs", 1),
        ("num_tokens", max(scene.num_reqs, 1 + scene.drafts)),
        ("layers", 1),
        ("seed", 0),
    ):
        for value in _lower(getattr(scene, name), least):
            lower: dict[str, Any] = {name: value}
            yield _scened(case, **lower)


def _flags(case: Case) -> Iterator[Case]:
    """What is switched on, off. Without a drafter the kind of its chains is as it is left out."""
    yield _scened(case, ahead=False)
    yield _scened(case, per_role=False)
    yield _scened(case, eagle3=False)
    yield _scened(case, fused=not case.scene.drafts)
