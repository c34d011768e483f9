"""A tuning from beginning to end: costs and load are read, tables are compared, and what reproduces a plan is written.

``tuned`` needs no command line: programs call it with a subject and options.
"""

from __future__ import annotations

import math
import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import attrs

from capture_planner import codec
from capture_planner.analysis.arrivals import Pace, ServingLatency, latency_of, simulate
from capture_planner.analysis.lint import lint
from capture_planner.codec import shipped as catalog
from capture_planner.engines import emulate, engines, find_engine
from capture_planner.engines.command_line import server_command
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Engine
from capture_planner.engines.logs import read_sources
from capture_planner.engines.spec_of import PLAIN_MODEL, DerivedSpec, spec_of
from capture_planner.errors import CapturePlannerError, InvalidDocument, PlanningError, Problem
from capture_planner.measuring.fits import entry_family
from capture_planner.measuring.traffic import RequestTrace, SourceOptions, TrafficSource, fitting
from capture_planner.measuring.traffic.request_trace import SCHEDULER, acceptance_of
from capture_planner.measuring.traffic.source import Advance
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.measured.steps import Steps, steps_of
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import ScheduleSource, Speculative
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile, family_name
from capture_planner.records.spec import Budget, KindGraphs, Policy, Roles, Sizes, Spec
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic
from capture_planner_tuner.launch_line import LaunchLine, launch_line
from capture_planner_tuner.observed_profile import observed_profile
from capture_planner_tuner.tuning.judgement import SPREAD, Evidence, Pricing, TuneVerdict, promise_of
from capture_planner_tuner.tuning.tune import (
    FindingKey,
    Progress,
    TuneCase,
    Tuning,
    TuningBounds,
    finding_key,
    tune,
    unbounded,
    with_todays,
)


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
    profile: Profile | None = None
    """The profile that the spec names."""

    @property
    def observed_here(self) -> Observation | None:
        """The observation, unless it is of another device than is tuned for."""
        seen = self.observation
        return None if seen is None or seen.device not in (None, self.environment.device.name) else seen


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


def observed_subject(observation: Observation, file: str, environment: Environment | None = None) -> TuneSubject:
    """Return what an engine really captured and ran.

    :param file: the observation's, or the folder's.
    :param environment: None: the shipped one of the device that was observed.
    :raises CapturePlannerError: the device does not ship.
    """
    there = observation.device
    # The machine that was observed, unless another is named.
    machine = environment or catalog.environment_of_device(there)
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
"""Least error of times for each factor of two between the sizes of two models, or their ranks, as a share."""

FOREIGN_STEPS = 0.01
"""Most steps that may be decodes of another number of drafts if the rest is to be promised, as a share."""

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
    """Return the profile that was given, or the spec's own, or what was observed, or the nearest shipped profile.

    :param name: of the profile that was given.
    :raises CapturePlannerError: no profile that ships is of such a device.
    """
    machine, model = subject.environment, subject.derived.spec.model
    if given is None and subject.profile is not None:
        given, name = subject.profile, subject.derived.spec.sizes.profile
    if given is not None:
        # A profile that was given wins over observed costs: someone chose it.
        says = catalog.foreign_costs(str(name), given, machine, model, subject.today.parallel)
        off = _foreign(given, subject)
        return TuneCosts(name=str(name), profile=given, assumption=says, is_estimate=says is not None, foreign=off)
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
    own_ranks, ranks = subject.today.parallel.tensor, near.profile.parallel.tensor
    if own_ranks != ranks:
        says += f", with {counted(ranks, 'tensor-parallel rank')}, and this has {own_ranks}"
    off = _foreign(near.profile, subject)
    if off:
        says += f": its times are taken to be off by up to {off:.0%}"
    return TuneCosts(
        name=f"the shipped profile {near.name}", profile=near.profile, assumption=says, is_estimate=True, foreign=off
    )


def _observed(subject: TuneSubject) -> Profile | None:
    """Return the costs of an observation; None where a role's graphs, or its steps without one, have no costs."""
    observation = subject.observed_here
    if observation is None:
        return None
    try:
        profile = observed_profile(observation, subject.derived.spec.model, subject.environment.device)
    except CapturePlannerError:
        return None
    # Under a plan with graphs for all batches, only a profile at the start times steps without one.
    eager = {curve.role for curve in profile.curves if curve.mode is GraphMode.NONE}
    modes = subject.today.modes
    captured = {cost.role for cost in profile.graphs} >= {role for role, mode in modes.items() if mode.allowed}
    return profile if captured and eager >= {Role.TARGET, Role.DRAFT_PREFILL} & modes.keys() else None


def _foreign(profile: Profile, subject: TuneSubject) -> float:
    """Return by which share the times of a profile may be off for another model, number of ranks or device."""
    # Times grow with a rank's part of the model, and less than in proportion: an error for each doubling.
    factor = catalog.size_factor(profile.model, subject.derived.spec.model)
    ranks = subject.today.parallel.tensor / profile.parallel.tensor
    off = FOREIGN_MODEL * (math.log2(factor) + abs(math.log2(ranks)))
    here, there = subject.environment.device, profile.device
    if there.name != here.name:
        own, other = (each.multiprocessors or 1 for each in (here, there))
        # More multiprocessors shift where kernels fill the device; another architecture changes them.
        off = math.hypot(off, FOREIGN_DEVICE + 0.1 * abs(math.log2(own / other)) + 0.1 * (here.sm[0] != there.sm[0]))
    return off


def missing_costs(subject: TuneSubject, given: Profile | None = None) -> str:
    """Return what has to be done for figures that can be promised, as a sentence.

    :param given: as in ``costs_of``.
    """
    seen, source = subject.observation is not None, TrafficSource(str(subject.file))
    why = " by the costs of another deployment"
    if seen and given is None and subject.observed_here is None:
        why = f": {source.name} is of another device"
    elif seen and given is None:
        why = f": {source.name} lacks times of graphs, or of steps without one, or what capturing took"
    says, engine = f"this is an estimate{why}; for a promise, ", subject.engine
    if given is not None and _observed(subject) is not None:
        return f"{says}leave out --profile: {source.name} has its own"
    # Graphs are timed by the plugin inside an engine, which launch starts it with.
    if engine is not None and engine.launch is None:
        own = f"{subject.derived.spec.model.name} on {subject.environment.device.name}"
        return f"{says}measure {own} with `capture-planner profile SPEC -o FILE`, and give it as --profile FILE"
    # Launch observes into a folder; one file of it, or standard input, is none.
    folder = source.path if seen and Path(source.path).is_dir() else "FOLDER"
    command = f"capture-planner launch --observe {folder} --profile -- ..."
    start = f"start the engine once with CAPTURE_PLANNER_PROFILE=1 (`{command}`)"
    return f"{says}{start}{' and tune FOLDER' if folder == 'FOLDER' else ''}"


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
    is_foreign: bool = False
    """Whether too many decodes are of another number of drafts than this deployment makes for a promise."""
    blocks: tuple[Mapping[Batch, int], ...] = ()
    """``judged`` in stretches of the order of time, to judge noise by; none where a source has no order."""
    traces: tuple[RequestTrace, ...] = ()
    """The traces of requests among the sources, with the part that ``judged`` is of."""


Reading = Callable[[Sequence[str], int], AbstractContextManager[Advance]]
"""Given sources and how often each is read, returns a counter of the bytes that were read."""

UNSEEN: Reading = lambda _sources, _times: nullcontext(lambda _: None)  # noqa: E731


def load_of(
    subject: TuneSubject, sources: Sequence[str], options: SourceOptions, reading: Reading = UNSEEN
) -> TuneLoad:
    """Read the sources: two thirds and the last one where all have an order, else all of them once.

    Without sources, the load is what the subject's observation counted.

    Raises ``InvalidDocument`` where a source cannot be read, ``CapturePlannerError`` where none has the target's steps.
    """
    deployment = subject.today
    # The observation was read already; standard input is then at its end.
    given: Sequence[str | TrafficSource] = sorted(sources) or [TrafficSource(str(subject.file), subject.observation)]
    # A stream can be read once, and an observation has no order, so nothing of them can be held out.
    held_out = bool(sources) and not any(source == "-" or Path(source).is_fifo() for source in sources)
    if held_out:
        try:
            with reading(sources, 2) as advance:
                each = [attrs.evolve(options, part=part) for part in (CHOSEN, JUDGED)]
                readings = [read_sources(given, own, advance) for own in each]
        except InvalidDocument:
            held_out = False  # A source without an order, a short one, or one that cannot be read at all.
    if not held_out:
        with reading(sources, 1) as advance:
            readings = [read_sources(given, options, advance)] * 2
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
        # An engine that was observed ran them itself.
        is_foreign=bool(sources) and steps[1].foreign > FOREIGN_STEPS * steps[1].total,
        blocks=tuple(steps_of(Traffic(sources=(), batches=each), deployment).counts for each in readings[1].blocks),
        traces=readings[1].traces,
    )


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

    None where neither says, and without a drafter, whatever the traffic is of.
    """
    if speculative is None:
        return None
    # What was measured on the load wins over what the spec expects. Later positions are not drafted in every step.
    if any(traffic.drafted[:1]):
        return sum(traffic.accepted[: speculative.num_tokens]) / traffic.drafted[0]
    return sum(speculative.acceptance[: speculative.num_tokens]) if speculative.acceptance else None


MIB = 1 << 20
PLAN_FILE, SPEC_FILE, LAUNCH_FILE = "plan.yaml", "spec.yaml", "launch.sh"
TRAFFIC_FILE, PROFILE_FILE = "traffic.yaml", "profile.yaml"
FILES = (SPEC_FILE, TRAFFIC_FILE, PROFILE_FILE, PLAN_FILE, LAUNCH_FILE)

OBJECTIVE = "token"
"""Objective where neither the options nor the spec name one."""

ROOM_SHARE, ROOM_SECONDS = 0.05, 20.0
"""Room for graphs without a budget, if that pays: share of the device's memory, and seconds to capture."""

MORE_TRAFFIC = 0.05
"""Growth of the traffic, as a share, to see how many graphs of the plan change."""


@attrs.frozen(kw_only=True)
class TuneOptions:
    """Options of a tuning; None: as the subject has it, or no bound."""

    sources: tuple[str, ...] = ()
    """Files of traffic; empty: the batches of the subject's observation."""
    profile: Profile | None = None
    profile_name: str | None = None
    """Name of ``profile`` in messages."""
    graphs: int | None = None
    memory: int | None = None
    """Bytes."""
    seconds: float | None = None
    """Time to capture."""
    objective: str | None = None
    """As in ``Sizes.objective``; None: the spec's, or ``OBJECTIVE``."""
    reads: SourceOptions = attrs.Factory(SourceOptions)
    """Options of reading sources; a pace of None: the time that the costs give today's graphs."""
    churn: bool = False
    """Whether to see how many graphs change if the traffic grows a little, which takes one more plan."""


@attrs.frozen(kw_only=True)
class Churn:
    """Graphs of a plan that stay if the traffic grows by ``MORE_TRAFFIC``."""

    graphs: int
    """Of the plan."""
    kept: int
    new: int
    """Graphs that the plan does not have."""


@attrs.frozen(kw_only=True)
class TuneResult:
    """A tuning with what it was made of."""

    subject: TuneSubject
    tuning: Tuning
    spec: Spec
    """With measured sizes, under the bounds that were asked for."""
    planned: Spec | None
    """The spec that gives the plan again; None without a plan."""
    measurements: Measurements
    costs: TuneCosts
    load: TuneLoad
    first: str | None
    """Sentence before any figure: that nothing is promised, and what to do for a promise."""
    assumptions: tuple[str, ...]
    """Assumptions behind the figures, first those that could change them most."""
    notes: tuple[str, ...]
    commands: tuple[str, ...] = ()
    """Commands that come next, such as the one that starts the engine under the plan."""
    churn: Churn | None = None
    latencies: tuple[ServingLatency, ServingLatency] | None = None
    """Waiting times of requests today and under the plan, where the load is a trace of requests."""

    @property
    def kv_token_mib(self) -> float | None:
        """The MiB of the KV cache that a token takes on one device; None: not known."""
        observation = self.subject.observation
        if observation is None or observation.kv_token_bytes is None:
            return None
        return observation.kv_token_bytes / MIB

    @property
    def plan(self) -> Plan | None:
        """The plan, if it is a change."""
        return self.tuning.plan if self.tuning.verdict is TuneVerdict.CHANGE else None

    def launch(self, plan_file: str = PLAN_FILE) -> LaunchLine | None:
        """Return the command that starts the engine under the plan; None without an engine's words or a change."""
        if self.plan is None or self.subject.engine is None or not self.subject.words:
            return None
        return launch_line(self.subject.engine, self.plan, self.subject.words, plan_file)

    def script(self) -> str | None:
        """Return a script that starts the engine under the plan next to it; None as for ``launch``.

        Its arguments are the engine's, behind those of today.
        """
        line = self.launch()
        if line is None or line.words is None:
            return None
        quoted = [_quoted(word) for word in line.words]
        # The plan lies next to the script, wherever the folder is moved.
        quoted[line.words.index(PLAN_FILE)] = f'"$(dirname "$0")/{PLAN_FILE}"'
        says = "# Starts the engine under the plan in this folder; arguments are passed to the engine."
        return f'#!/bin/sh\n{says}\nexec {" ".join(quoted)} "$@"\n'

    def texts(self) -> dict[str, str]:
        """Return the files that reproduce the plan, by name; empty without a change."""
        if self.plan is None or self.planned is None:
            return {}
        assert self.measurements.traffic is not None, "it was read"
        return {
            SPEC_FILE: codec.dumps(self.planned),
            TRAFFIC_FILE: codec.dumps(self.measurements.traffic),
            PROFILE_FILE: codec.dumps(self.measurements.profile),
            PLAN_FILE: codec.dumps(self.plan),
        }


def tuned(
    subject: TuneSubject,
    options: TuneOptions | None = None,
    *,
    reading: Reading = UNSEEN,
    progress: Progress = lambda _: None,
) -> TuneResult:
    """Choose sizes for a deployment by its costs and its load, and judge them next to what runs today.

    :param reading: shows how much of the sources is read.
    :param progress: called each time that a table was planned and judged.
    :raises CapturePlannerError: there is no load, or no profile is near.
    :raises InvalidDocument: a source cannot be read, or the profile has no times of a role.
    """
    options = options or TuneOptions()
    if not options.sources and subject.observation is None:
        raise CapturePlannerError("there is no traffic: give --traffic, or an observation")
    derived, environment = subject.derived, subject.environment
    near = costs_of(subject, options.profile, options.profile_name)
    pace = today_pace(subject.today, Costs(near.profile), near.name)
    reads = options.reads.completed(subject.today, pace, near.profile)
    load = load_of(subject, options.sources, reads, reading)
    accepted = accepted_of(load.traffic, derived.spec.speculative)
    objective = options.objective or derived.spec.sizes.objective or OBJECTIVE
    spec = _wanted(derived.spec, subject.today, options, objective)
    backends = registry.load_backends()
    measurements = Measurements(profile=near.profile, traffic=load.traffic)
    seen = subject.observed_here

    case = TuneCase(
        today=subject.today,
        costs=Costs(near.profile),
        chosen=load.chosen.counts,
        judging=load.judged.counts,
        objective=objective,
        accepted=accepted or 0.0,
        evidence=Evidence(
            lines=load.judged.lines,
            blocks=load.blocks,
            foreign=near.foreign,
            is_estimate=near.is_estimate,
            has_prompts=load.traffic.has_prompts,
        ),
        usual=_usual(spec, environment, backends),
        reported_mib=None if seen is None else seen.graph_mib,
        reported_seconds=None if seen is None else seen.capture_seconds,
    )

    def chosen(count: int, kept: TuningBounds, by: Measurements = measurements) -> tuple[Spec, Plan]:
        own = _within(spec, count, kept)
        plan = make_plan(own, environment, backends, by)
        # A plan that would remove graphs without evidence keeps today's graphs as well.
        more = with_todays(own, plan, subject.today, case.evidence)
        return (own, plan) if more is None else (more, make_plan(more, environment, backends, by))

    def propose(count: int, kept: TuningBounds) -> Plan:
        return chosen(count, kept)[1]

    # Without a budget graphs may take so much, if that pays.
    room = TuningBounds(memory_mib=environment.device.memory * ROOM_SHARE // MIB, seconds=ROOM_SECONDS)
    try:
        tuning = tune(case, propose, bounds=_bounds(spec.budget), room=room, progress=progress)
    except PlanningError as error:
        raise InvalidDocument(_of_profile(problem, near.name) for problem in error.problems) from None
    # Only costs of the engine itself are promised: an observation under the plan will be held against them.
    if tuning.plan is not None and tuning.pricings is not None and not (tuning.is_estimate or load.is_foreign):
        promise = promise_of(*tuning.pricings, load.judged.counts)
        plan = replace(tuning.plan, promise=promise)
        tuning = attrs.evolve(tuning, plan=plan)
    churn, planned = None, None
    if tuning.plan is not None and tuning.max_graphs is not None:
        # The spec that gives the very plan again, with the bounds that were searched within.
        planned = chosen(tuning.max_graphs, tuning.kept)[0]
        if options.churn:
            more = attrs.evolve(measurements, traffic=grown(load.traffic))
            churn = churn_between(tuning.plan, chosen(tuning.max_graphs, tuning.kept, more)[1])
    return TuneResult(
        subject=subject,
        tuning=tuning,
        spec=spec,
        planned=planned,
        measurements=measurements,
        costs=near,
        load=load,
        first=missing_costs(subject, options.profile) if near.is_estimate else None,
        assumptions=tuple(assumptions_of(subject, tuning, near, load, accepted)),
        latencies=_latencies(tuning, load, reads),
        notes=(
            *load.notes,
            *tuning.notes,
            *([] if load.traffic.has_prompts else [MIXED_STAY]),
            *([OTHER_DRAFTS] if load.is_foreign else []),
        ),
        churn=churn,
    )


def _quoted(word: str) -> str:
    """Return a word as a script has it; what only a shell can expand stays as it was written."""
    if not any(mark in word for mark in ("$", "`")):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _wanted(spec: Spec, today: Emulation, options: TuneOptions, objective: str) -> Spec:
    """Return the spec with measured sizes, under the bounds of the options, or else its own."""
    old = spec.sizes
    # A measured schedule stays as it is today: with other draft lengths a step gives other tokens, and the sides would
    # not be judged on the same work.
    if spec.speculative is not None and isinstance(spec.speculative.schedule, ScheduleSource):
        spec = replace(spec, speculative=today.speculative)
    sizes = Sizes(
        policy=Policy.MEASURED,
        max_tokens=old.max_tokens,
        max_reqs=old.max_reqs,
        traffic=TRAFFIC_FILE,
        profile=PROFILE_FILE,
        objective=None if objective == "mean" else objective,
        max_slowdown=old.max_slowdown,
    )
    bounds = {"max_graphs": options.graphs, "memory": options.memory, "seconds": options.seconds}
    stated = {name: value for name, value in bounds.items() if value is not None}
    # Sizes of a role's own would come before the measured ones.
    roles = {role.value: replace(spec.roles.of(role), sizes=None) for role in Role}
    budget = replace(spec.budget, **stated)
    # Shares of the most graphs, not of each number of graphs that is tried.
    kinds = {kind.value: budget.allowed_of(kind) or getattr(budget.graphs, kind.value) for kind in Kind}
    return replace(spec, sizes=sizes, roles=Roles(**roles), budget=replace(budget, graphs=KindGraphs(**kinds)))


def _usual(spec: Spec, environment: Environment, backends: Registry) -> frozenset[FindingKey]:
    """Return what ``check`` warns of whatever the sizes are: of the policy default without a budget."""
    free = replace(spec, sizes=Sizes(), budget=unbounded(spec.budget))
    try:
        return frozenset(map(finding_key, lint(make_plan(free, environment, backends))))
    # Then each warning counts against a table.
    except PlanningError:
        return frozenset()


def _bounds(budget: Budget) -> TuningBounds | None:
    """Return the bounds of a budget; None for one without any."""
    if budget.max_graphs is None and budget.memory is None and budget.seconds is None:
        return None
    memory = None if budget.memory is None else budget.memory / MIB
    return TuningBounds(graphs=budget.max_graphs, memory_mib=memory, seconds=budget.seconds)


def _within(spec: Spec, count: int, kept: TuningBounds) -> Spec:
    """Return the spec with a budget of so many graphs, and of the memory and time that are kept to."""
    # Rounded up: a table of just that memory must still fit.
    memory = None if kept.memory_mib is None else math.ceil(kept.memory_mib * MIB)
    return replace(spec, budget=replace(spec.budget, max_graphs=count, memory=memory, seconds=kept.seconds or None))


def _of_profile(problem: Problem, file: str) -> Problem:
    """Return a problem of planning as one of the profile, where it is about that."""
    # The user may have given the profile as an option, and has no spec to look into.
    if problem.path != ("sizes", "profile"):
        return problem
    remedy = "measure one of this deployment: capture-planner profile SPEC -o FILE"
    return attrs.evolve(problem, path=(), file=file, remedy=remedy)


def grown(traffic: Traffic, share: float = MORE_TRAFFIC) -> Traffic:
    """Return traffic with a share of more steps, drawn from those that it has."""
    # A fixed seed: the same traffic gives the same churn.
    draw = random.Random(0)
    more = (max(0, round(draw.gauss(each.count * share, math.sqrt(each.count * share)))) for each in traffic.batches)
    batches = (attrs.evolve(each, count=each.count + add) for each, add in zip(traffic.batches, more, strict=True))
    return replace(traffic, batches=tuple(batches))


def churn_between(plan: Plan, other: Plan) -> Churn:
    """Return how many graphs of a plan another one has too."""
    ours, theirs = ({(role.role, entry) for role in each.roles for entry in role.entries} for each in (plan, other))
    return Churn(graphs=len(ours), kept=len(ours & theirs), new=len(theirs - ours))


def _latencies(tuning: Tuning, load: TuneLoad, options: SourceOptions) -> tuple[ServingLatency, ServingLatency] | None:
    """Return what requests of traces wait on both sides, each at its own pace; None without a trace."""
    if tuning.pricings is None or not load.traces:
        return None
    today, proposed = (
        latency_of(
            simulate(
                trace.arrivals,
                pricing.deployment.limits,
                pricing.deployment.speculative,
                lambda batch, pricing=pricing: pricing.step(batch).milliseconds,  # type: ignore[misc]
                acceptance=acceptance_of(options),
                window=trace.window,
            )
            for trace in load.traces
        )
        for pricing in tuning.pricings
    )
    return None if today is None or proposed is None else (today, proposed)


MIXED_STAY = "mixed batches keep the graphs that they have: traffic without prompts is no reason to drop them"

OTHER_DRAFTS = "nothing is promised: too many decodes have a query length that this deployment does not run"


def assumptions_of(
    subject: TuneSubject, tuning: Tuning, near: TuneCosts, load: TuneLoad, accepted: float | None
) -> Iterator[str]:
    """Yield what the figures rest on and no source says: first what could change them most."""
    weighed: list[tuple[float, str]] = []
    # A foreign profile is behind every figure, so it comes before any share of the steps.
    if near.assumption is not None:
        weighed.append((1 + near.foreign, near.assumption))
    weighed += _assumed_times(tuning, Costs(near.profile))
    if near.profile.spread is None:
        weighed.append((SPREAD, f"the profile does not state its spread; it is taken to be {SPREAD:.0%}"))
    if tuning.today is not None and tuning.today.unknown:
        steps = tuning.today.unknown
        says = f"{steps:,} steps count as eager today: the observation has no answer for their batches"
        weighed.append((steps / max(load.judged.total, 1), says))
    # Without the host's part a step looks as fast as its kernels.
    if not near.profile.overheads and not near.profile.step(1, 0.0):
        says = "the profile has no time of a step apart from its passes; shares of a step are shares of its passes"
        weighed.append((0.3, says))
    today = subject.today
    if today.lora is not None and not any(batch.active_loras for batch in load.judged.counts):
        weighed.append((0.1, "neither traffic nor profile says what adapters are active; steps count as without any"))
    if today.speculative is not None and accepted is None:
        weighed.append((0.0, "the traffic has no acceptance of drafts; a step counts as one token of each request"))
    weighed += [(0.2, each) for each in (*load.assumptions, *today.assumptions, *subject.derived.assumptions)]
    weighed += [(0.0, each) for each in subject.notes]
    for _, says in sorted(weighed, key=lambda each: -each[0]):
        yield says


def _assumed_times(tuning: Tuning, costs: Costs) -> Iterator[tuple[float, str]]:
    """Yield each family of graphs whose times are another's, with the share of the steps that run on it."""
    if tuning.pricings is None:
        return
    shares: dict[Family, float] = {}
    total = sum(tuning.judging.values())
    for pricing in tuning.pricings:
        for graph in pricing.deployment.graphs:
            shares.setdefault(entry_family(graph.role, graph.entry), 0.0)
        # An assumed time matters as far as steps run on it.
        for family, count in _served(pricing, tuning.judging).items():
            shares[family] = max(shares.get(family, 0.0), count / total)
    for family in sorted(shares, key=lambda family: family_name(*family)):
        for says in costs.assumptions([family]):
            yield shares[family], says


def _served(pricing: Pricing, steps: Mapping[Batch, int]) -> Counter[Family]:
    """Return how many steps run on each family of graphs."""
    found: Counter[Family] = Counter()
    for batch, count in steps.items():
        for each in pricing.step(batch).passes:
            if each.entry is not None:
                found[entry_family(each.batch.role, each.entry)] += count
    return found
