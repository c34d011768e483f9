"""Observations in the commands about files: an observation goes wherever a plan goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import IO

import click

from capture_planner.analysis.explain import explanation
from capture_planner.cli.common import emit
from capture_planner.cli.jsonl import answer_line, read_batches
from capture_planner.codec import Document, plain
from capture_planner.engines.observed import coverage_of, emulation_of
from capture_planner.engines.observed_check import check_observation, share
from capture_planner.errors import DispatchError
from capture_planner.records.batch import Batch
from capture_planner.records.observation import Observation
from capture_planner.report import findings, tables


def observation_of(document: Document, environment: str | None) -> Observation:
    """Return the observation in a document; raises ``click.UsageError`` where a machine is named, too."""
    observation = document.load(Observation)
    if environment is not None:
        raise click.UsageError(f"{document.name} is an observation of a machine; --environment goes with a spec.")
    return observation


def explain_observation(observation: Observation, batch: Batch | None, batches: IO[bytes] | None, form: str) -> None:
    """Print the engine's answer to one batch or to those of a file, or else to every admissible batch."""
    emulation = emulation_of(observation)
    if batches is not None:
        for each in read_batches(batches, getattr(batches, "name", "<stdin>"), tuple(emulation.modes)):
            click.echo(json.dumps(answer_line(each, emulation.dispatch(each))))
    elif batch is None:
        covered = coverage_of(emulation)
        emit(form, lambda: covered, partial(tables.coverage_table, covered), emulation.assumptions)
    else:
        if batch.role not in emulation.modes:
            raise DispatchError(f"the engine ran no {batch.role}; it ran {', '.join(emulation.modes)}")
        entries = (graph.entry for graph in emulation.graphs if graph.role is batch.role)
        explained = explanation(batch, emulation.dispatch(batch), entries, emulation.speculative)
        (role,) = (each for each in observation.roles if each.role is batch.role)
        same = [count for count in role.batches if count.batch(batch.role) == batch]
        steps = sum(count.steps for count in same)
        took = next((count.milliseconds for count in same if count.milliseconds is not None), None)
        counts = {"steps": steps, "of": role.steps, "milliseconds": took}
        value = plain(explained) | {"observed": counts}
        emit(form, lambda: value, partial(tables.explanation_table, explained), emulation.assumptions)
        if form == "text":
            milliseconds = "" if took is None else f", {took:.3f} ms each"
            click.echo(f"  observed: {share(steps, role.steps)}{milliseconds}")


def observed_findings(document: Document, observation: Observation) -> Iterator[findings.FileFinding]:
    """Yield the findings about an observation, each at its role in the file."""
    roles = [role.role for role in observation.roles]
    for finding in check_observation(observation):
        role = finding.diagnosis.role
        line, column = document.node.locate(("roles", roles.index(role)) if role in roles else ())
        yield findings.FileFinding(finding=finding, file=document.name, line=line, column=column)
