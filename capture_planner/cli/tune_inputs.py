"""What ``tune`` is given: a deployment as it is today, its costs and its load."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import click

from capture_planner.cli.common import ChosenMachine, machine_named, plan_document, read_document
from capture_planner.cli.traffic import reading_bar
from capture_planner.codec import shipped as catalog
from capture_planner.engines import emulate, engines, find_engine, is_engine
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Engine
from capture_planner.engines.launch import leading_variables, started
from capture_planner.engines.observed import emulation_of
from capture_planner.engines.side_by_side import emulation_of_plan
from capture_planner.engines.spec_of import DerivedSpec, spec_of
from capture_planner.errors import CapturePlannerError, InvalidDocument
from capture_planner.measuring.traffic import SourceOptions, fitting, read_traffic
from capture_planner.modes import Role
from capture_planner.planning.steps import Steps, steps_of
from capture_planner.records.environment import Environment
from capture_planner.records.model import Model, Speculative
from capture_planner.records.observation import Observation
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Spec
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic

PLAIN_MODEL = Model(
    name="an 8B model",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    max_model_len=131072,
)
"""Dimensions to find a profile by, where the engine's model is not known here."""

CHOSEN, JUDGED = (0.0, 2 / 3), (2 / 3, 1.0)
"""The parts of the traffic that sizes are chosen by, and that both sides are judged on."""


def command_words(word: str) -> list[str]:
    """Return the words of a command line that is one argument, such as ``"vllm serve MODEL"``; else the word itself."""
    try:
        words = shlex.split(word) if len(word.split()) > 1 else []
    except ValueError:  # Text with a quote in it, as of a flag.
        return [word]
    if words and is_engine(words[0]):
        return words
    program = started(words[leading_variables(words) :], map(find_engine, engines()))
    return [word] if program is None else [program[0].name, *words]


@attrs.frozen(kw_only=True)
class TuneSubject:
    """A deployment as it is today."""

    name: str
    """What today is: ``vllm 0.33.0``, or a file."""
    today: Emulation
    environment: Environment
    derive: Callable[[Model], DerivedSpec]
    """From a model, for what is not known of the deployment's own, to its spec."""
    notes: tuple[str, ...] = ()
    """What was assumed about the machine."""
    engine: Engine | None = None
    words: tuple[str, ...] = ()
    """The engine's own words, behind its variables."""
    file: str | None = None
    """The observation or the spec."""
    is_observed: bool = False


def subject_of(words: Sequence[str], environment: str | None, profile: Profile | None) -> TuneSubject:
    """Return the deployment that the words of the command name.

    :param profile: names the machine where ``environment`` does not.
    """
    if not words:
        raise click.UsageError("Missing argument 'ENGINE FLAGS... | SPEC | OBSERVATION'.")
    if is_engine(words[0]):
        machine = _machine(environment, profile)
        engine = find_engine(words[0])
        today = emulate(words[0], words[1:], machine.environment)
        return TuneSubject(
            name=f"{engine.name} {engine.version}",
            today=today,
            environment=machine.environment,
            notes=machine.assumptions,
            derive=lambda like: spec_of(today, engine, like),
            engine=engine,
            words=today.command,
        )
    if len(words) > 1:
        raise click.UsageError(
            f"{shlex.join(words)}: expected one SPEC or OBSERVATION, or the command line of an engine, which starts "
            f"with one of {', '.join(engines())}."
        )
    document = read_document(words[0])
    if document.is_observation:
        return _observed(document.load(Observation), words[0], environment)
    if document.is_plan:
        raise click.UsageError(f"{words[0]} is a plan; tune its spec, or an observation of the engine that runs it.")
    machine, spec = _machine(environment, profile), document.load(Spec)
    return TuneSubject(
        name=words[0],
        today=emulation_of_plan(plan_document(document, ChosenMachine(machine.environment))),
        environment=machine.environment,
        notes=machine.assumptions,
        derive=lambda like: DerivedSpec(spec=spec),
        file=words[0],
    )


def _observed(observation: Observation, file: str, environment: str | None) -> TuneSubject:
    machine = next((each for each in catalog.environments() if each.device.name == observation.device), None)
    if environment is not None:
        machine = catalog.find_environment(environment)
    if machine is None:
        device = observation.device or "a device that it does not name"
        raise click.UsageError(f"{file} was observed on {device}, which does not ship; give --environment FILE.")
    engine = find_engine(observation.engine) if observation.engine in engines() else None
    today = emulation_of(observation)
    there, here = observation.device, machine.device.name
    return TuneSubject(
        name=f"{observation.engine} {observation.engine_version}, observed",
        today=today,
        environment=machine,
        notes=() if there in (None, here) else (f"it was observed on {there}, and the plan is for {here}",),
        derive=lambda like: spec_of(today, engine, like, observation.model),
        engine=engine,
        file=file,
        is_observed=True,
    )


def _machine(name: str | None, profile: Profile | None) -> ChosenMachine:
    """Return the machine that is named, or else the one that the profile is of."""
    if name is None and profile is not None:
        for each in catalog.environments():
            if each.device.name == profile.device.name:
                return ChosenMachine(each)
    return machine_named(name)


@attrs.frozen(kw_only=True)
class TuneCosts:
    """A profile, and how far it is from the deployment."""

    name: str
    profile: Profile
    assumption: str | None
    """None: it is of this model on this device, and was given."""


def costs_of(subject: TuneSubject, model: Model, given: Profile | None, name: str | None) -> TuneCosts:
    """Return the profile that was given, or the nearest shipped one; raises ``CapturePlannerError`` without any."""
    machine = subject.environment
    if given is not None:
        says = catalog.foreign_costs(str(name), given, machine, model, subject.today.parallel)
        return TuneCosts(name=str(name), profile=given, assumption=says)
    near = catalog.find_profile(machine, model)
    if near is None:
        source = f" --from {subject.file}" if subject.is_observed else ""
        raise CapturePlannerError(
            f"no shipped profile is of {machine.device.name}; measure one with "
            f"`capture-planner profile SPEC{source} -o FILE`, and give it as --profile FILE"
        )
    says = f"costs are those of the shipped profile {near.name}, {near.distance}"
    return TuneCosts(name=f"the shipped profile {near.name}", profile=near.profile, assumption=says)


@attrs.frozen(kw_only=True)
class TuneLoad:
    """The traffic in two parts."""

    traffic: Traffic
    """What sizes are chosen by, as a file can have it."""
    chosen: Steps
    judged: Steps
    held_out: bool
    """Whether ``judged`` comes after ``chosen``; else they are the same."""
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    """What is assumed of the load of another deployment."""
    simulated: bool
    """Whether some of it is a trace of requests, run through the model of a scheduler."""


def load_of(subject: TuneSubject, sources: Sequence[str], options: SourceOptions) -> TuneLoad:
    """Read the sources: two thirds and the last one where all have an order, else all of them once.

    Raises ``InvalidDocument`` where a source cannot be read, ``CapturePlannerError`` where none has the target's steps.
    """
    deployment, sources = subject.today, sorted(sources)
    held_out = not any(source == "-" or Path(source).is_fifo() for source in sources)
    if held_out:
        try:
            with reading_bar(sources, None, times=2) as advance:
                each = [attrs.evolve(options, part=part) for part in (CHOSEN, JUDGED)]
                parts = [read_traffic(sources, own, advance)[0] for own in each]
        except InvalidDocument:
            held_out = False  # A source without an order, a short one, or one that cannot be read at all.
    if not held_out:
        with reading_bar(sources, None) as advance:
            parts = [read_traffic(sources, options, advance)[0]] * 2
    chosen, judged = fitting(parts[0]), parts[1]
    if not any(each.role is Role.TARGET for each in (*chosen.batches, *judged.batches)):
        roles = ", ".join(sorted({each.role.value for each in chosen.batches}))
        raise CapturePlannerError(
            f"{', '.join(chosen.sources)}: no batches of the target, only of {roles}; give traffic of the target, "
            "which its drafter follows"
        )
    steps = steps_of(chosen, deployment), steps_of(judged, deployment)
    lines = chosen.skipped + (judged.skipped if held_out else 0)
    skipped = [f"{counted(lines, 'line')} of the traffic could not be read; `capture-planner traffic` shows some"]
    simulated = any(": trace of " in source for source in chosen.sources)
    notes = dict.fromkeys(
        (*skipped[: lines > 0], *chosen.notes, *judged.notes, *steps[1].notes, *_strange(judged, deployment))
    )
    if simulated:  # which is an assumption, and said as one
        notes = {note: None for note in notes if not note.startswith("batches are those of a simple scheduler")}
    return TuneLoad(
        traffic=chosen,
        chosen=steps[0],
        judged=steps[1],
        held_out=held_out,
        notes=tuple(notes),
        assumptions=steps[1].assumptions or steps[0].assumptions,
        simulated=simulated,
    )


def _strange(traffic: Traffic, deployment: Emulation) -> list[str]:
    """Return what shows that the traffic is of another deployment."""
    found = []
    for role in Role:
        count = sum(each.count for each in traffic.batches if each.role is role)
        if count and role not in deployment.modes:
            found.append(f"{count:,} batches are of {role.value}, which this deployment does not run")
    return found


def accepted_of(traffic: Traffic, speculative: Speculative | None) -> float | None:
    """Return the drafts that a request gets accepted in a step, on average: by the traffic, or else by the spec.

    None where neither says.
    """
    shares = [
        accepted / drafted for drafted, accepted in zip(traffic.drafted, traffic.accepted, strict=False) if drafted
    ]
    if not shares and speculative is not None:
        shares = list(speculative.acceptance[: speculative.num_tokens])
    return sum(shares) if shares else None


def folder_conflict(folder: Path, files: Sequence[str]) -> str | None:
    """Return why files cannot be written into a folder without harm to others in it; None where they can.

    :param files: the names that it may have.
    """
    try:
        if not folder.exists():
            folder.mkdir()
            folder.rmdir()
            return None
    except FileNotFoundError:
        return f"{folder}: no such folder to make it in"
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    if not folder.is_dir():
        return f"{folder} is a file; name a folder"
    others = sorted(each.name for each in folder.iterdir() if each.name not in files)
    return f"{folder} has other files, such as {others[0]}; name a new folder" if others else None
