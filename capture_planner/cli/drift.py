"""Drift: where a plan is not what its spec gives now, for its own machine or for another environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from capture_planner import codec
from capture_planner.analysis.diff import Change, FieldChange, diff
from capture_planner.cli.common import ChosenMachine, machine_named, plan_document, read_document
from capture_planner.codec import Document
from capture_planner.codec import shipped as catalog
from capture_planner.errors import CapturePlannerError
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.plan import Plan
from capture_planner.report.findings import Drift


def specs_of(plans: Sequence[str], specs: Sequence[str]) -> list[Document | None]:
    """Return the spec of each plan: one for all, one for each in order, or from a folder by name.

    Of a folder, ``NAME.MACHINE.yaml`` is the plan of ``NAME.yaml``, as ``plan --output`` is called.
    """
    if not specs:
        return [None] * len(plans)
    if len(specs) == 1 and Path(specs[0]).is_dir():
        return [read_document(_spec_in(Path(specs[0]), plan)) for plan in plans]
    if len(specs) == 1:
        return [read_document(specs[0])] * len(plans)
    if len(specs) != len(plans):
        counts = f"{len(plans)} plans and {len(specs)} specs"
        raise click.UsageError(f"{counts}: give --spec once, once for each plan in their order, or with a folder.")
    return [read_document(spec) for spec in specs]


def _spec_in(folder: Path, plan: str) -> str:
    stem = Path(plan).stem
    names = [name for name in (stem.rpartition(".")[0], stem) if name]
    for name in names:
        file = folder / f"{name}.yaml"
        if file.exists() and not (Path(plan).exists() and file.samefile(plan)):
            return str(file)
    raise CapturePlannerError(f"{plan}: no spec for it in {folder}; it would be called {names[0]}.yaml")


def drift(document: Document, spec: Document, environment: str | None) -> Iterator[Drift]:
    """Compare a plan with what its spec gives now, each difference where a person made it.

    Raises ``InvalidDocument`` for a file that is no plan.

    :param environment: another machine than the plan's own; None: its own.
    """
    # No spec gives fingerprints: they are of a run.
    plan = replace(document.load(Plan), fingerprints=None)
    machine = ChosenMachine(plan.environment) if environment is None else machine_named(environment)
    changes = diff(plan, plan_document(spec, machine))
    places = _Places(document, spec, environment)
    cause: tuple[str, int, int] | None = None
    for change in changes:
        for field in change.fields:
            file, line, column = places.of_field(field)
            cause = cause or (file, line, column)
            yield Drift(file=file, line=line, column=column, message=_says(field, document.name, places.giver(field)))
    for change in (change for change in changes if not change.fields):
        file, line, column = cause or places.of_change(change)
        yield Drift(file=file, line=line, column=column, message=f"{document.name}: {change.message}")
    yield from _reordered(document, plan)


def _says(field: FieldChange, plan: str, giver: str) -> str:
    return f"{'.'.join(field.path)}: {plan} has {field.before}, {giver} gives {field.after}"


class _Places:
    """Where a person changes what a plan follows from."""

    def __init__(self, plan: Document, spec: Document, environment: str | None) -> None:
        shipped = environment is None or environment in catalog.shipped_environments()
        self._machine = None if shipped or environment is None else Document.read(environment)
        self._plan, self._spec, self._environment = plan, spec, environment

    def giver(self, field: FieldChange) -> str:
        """Name what gives the new value."""
        return "the spec" if field.path[0] != "environment" else str(self._environment)

    def of_field(self, field: FieldChange) -> tuple[str, int, int]:
        """Return file, line and column of a field: in the spec, or of the machine in its file, if it has one."""
        document, path = self._spec, field.path
        if field.path[0] == "environment" and self._machine is not None:
            document, path = self._machine, field.path[1:]
        elif field.path[0] == "environment":
            document = self._plan
        return (document.name, *document.node.locate(path))

    def of_change(self, change: Change) -> tuple[str, int, int]:
        """Return the place in the spec that decides what changed, where no field of it did."""
        return (self._spec.name, *self._spec.node.locate((_DECIDES.get(change.subject, "sizes"),)))


_DECIDES = {"backend": "backend", "mode": "mode", "role": "speculative"}


def _reordered(document: Document, plan: Plan) -> Iterator[Drift]:
    """Yield the roles whose graphs are listed in another order than they are captured in; both read as one plan."""
    files = document.node.plain(), codec.to_data(plan)
    for index, role in enumerate(plan.roles):
        listed, written = (
            codec.structure(file["roles"][index].get("entries", []), tuple[Entry, ...]) for file in files
        )
        if listed != written:
            line, column = document.node.locate(("roles", index, "entries"))
            message = f"{role.role}: the sizes are not in the order of capture, the largest first; plan it again"
            yield Drift(file=document.name, line=line, column=column, message=message)
