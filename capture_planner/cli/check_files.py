"""What ``check`` finds in plans, specs and observations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import attrs
import click

from capture_planner import codec
from capture_planner.analysis.diff import diff as diff_plans
from capture_planner.analysis.lint import lint
from capture_planner.cli.common import (
    ChosenMachine,
    machine_named,
    observation_of,
    plan_document,
    plan_of,
    read_document,
)
from capture_planner.codec import Document, structure
from capture_planner.codec import shipped as catalog
from capture_planner.engines.check import check_observation
from capture_planner.engines.observed_diff import observed_diff
from capture_planner.errors import CapturePlannerError
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.report.findings import Drift, FileFinding
from capture_planner.report.plans import budget_line


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
    # NAME.MACHINE.yaml first, as plans are usually called.
    names = [name for name in (stem.rpartition(".")[0], stem) if name]
    for name in names:
        file = folder / f"{name}.yaml"
        # In one folder with its spec, a plan NAME.yaml would be its own spec.
        if file.exists() and not (Path(plan).exists() and file.samefile(plan)):
            return str(file)
    raise CapturePlannerError(f"{plan}: no spec for it in {folder}; it would be called {names[0]}.yaml")


def drift(document: Document, spec: Document, environment: str | None) -> Iterator[Drift]:
    """Compare a plan with what its spec gives now; raises ``InvalidDocument`` for a file that is no plan.

    :param environment: another machine than the plan's own; None: its own.
    """
    # No spec gives fingerprints, which are of a run, or a promise, which is of an observed engine.
    plan = replace(document.load(Plan), fingerprints=None, promise=None)
    machine = ChosenMachine(plan.environment) if environment is None else machine_named(environment)
    planned = plan_document(spec, machine)
    changes = diff_plans(plan, planned)
    # Other sizes by the same decisions: the spec did not change.
    roles = enumerate(zip(plan.roles, planned.roles, strict=False))
    edited = {old.role: index for index, (old, new) in roles if old.decisions == new.decisions}
    # A machine that ships has no file of its own: the plan says which it is.
    ships = environment is None or environment in catalog.shipped_environments()
    describing = document if ships else Document.read(str(environment))

    def at(source: Document, path: Sequence[str | int], message: str) -> Drift:
        line, column = source.node.locate(path)
        return Drift(file=source.name, line=line, column=column, message=message)

    first: Drift | None = None
    for change in changes:
        for each in change.fields:
            of_machine, path = each.path[0] == "environment", each.path
            giver, source = (environment, describing) if of_machine else ("the spec", spec)
            says = f"{'.'.join(path)}: {document.name} has {each.before}, {giver} gives {each.after}"
            found = at(source, path[1:] if of_machine and not ships else path, says)
            first = first or found
            yield found
    # These follow from a field that was changed, where there is one: they are at its place.
    for change in (change for change in changes if not change.fields):
        if first is None and change.role in edited and change.subject in ("added", "gone", "batches"):
            says = f"{change.message}; the spec decides as it did: the plan was edited, or another release made it"
            yield at(document, ("roles", edited[change.role], "entries"), says)
            continue
        says = f"{document.name}: {change.message}"
        deciding = (_DECIDES.get(change.subject, "sizes"),)
        yield at(spec, deciding, says) if first is None else attrs.evolve(first, message=says)
    # Graphs that are listed in another order than they are captured in read as the same plan.
    files = document.node.plain(), codec.to_data(plan)
    for index, role in enumerate(plan.roles):
        listed, written = (structure(file["roles"][index].get("entries", []), tuple[Entry, ...]) for file in files)
        if listed != written:
            says = f"{role.role}: the sizes are not in the order of capture, the largest first; plan it again"
            yield at(document, ("roles", index, "entries"), says)


_DECIDES = {"backend": "backend", "mode": "mode", "role": "speculative"}
"""The key of a spec that decides what changed, where no field of it did."""


@attrs.frozen
class FileFindings:
    """What is found in files, each with its place."""

    placed: tuple[FileFinding, ...]
    drifts: tuple[Drift, ...]
    """Differences from the specs, and from the observation."""
    budgets: tuple[str, ...]
    """What the budget of each plan left out, where it did."""


def check_files(
    files: Sequence[str],
    specs: Sequence[str],
    observation: str | None,
    environment: str | None,
    ignored: Collection[str],
) -> FileFindings:
    """Lint plans, specs and observations, and compare each plan with its spec, and with an observation.

    Raises ``InvalidDocument`` for a file that is none, and ``click.UsageError`` where files and specs do not match.
    """
    sources = specs_of(files, specs)
    observed = None if observation is None else read_document(observation)
    placed: list[FileFinding] = []
    drifts: list[Drift] = []
    budgets: list[str] = []
    for file, source in zip(files, sources, strict=True):
        document = read_document(file)
        # With a spec or an observation to compare with, it is read as a plan, and refused as one.
        if document.is_observation and source is None and observed is None:
            seen = _observed_findings(document, observation_of(document, environment))
            placed += (each for each in seen if each.finding.rule.code not in ignored)
            continue
        plan = plan_of(document, environment if source is None else None, answers=True)
        placed += _checked(document, plan, ignored)
        budgets += [f"{document.name}: {line}" for line in [budget_line(plan)] if line is not None]
        if source is not None:
            drifts += drift(document, source, environment)
        if observed is not None:
            changes = observed_diff(plan, observed.load(Observation)).changes
            drifts += (Drift(file=file, message=f"{observed.name}: {change.message}") for change in changes)
    return FileFindings(tuple(placed), tuple(drifts), tuple(budgets))


def _checked(document: Document, plan: Plan, ignore: Collection[str]) -> Iterator[FileFinding]:
    for finding in lint(plan, ignore):
        path = finding.diagnostic.path
        if not document.is_plan:  # where a spec has to change
            path = finding.rule.spec_path or tuple(part for part in path[:1] if part != "roles")
        line, column = document.node.locate(path)
        yield FileFinding(finding=finding, file=document.name, line=line, column=column)


def _observed_findings(document: Document, observation: Observation) -> Iterator[FileFinding]:
    """Yield the findings about an observation, each at its role in the file."""
    roles = [role.role for role in observation.roles]
    for finding in check_observation(observation):
        role = finding.diagnosis.role
        line, column = document.node.locate(("roles", roles.index(role)) if role in roles else ())
        yield FileFinding(finding=finding, file=document.name, line=line, column=column)
