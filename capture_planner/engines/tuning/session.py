"""A tuning from beginning to end: costs and load are read, tables are compared, and what reproduces a plan is written.

``tuned`` needs no command line: programs call it with a subject and options.
"""

from __future__ import annotations

import math
import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import attrs

from capture_planner import codec
from capture_planner.analysis.arrivals import ServingLatency, latency_of, simulate
from capture_planner.analysis.lint import lint
from capture_planner.engines.command_line import LaunchLine, launch_line
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.tuning.guards import FindingKey, GraphGuard, finding_key, with_todays
from capture_planner.engines.tuning.inputs import (
    Reading,
    TuneCosts,
    TuneLoad,
    TuneSubject,
    accepted_of,
    costs_of,
    load_of,
    missing_costs,
    today_pace,
    unseen,
)
from capture_planner.engines.tuning.judgement import SPREAD, Evidence, Pricing, TuneVerdict
from capture_planner.engines.tuning.promising import promising
from capture_planner.engines.tuning.tune import Progress, TuneCase, Tuning, TuningBounds, tune
from capture_planner.errors import CapturePlannerError, InvalidDocument, PlanningError, Problem
from capture_planner.measuring.fits import entry_family
from capture_planner.measuring.traffic import SourceOptions
from capture_planner.measuring.traffic.request_trace import acceptance_of
from capture_planner.modes import Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import ScheduleSource
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile, family_name
from capture_planner.records.spec import Budget, Policy, Roles, Sizes, Spec
from capture_planner.records.traffic import Traffic

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
    reading: Reading = unseen,
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
    load = load_of(subject, options.sources or (str(subject.file),), reads, reading)
    accepted = accepted_of(load.traffic, derived.spec.speculative)
    objective = options.objective or derived.spec.sizes.objective or OBJECTIVE
    spec = _wanted(derived.spec, subject.today, options, objective)
    backends = registry.load_backends()
    measurements = Measurements(profile=near.profile, traffic=load.traffic)

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
        usual=_usual(lambda: make_plan(_plain(spec), environment, backends)),
    )

    def chosen(count: int, kept: TuningBounds | None, by: Measurements = measurements) -> tuple[Spec, Plan]:
        own = _within(spec, count, kept)
        plan = make_plan(own, environment, backends, by)
        # A plan that would take graphs away without evidence keeps today's beside its own.
        more = with_todays(own, plan, subject.today, GraphGuard.of(case.evidence))
        return (own, plan) if more is None else (more, make_plan(more, environment, backends, by))

    def propose(count: int, kept: TuningBounds | None) -> Plan:
        return chosen(count, kept)[1]

    try:
        tuning = tune(case, propose, bounds=_bounds(spec.budget), room=_room(subject), progress=progress)
    except PlanningError as error:
        raise InvalidDocument(_of_profile(problem, near.name) for problem in error.problems) from None
    # Only costs of the engine itself are promised: an observation under the plan will be held against them.
    if tuning.plan is not None and tuning.pricings is not None and not tuning.is_estimate:
        plan = promising(tuning.plan, *tuning.pricings, load.judged.counts)
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
        first=missing_costs(subject) if near.is_estimate else None,
        assumptions=tuple(assumptions_of(subject, tuning, near, load, accepted)),
        latencies=_latencies(tuning, load, reads),
        notes=(*load.notes, *tuning.notes, *_about(load)),
        churn=churn,
    )


def _quoted(word: str) -> str:
    """Return a word as a script has it; what only a shell can expand stays as it was written."""
    if not any(mark in word for mark in ("$", "`")):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _wanted(spec: Spec, today: Emulation, options: TuneOptions, objective: str) -> Spec:
    """Return the spec with measured sizes, under the bounds of the options, or else its own.

    A schedule that is measured stays as it is today: steps of other draft lengths give other tokens, and the sides
    would not be judged on the same work.
    """
    old = spec.sizes
    # Draft lengths are not what is tuned here.
    if spec.speculative is not None and isinstance(spec.speculative.schedule, ScheduleSource):
        spec = replace(spec, speculative=today.speculative)
    sizes = Sizes(
        policy=Policy.MEASURED,
        max_tokens=old.max_tokens,
        max_reqs=old.max_reqs,
        traffic=TRAFFIC_FILE,
        profile=PROFILE_FILE,
        objective=None if objective == "mean" else objective,
    )
    bounds = {"max_graphs": options.graphs, "memory": options.memory, "seconds": options.seconds}
    stated = {name: value for name, value in bounds.items() if value is not None}
    roles = {role.value: replace(spec.roles.of(role), sizes=None) for role in Role}
    return replace(spec, sizes=sizes, roles=Roles(**roles), budget=replace(spec.budget, **stated))


def _plain(spec: Spec) -> Spec:
    """Return the spec with the sizes of the policy default and no budget."""
    budget = replace(spec.budget, max_graphs=None, memory=None, seconds=None)
    return replace(spec, sizes=Sizes(), budget=budget)


def _usual(plan: Callable[[], Plan]) -> frozenset[FindingKey]:
    """Return what ``check`` warns of whatever the sizes are: of a plan whose sizes leave nothing out."""
    try:
        return frozenset(map(finding_key, lint(plan())))
    except PlanningError:
        return frozenset()


def _bounds(budget: Budget) -> TuningBounds | None:
    """Return the bounds of a budget; None for one without any."""
    if budget.max_graphs is None and budget.memory is None and budget.seconds is None:
        return None
    memory = None if budget.memory is None else budget.memory / MIB
    return TuningBounds(graphs=budget.max_graphs, memory_mib=memory, seconds=budget.seconds)


def _room(subject: TuneSubject) -> TuningBounds:
    """Return what graphs may take without a budget, if that pays."""
    return TuningBounds(memory_mib=subject.environment.device.memory * ROOM_SHARE / MIB, seconds=ROOM_SECONDS)


def _within(spec: Spec, count: int, kept: TuningBounds | None) -> Spec:
    """Return the spec with a budget of so many graphs, and of the memory and time that are kept to."""
    budget = replace(spec.budget, max_graphs=count)
    if kept is not None:
        memory = None if kept.memory_mib is None else math.ceil(kept.memory_mib * MIB)
        budget = replace(budget, memory=memory, seconds=kept.seconds or None)
    return replace(spec, budget=budget)


def _of_profile(problem: Problem, file: str) -> Problem:
    """Return a problem of planning as one of the profile, where it is about that."""
    # The user may have given the profile as an option, and has no spec to look into.
    if problem.path != ("sizes", "profile"):
        return problem
    remedy = "measure one of this deployment: capture-planner profile SPEC -o FILE"
    return attrs.evolve(problem, path=(), file=file, remedy=remedy)


def grown(traffic: Traffic, share: float = MORE_TRAFFIC) -> Traffic:
    """Return traffic with a share of more steps, drawn from those that it has."""
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


def _about(load: TuneLoad) -> Iterator[str]:
    if not load.traffic.has_prompts:
        yield "mixed batches keep the graphs that they have: traffic without prompts is no reason to drop them"


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
    if not near.profile.step(1, 0.0):
        says = "the profile has no time of a step apart from its passes; shares of a step are shares of its passes"
        weighed.append((0.3, says))
    today = subject.today
    if today.lora is not None:
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
