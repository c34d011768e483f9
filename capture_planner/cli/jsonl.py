"""Batches as JSON lines: the questions of ``explain --batches`` and ``ranks --vectors``, and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import attrs

from capture_planner import codec
from capture_planner.analysis.data_parallel import MAX_RANKS, MIN_RANKS, Submission, Vector, without_agreed_entry
from capture_planner.codec.reading import unique_keys
from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.errors import InvalidDocument, InvalidValue, Problem
from capture_planner.modes import Role
from capture_planner.records._base import Interval, field, raise_any, record
from capture_planner.records.batch import Batch

T = TypeVar("T")
Line = TypeVar("Line", bound="BatchLine")
Extent = Annotated[int, Interval(0)]


@record
class BatchLine:
    """A batch as a line has it: the fields of a ``Batch``."""

    role: Role = field("role that runs the batch")
    num_reqs: Extent = field("requests")
    num_tokens: Extent = field("tokens")
    query_len: Extent | None = field("tokens of every request; null where they differ", default=None)
    max_query_len: Extent | None = field("tokens of the longest request, where decodes differ", default=None)
    past_prompt: bool = field("whether every request is past its prompt", default=True)
    active_loras: Extent = field("distinct active adapters", default=0)


@record
class RankLine(BatchLine):
    """The batch of one rank, and the state of its graphs."""

    captured: bool = field("false where the rank uses no graph", default=True)
    missing: bool = field("true where it lost the graph that all would replay", default=False)


_STATES = {"captured", "missing"}


def read_batches(lines: Iterable[bytes], name: str, roles: Sequence[Role]) -> Iterator[Batch]:
    """Return the batches of a file, in order; empty lines are left out.

    Raises ``InvalidDocument`` with every wrong line of the file, before any batch is answered.
    """
    return _read(lines, name, lambda line: _batch(_line(_parsed(line), BatchLine, roles)))


def read_vectors(lines: Iterable[bytes], name: str, dispatcher: Dispatcher) -> Iterator[Vector]:
    """Return the vectors of a file, in order: each line is a list with an item for each rank.

    An item is a batch as ``read_batches`` reads it, or null where the rank is idle. With ``captured``
    false the rank uses no graph, and with ``missing`` true it lost the one that all would have replayed;
    an idle one is then an object of that key alone. All batches of a line have one role, and a line has 2 to 16
    ranks, or more if the plan has more. Raises ``InvalidDocument`` with every wrong line of the file.
    """
    return _read(lines, name, lambda line: vector_of(_parsed(line), dispatcher))


def _read(lines: Iterable[bytes], name: str, read: Callable[[bytes], T]) -> Iterator[T]:
    problems: list[Problem] = []
    values = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values.append(read(line))
        except InvalidValue as error:
            problems += [attrs.evolve(problem, file=name, line=number) for problem in error.problems]
    if problems:
        raise InvalidDocument(problems)
    return iter(values)


def _wrong(message: str, *path: str | int) -> InvalidValue:
    return InvalidValue([Problem(path=path, message=message)])


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"not JSON: {error}") from None


def vector_of(data: Any, dispatcher: Dispatcher) -> Vector:
    """Return the vector of one line that is parsed. Raises ``InvalidValue`` with all that is wrong in it."""
    roles = dispatcher.plan.planned
    if not isinstance(data, list) or not data:
        raise _wrong("expected a list with a batch, or null, for each rank")
    problems: list[Problem] = []
    ranks, missing = [], set()
    for rank, item in enumerate(data):
        try:
            submitted, is_missing = _submission(item, roles)
            ranks.append(submitted)
            missing |= {rank} if is_missing else set()
        except InvalidValue as error:
            problems += [problem.under((rank,), skip=problem.path[:1] == ("batch",)) for problem in error.problems]
    raise_any(problems)
    present = [submitted.batch.role for submitted in ranks if submitted.batch is not None]
    for rank, submitted in enumerate(ranks):
        if submitted.batch is not None and submitted.batch.role is not present[0]:
            expected = f"expected {present[0]} as in the batches before it, got {submitted.batch.role}"
            raise _wrong(f"{expected}; each role has a vector of its own", rank, "role")
    most = max(MAX_RANKS, dispatcher.plan.parallel.data)
    if not MIN_RANKS <= len(ranks) <= most:
        raise _wrong(f"expected {MIN_RANKS} to {most} ranks, got {len(ranks)}")
    vector = Vector(role=present[0] if present else roles[0], ranks=tuple(ranks))
    return without_agreed_entry(dispatcher, vector, missing) if missing else vector


def _submission(data: Any, roles: Sequence[Role]) -> tuple[Submission, bool]:
    """Return what a rank submits, and whether it lost the graph of all."""
    if data is None:
        return Submission(), False
    idle = isinstance(data, dict) and bool(data) and set(data) <= _STATES
    line = _line(data | {"role": roles[0], "num_reqs": 0, "num_tokens": 0} if idle else data, RankLine, roles)
    if line.missing and not line.captured:
        raise _wrong('a rank with "captured": false has no graph to miss; give one of the two', "missing")
    return Submission(batch=None if idle else _batch(line), captured=line.captured), line.missing


def _line(data: Any, kind: type[Line], roles: Sequence[Role]) -> Line:
    line = codec.structure(data, kind)
    if line.role not in roles:
        roles_of_plan = ", ".join(role.value for role in roles)
        raise _wrong(f"expected one of {roles_of_plan}, got {line.role.value!r}", "role")
    return line


def _batch(line: BatchLine) -> Batch:
    return Batch(**{name: getattr(line, name) for name in attrs.fields_dict(Batch)})


def answer_line(batch: Batch, answer: Dispatch) -> dict[str, Any]:
    """Return the answer to one batch as data; where it runs eager, its own extents and the reason."""
    shape = answer.entry or batch
    names = ("num_tokens", "num_reqs", "query_len", "max_query_len", "active_loras")
    sizes = {name: getattr(shape, name) for name in names}
    return {"mode": answer.mode.value, **sizes, "reason": answer.reason}
