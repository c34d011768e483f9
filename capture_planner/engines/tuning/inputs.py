"""Inputs of a tuning: a deployment as it is today, the costs of its steps, and its load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import attrs

from capture_planner.analysis.arrivals import Pace
from capture_planner.codec import shipped as catalog
from capture_planner.engines import emulate, engines, find_engine
from capture_planner.engines.command_line import server_command
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Engine
from capture_planner.engines.logs import read_sources
from capture_planner.engines.spec_of import DerivedSpec, spec_of
from capture_planner.engines.tuning.judgement import Pricing
from capture_planner.errors import CapturePlannerError, InvalidDocument
from capture_planner.measuring.observed import observed_profile
from capture_planner.measuring.traffic import RequestTrace, SourceOptions, fitting
from capture_planner.measuring.traffic.request_trace import SCHEDULER
from capture_planner.measuring.traffic.source import Advance
from capture_planner.modes import Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured import Steps, steps_of
from capture_planner.records.batch import Batch
from capture_planner.records.environment import Environment
from capture_planner.records.model import Model, Speculative
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Spec
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount

PLAIN_MODEL = Model(
    name="an 8B model",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    max_model_len=131072,
)
"""Dimensions for a deployment whose model is not known here."""


@attrs.frozen(kw_only=True)
class TuneSubject:
    """A deployment as it is today."""

    name: str
    """Name of the deployment: ``vllm 0.33.0``, or a file."""
    today: Emulation
    environment: Environment
    derived: DerivedSpec
    """Its spec, with sizes to be chosen."""
    notes: tuple[str, ...] = ()
    """Assumptions about the machine."""
    engine: Engine | None = None
    words: tuple[str, ...] = ()
    """The variables of its command, and the engine's own words behind its program."""
    file: str | None = None
    """The observation or the spec."""
    observation: Observation | None = None


def engine_subject(name: str, words: Sequence[str], environment: Environment, notes: Sequence[str] = ()) -> TuneSubject:
    """Return an engine by its flags; raises ``FlagError`` for words that it does not take."""
    engine = find_engine(name)
    today = emulate(name, words, environment)
    given = server_command(engine, words).variables
    # Variables that decide no graph still belong to the command that is printed in the end.
    others = (f"{each}={value}" for each, value in given.items() if f"{each}={value}" not in today.command)
    return TuneSubject(
        name=f"{engine.name} {engine.version}",
        today=today,
        environment=environment,
        derived=spec_of(today, engine, PLAIN_MODEL),
        notes=tuple(notes),
        engine=engine,
        words=(*others, *today.command),
    )


def spec_subject(spec: Spec, plan: Plan, file: str, environment: Environment, notes: Sequence[str] = ()) -> TuneSubject:
    """Return the deployment of a spec, with the graphs of its plan."""
    return TuneSubject(
        name=file,
        today=emulation_of(plan),
        environment=environment,
        derived=DerivedSpec(spec=spec),
        notes=tuple(notes),
        file=file,
    )


def observed_subject(observation: Observation, file: str, environment: Environment | None = None) -> TuneSubject:
    """Return what an engine really captured and ran.

    :param file: the observation's, or the folder's.
    :param environment: None: the shipped one of the device that was observed.
    :raises CapturePlannerError: the device does not ship.
    """
    there = observation.device
    # The machine that was observed, unless another is named.
    machine = environment or next((each for each in catalog.environments() if each.device.name == there), None)
    if machine is None:
        device = there or "a device that it does not name"
        raise CapturePlannerError(f"{file} was observed on {device}, which does not ship; give --environment FILE")
    engine = find_engine(observation.engine) if observation.engine in engines() else None
    today = emulation_of(observation)
    here = machine.device.name
    return TuneSubject(
        name=f"{observation.engine} {observation.engine_version}, observed",
        today=today,
        environment=machine,
        derived=spec_of(today, engine, PLAIN_MODEL, observation.model),
        notes=() if there in (None, here) else (f"it was observed on {there}, and the plan is for {here}",),
        engine=engine,
        file=file,
        observation=observation,
    )


CHOSEN, JUDGED = (0.0, 2 / 3), (2 / 3, 1.0)
"""The parts of the traffic that sizes are chosen by, and that both sides are judged on."""

FOREIGN_MODEL = 0.05
"""Least error of times for each factor of two between the sizes of two models, as a share."""

FOREIGN_DEVICE = 0.15
"""Least error of times on another device, as a share."""


@attrs.frozen(kw_only=True)
class TuneCosts:
    """A profile, and how far it is from the deployment."""

    name: str
    profile: Profile
    assumption: str | None
    """None: it is of this model on this device."""
    is_estimate: bool
    """Whether it was measured elsewhere, so that nothing can be promised by it."""
    foreign: float = 0.0
    """Error of its times for that reason, as a share."""


def costs_of(subject: TuneSubject, given: Profile | None = None, name: str | None = None) -> TuneCosts:
    """Return the profile that was given, or what was observed, or the nearest shipped profile.

    :param name: of the profile that was given.
    :raises CapturePlannerError: no profile that ships is of such a device.
    """
    machine, model = subject.environment, subject.derived.spec.model
    if given is not None:
        # A profile that was given wins over observed costs: someone chose it.
        says = catalog.foreign_costs(str(name), given, machine, model, subject.today.parallel)
        off = _foreign(given, subject)
        return TuneCosts(name=str(name), profile=given, assumption=says, is_estimate=off > 0, foreign=off)
    own = _observed(subject)
    if own is not None:
        return TuneCosts(name=f"the costs in {subject.file}", profile=own, assumption=None, is_estimate=False)
    # A shipped profile is of another deployment: figures by it are estimates.
    near = catalog.find_profile(machine, model) or catalog.nearest_profile(machine, model)
    if near is None:
        source = f" --from {subject.file}" if subject.observation is not None else ""
        raise CapturePlannerError(
            f"no shipped profile is of {machine.device.name}, or of a device like it; measure one with "
            f"`capture-planner profile SPEC{source} -o FILE`, and give it as --profile FILE"
        )
    says = f"costs are those of the shipped profile {near.name}, {near.distance}"
    off = _foreign(near.profile, subject)
    if off:
        says += f": its times are taken to be off by up to {off:.0%}"
    return TuneCosts(
        name=f"the shipped profile {near.name}", profile=near.profile, assumption=says, is_estimate=True, foreign=off
    )


def _observed(subject: TuneSubject) -> Profile | None:
    """Return the costs of an observation; None where it has none."""
    observation = subject.observation
    if observation is None or observation.device not in (None, subject.environment.device.name):
        return None
    try:
        return observed_profile(observation, subject.derived.spec.model, subject.environment.device)
    except CapturePlannerError:
        return None


def _foreign(profile: Profile, subject: TuneSubject) -> float:
    """Return by which share the times of a profile may be off for the deployment of another model or device."""
    # Times grow with the model, and less than in proportion: an error for each doubling.
    factor = catalog.size_factor(profile.model, subject.derived.spec.model)
    off = FOREIGN_MODEL * math.log2(factor)
    here, there = subject.environment.device, profile.device
    if there.name != here.name:
        own, other = (each.multiprocessors or 1 for each in (here, there))
        # More multiprocessors shift where kernels fill the device; another architecture changes them.
        off = math.hypot(off, FOREIGN_DEVICE + 0.1 * abs(math.log2(own / other)) + 0.1 * (here.sm[0] != there.sm[0]))
    return off


def missing_costs(subject: TuneSubject) -> str:
    """Return what has to be done for figures that can be promised, as a sentence."""
    if subject.observation is not None:
        return (
            f"this is an estimate: {subject.file} has no costs; for a promise, start the engine once with "
            f"CAPTURE_PLANNER_PROFILE=1 (`capture-planner launch --observe {subject.file} --profile -- ...`)"
        )
    return (
        "this is an estimate by the costs of another machine; for a promise, start the engine once with "
        "CAPTURE_PLANNER_PROFILE=1 (`capture-planner launch --observe FOLDER --profile -- ...`) and tune FOLDER"
    )


@attrs.frozen(kw_only=True)
class TuneLoad:
    """The traffic in two parts."""

    traffic: Traffic
    """The traffic that sizes are chosen by, as a file can have it."""
    chosen: Steps
    judged: Steps
    held_out: bool
    """Whether ``judged`` comes after ``chosen``; else they are the same."""
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    """Assumptions about the load of another deployment."""
    blocks: tuple[Mapping[Batch, int], ...] = ()
    """``judged`` in stretches of the order of time, to judge noise by; none where a source has no order."""
    traces: tuple[RequestTrace, ...] = ()
    """The traces of requests among the sources, with the part that ``judged`` is of."""


Reading = Callable[[Sequence[str], int], AbstractContextManager[Advance]]
"""Given sources and how often each is read, returns a counter of the bytes that were read."""


def unseen(_: Sequence[str], __: int) -> AbstractContextManager[Advance]:
    """Show nothing of the reading."""
    return nullcontext(lambda _: None)


def load_of(
    subject: TuneSubject, sources: Sequence[str], options: SourceOptions, reading: Reading = unseen
) -> TuneLoad:
    """Read the sources: two thirds and the last one where all have an order, else all of them once.

    Raises ``InvalidDocument`` where a source cannot be read, ``CapturePlannerError`` where none has the target's steps.
    """
    deployment, sources = subject.today, sorted(sources)
    # A stream can be read once, so nothing of it can be held out.
    held_out = not any(source == "-" or Path(source).is_fifo() for source in sources)
    if held_out:
        try:
            with reading(sources, 2) as advance:
                each = [attrs.evolve(options, part=part) for part in (CHOSEN, JUDGED)]
                readings = [read_sources(sources, own, advance) for own in each]
        except InvalidDocument:
            held_out = False  # A source without an order, a short one, or one that cannot be read at all.
    if not held_out:
        with reading(sources, 1) as advance:
            readings = [read_sources(sources, options, advance)] * 2
    # Only what sizes are chosen by is made to fit a file: both sides are judged on all that was read.
    chosen, judged = fitting(readings[0].traffic), readings[1].traffic
    if not any(each.role is Role.TARGET for each in (*chosen.batches, *judged.batches)):
        roles = ", ".join(sorted({each.role.value for each in chosen.batches}))
        if not roles:
            raise CapturePlannerError(
                f"{', '.join(chosen.sources)}: no steps; an observation has them once the engine has served requests: "
                "serve the usual load for some minutes, then tune again"
            )
        raise CapturePlannerError(
            f"{', '.join(chosen.sources)}: no batches of the target, only of {roles}; give traffic of the target, "
            "which its drafter follows"
        )
    steps = steps_of(chosen, deployment), steps_of(judged, deployment)
    lines = chosen.skipped + (judged.skipped if held_out else 0)
    skipped = [f"{counted(lines, 'line')} of the traffic could not be read; `capture-planner traffic` shows some"]
    notes = dict.fromkeys(
        (*skipped[: lines > 0], *chosen.notes, *judged.notes, *steps[1].notes, *_strange(judged, deployment))
    )
    # What a scheduler assumed of a trace decides its batches: an assumption, not a note.
    simulated = [note for note in notes if note.startswith(SCHEDULER)]
    unordered = "the traffic has no order in time, so its steps count as independent"
    return TuneLoad(
        traffic=chosen,
        chosen=steps[0],
        judged=steps[1],
        held_out=held_out,
        notes=(*(note for note in notes if note not in simulated), *[unordered][: not readings[1].blocks]),
        assumptions=(*(steps[1].assumptions or steps[0].assumptions), *simulated),
        blocks=tuple(_block(block, deployment) for block in readings[1].blocks),
        traces=readings[1].traces,
    )


def _block(batches: tuple[TrafficCount, ...], deployment: Emulation) -> Mapping[Batch, int]:
    return steps_of(Traffic(sources=(), batches=batches), deployment).counts


def today_pace(today: Emulation, costs: Costs, name: str) -> Pace:
    """Return the time of a deployment's steps by a profile, with the graphs that it has today."""
    pricing = Pricing(today, costs)
    return Pace(lambda batch: pricing.step(batch).milliseconds, f"each step takes what {name} says of today's graphs")


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
    # What was measured on the load wins over what the spec expects.
    if not shares and speculative is not None:
        shares = list(speculative.acceptance[: speculative.num_tokens])
    return sum(shares) if shares else None
