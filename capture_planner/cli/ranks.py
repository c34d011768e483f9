"""The command ``ranks``: what data-parallel ranks run together; and batches as JSON lines, as ``explain`` has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import attrs
import click

from capture_planner import codec
from capture_planner.analysis.data_parallel import MAX_RANKS, MIN_RANKS, Submission, Vector, without_agreed_entry
from capture_planner.cli import options
from capture_planner.cli.common import Output, assumed, observation_of, plan_of, read_document, show_notes
from capture_planner.cli.options import FILE
from capture_planner.codec import Document
from capture_planner.codec.reading import unique_keys
from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.errors import InvalidDocument, InvalidValue, Problem
from capture_planner.modes import Role
from capture_planner.records._base import Interval, field, raise_any, record
from capture_planner.records.batch import Batch
from capture_planner.records.observation import Observation, ObservedRole, ObservedVector
from capture_planner.records.text import counted
from capture_planner.report.observation import vectors_json, vectors_report
from capture_planner.report.plain import plain
from capture_planner.report.ranks import cases, cases_json, cases_report, rank_report

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


def read_batches(lines: Iterable[bytes], name: str, roles: Sequence[Role]) -> Iterator[Batch]:
    """Return the batches of a file, in order; empty lines are left out.

    Raises ``InvalidDocument`` with every wrong line of the file, before any batch is answered.
    """
    return _read(lines, name, lambda data: _batch(_line(data, BatchLine, roles)))


def read_vectors(lines: Iterable[bytes], name: str, dispatcher: Dispatcher) -> Iterator[Vector]:
    """Return the vectors of a file, in order: each line is a list with an item for each rank.

    An item is a batch as ``read_batches`` reads it, or null where the rank is idle. With ``captured``
    false the rank uses no graph, and with ``missing`` true it lost the one that all would have replayed;
    an idle one is then an object of that key alone. All batches of a line have one role, and a line has 2 to 16
    ranks, or more if the plan has more. Raises ``InvalidDocument`` with every wrong line of the file.
    """
    return _read(lines, name, lambda data: vector_of(data, dispatcher))


def _read(lines: Iterable[bytes], name: str, read: Callable[[Any], T]) -> Iterator[T]:
    problems: list[Problem] = []
    values = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values.append(read(json.loads(line, object_pairs_hook=unique_keys)))
        except InvalidValue as error:
            problems += [attrs.evolve(problem, file=name, line=number) for problem in error.problems]
        except (ValueError, RecursionError) as error:
            problems.append(Problem(file=name, line=number, message=f"not JSON: {error}"))
    if problems:
        raise InvalidDocument(problems)
    return iter(values)


def _wrong(message: str, *path: str | int) -> InvalidValue:
    return InvalidValue([Problem(path=path, message=message)])


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
            # A submission has its batch in a field, where a line has the fields themselves.
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
    # An idle rank has no batch, and may still state its graphs.
    idle = isinstance(data, dict) and bool(data) and set(data) <= {"captured", "missing"}
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


DEFAULT_RANKS = 4

MOST_SHOWN = 20
"""Recorded vectors that are explained, of those that occurred most often."""


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC|OBSERVATION")
@click.option("--vectors", type=click.File("rb"), help="Answer each vector of a JSON-lines file; - reads stdin.")
@click.option(
    "--recorded",
    type=FILE,
    help="Explain the most frequent vectors of a run (its report as JSON) or of an observation.",
)
@click.option(
    "--ranks",
    "num_ranks",
    type=click.IntRange(min=MIN_RANKS, max=MAX_RANKS),
    help=f"Data-parallel ranks in the table. Default: as in the plan, or {DEFAULT_RANKS}.",
)
@click.option("--role", type=click.Choice([r.value for r in Role]), help="Role shown in the table. Default: target.")
@options.environment
@options.reports()
def ranks(
    plan_file: str,
    vectors: IO[bytes] | None,
    recorded: Path | None,
    num_ranks: int | None,
    role: str | None,
    environment: str | None,
    to: Output,
) -> None:
    """Show what data-parallel ranks run together: all replay the same graph, or all run eager.

    Without --vectors, print a table of the cases that such a deployment meets. Each line of --vectors is
    a list with one item per rank: a batch as in explain --batches, with "captured": false if the rank
    uses no graph, or "missing": true if it lost the graph that all would replay; or null if the rank is
    idle. Each answer is {"role", "mode", "entry", "reason", "joint", "draft_tokens", "ranks"}.

    --recorded explains what the ranks of a run or of an engine brought to their steps: with the plan that
    they ran, or with another one that they could run.

    Of an observation, or a folder of an engine's workers: what the ranks brought to the steps that ran, and which of
    them is why all ran what they ran.
    """
    if recorded is not None and (vectors is not None or num_ranks is not None):
        raise click.UsageError("--recorded has its own vectors and ranks; omit --vectors and --ranks.")
    document = read_document(plan_file)
    if document.is_observation:
        if vectors is not None or num_ranks is not None or recorded is not None:
            raise click.UsageError(
                f"{plan_file} is an observation, and has its own vectors; omit --vectors, --recorded and --ranks."
            )
        observation, one = observation_of(document, environment), None if role is None else Role(role)
        report = partial(vectors_report, observation, one)
        to.show(partial(vectors_json, observation, one), report, observation.notes)
        return
    if vectors is not None and (num_ranks is not None or role is not None):
        raise click.UsageError("--vectors states ranks and roles; omit --ranks and --role.")
    plan = plan_of(document, environment, answers=True)
    dispatcher, data = Dispatcher(plan), plan.parallel.data
    if vectors is not None:
        to.refuse_batches()
        show_notes(assumed())
        others = 0
        for vector in read_vectors(vectors, getattr(vectors, "name", "<stdin>"), dispatcher):
            if data > 1 and len(vector.ranks) != data:
                others += 1
                if others == 1:
                    click.echo(f"note: a line has {len(vector.ranks)} ranks, but the plan has {data}", err=True)
            click.echo(json.dumps(plain(rank_report(dispatcher, vector))))
        return
    shown_role = plan.role(role or Role.TARGET).role
    if recorded is not None:
        found = recorded_vectors(str(recorded), dispatcher, shown_role)
        reports = tuple(rank_report(dispatcher, vector, title) for title, vector in found[:MOST_SHOWN])
        more = len(found) - len(reports)
        show_notes([f"{counted(more, 'other vector')} occurred less often"] if more else [])
    else:
        count = num_ranks or (min(data, MAX_RANKS) if data > 1 else DEFAULT_RANKS)
        reports = cases(dispatcher, shown_role, count)
    to.show(partial(cases_json, reports), partial(cases_report, reports, shown_role), assumed())


def recorded_vectors(file: str, dispatcher: Dispatcher, role: Role) -> list[tuple[str, Vector]]:
    """Return the recorded vectors of a role, the most frequent first, each with how often it occurred.

    Raises ``InvalidDocument`` for a file that is neither a run's report as JSON nor an observation, or that has no
    vectors of the role.
    """
    found = [(steps, title, vector) for steps, title, vector in _vectors(file, dispatcher) if vector.role is role]
    if not found:
        says = f"no vectors of {role.value}: a run of one replica, or an observation without data-parallel ranks"
        raise InvalidDocument([Problem(file=file, message=says)])
    # A stable sort: of vectors as frequent, the order of the file.
    return [(title, vector) for _, title, vector in sorted(found, key=lambda each: -each[0])]


def _vectors(file: str, dispatcher: Dispatcher) -> Iterator[tuple[int, str, Vector]]:
    report = _report(file)
    if report is None:
        observation = Document.read(file).load(Observation)
        for at, observed in enumerate(observation.roles):
            for number, each in enumerate(observed.vectors):
                with _in(file, "roles", at, "vectors", number):
                    batches = (each.batch(observed.role, rank) for rank in range(each.num_ranks))
                    ranks = tuple(Submission(batch=batch) for batch in batches)
                    vector = Vector(role=observed.role, ranks=ranks)
                yield each.steps, _title(observation, observed, each), vector
        return
    for number, row in enumerate(report):
        with _in(file, "ranks", "vectors", number, "ranks"):
            vector = vector_of(row["ranks"], dispatcher)
        yield row["steps"], f"in {counted(row['steps'], 'step')}", vector


@contextmanager
def _in(file: str, *path: str | int) -> Iterator[None]:
    """Raise the problems of a value with the file and the place that it is from."""
    try:
        yield
    except InvalidValue as error:
        raise InvalidDocument(attrs.evolve(each.under(path), file=file) for each in error.problems) from None


def _report(file: str) -> list[dict[str, Any]] | None:
    """Return the vectors of a run's report; None for a file that is no such report."""
    try:
        record = json.loads(Path(file).read_bytes())["ranks"]
    # The reader of observations says what is wrong with it.
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    vectors = record["vectors"] if isinstance(record, dict) else []
    return [each for each in vectors if isinstance(each, dict) and {"steps", "ranks"} <= each.keys()]


def _title(observation: Observation, role: ObservedRole, observed: ObservedVector) -> str:
    """Say how often, and what the observed rank ran."""
    graph = "ran eager" if observed.graph is None else f"replayed {role.graphs[observed.graph].entry}"
    why = f" ({observed.reason.value})" if observed.graph is None and observed.reason is not None else ""
    return f"in {counted(observed.steps, 'step')}, in which rank {observation.rank} of the engine {graph}{why}"
