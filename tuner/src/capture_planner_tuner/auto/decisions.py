"""What ``launch --auto`` decides: from its journal and from what its runs left, whether and which plan an engine runs.

Pure functions of what was read: nothing here reads a file, a clock or a machine. ``decide`` judges what was observed
and says what to run and what to tune on; ``conclude`` adds what tuning found. An engine always starts: where no plan
is known to be good it runs by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain

import attrs

from capture_planner.engines.engine import spelled
from capture_planner.records._base import digest
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_tuner.journal import STARTS, DeploymentKey, Event, JournalRecord, PromiseVerdict

LEAST_STEPS = 1000
"""Fewer steps of a run are nothing to tune on."""

MOST_BROKEN = 3
"""After so many broken promises, with none kept in between, no other plan is tried for the same deployment."""


@attrs.frozen(kw_only=True)
class StartDecision:
    """The decision at a start."""

    run: int
    """The number of the run that starts."""
    event: Event
    """One of ``STARTS``."""
    plan: str | None
    """Digest of the plan to run; None: the engine by itself."""
    graphs: str | None = None
    observed: str
    """The observation in a sentence."""
    reason: str
    """The reason for running this, in a sentence."""
    tune_on: int | None = None
    """The run whose observation to tune on first; None: nothing is new."""
    findings: tuple[JournalRecord, ...] = ()
    """Conclusions from earlier runs: promises that were checked, and plans that are put aside."""
    aside: frozenset[str] = frozenset()
    """Digests of plans, and of their graphs, that are put aside; those of ``findings`` among them."""

    @property
    def says(self) -> str:
        """The reason for running this, with the plans that are put aside at this start."""
        aside = (each for each in self.findings if each.decision is Event.PUT_ASIDE)
        return "; ".join([*(f"the plan of run {each.run} is put aside: {each.reason}" for each in aside), self.reason])


@attrs.frozen(kw_only=True)
class TuneProposal:
    """The result of a tuning."""

    reason: str
    plan: str | None = None
    """Digest of the plan; None: no change is proposed."""
    graphs: str | None = None
    promised: bool = False
    """Whether it has a promise: whether costs were measured on the engine itself."""


def facts_of(observation: Observation) -> str:
    """Return the digest of what has to be equal for a plan of one run to fit another."""
    return digest(_facts(observation))


def other_facts(one: Observation, other: Observation) -> list[str]:
    """Return the names of the facts that keep a plan of one run from fitting another."""
    facts = _facts(other)
    return [name for name, value in _facts(one).items() if value != facts[name]]


def _facts(observation: Observation) -> dict[str, object]:
    drafts = observation.speculative
    return {
        "engine": observation.engine,
        "version": observation.engine_version,
        "device": observation.device,
        "model": observation.model,
        "limits": observation.limits,
        "speculative": None if drafts is None else (str(drafts.method), drafts.num_tokens),
        "lora": observation.lora,
        "parallel": observation.parallel,
        "world_size": observation.world_size,
    }


def graphs_of(plan: Plan) -> str:
    """Return the digest of what a plan captures: equal for plans that differ in what they promise alone."""
    roles = {
        role.role.value: (role.mode.value, tuple(map(attrs.astuple, role.entries)), len(role.lazy))
        for role in plan.roles
    }
    return digest({"roles": roles, "limits": plan.limits, "speculative": plan.speculative, "lora": plan.lora})


def decide(history: AutoHistory, start: DeploymentKey, now: str) -> StartDecision:
    """Return what to run, and what follows from earlier runs.

    :param start: what is started now.
    :param now: the time for new records, in UTC.
    """
    findings = tuple(findings_of(history, now))
    aside = history.aside | digests_of(each for each in findings if each.decision is Event.PUT_ASIDE)
    own = [number for number in sorted(history.starts) if history.is_of(number, start)]
    facts = next((run.facts for run in history.runs_of(reversed(own)) if run.facts is not None), None)
    best = next(_runnable(history, own, aside, facts), None)
    plan = None if best is None else best.plan
    # Costs under another plan are those of other graphs, and do not tell what this one could gain.
    alike = (
        run for run in history.runs_of(reversed(own)) if facts is not None and (run.facts, run.plan) == (facts, plan)
    )
    base = next(alike, None)
    return StartDecision(
        run=1 + max((*history.starts, *history.by_run), default=0),
        event=Event.OBSERVE if best is None else Event.KEEP,
        plan=plan,
        graphs=None if best is None else best.graphs,
        observed=_observed(history, own),
        reason=_reason(history, own, start, best),
        tune_on=base.number if base is not None and _is_worth(history, base, own, findings) else None,
        findings=findings,
        aside=aside,
    )


def conclude(decision: StartDecision, proposal: TuneProposal | None) -> StartDecision:
    """Return the decision after tuning; a plan that is put aside, or promises nothing, is not applied.

    :param proposal: None where tuning did not end in time.
    """
    if decision.tune_on is None:
        return decision
    if proposal is None:
        reason = f"tuning did not end in time; {decision.reason}"
    # Nothing new to run; why is what tuning says.
    elif proposal.plan is None or proposal.plan == decision.plan:
        reason = proposal.reason
    # Nobody watches this start: only a plan that can be held to its promise is applied.
    elif not proposal.promised:
        reason = f"a plan was proposed without a promise, and is not applied; {decision.reason}"
    # By its graphs too: the same table with another promise would fail in the same way.
    elif {proposal.plan, proposal.graphs} & decision.aside:
        reason = f"the proposed plan is one that was put aside; {decision.reason}"
    # Another promise for the same graphs is no reason to swap the plan.
    elif proposal.graphs == decision.graphs:
        reason = f"the sizes stay as they are: {proposal.reason}"
    else:
        applied = attrs.evolve(decision, event=Event.APPLY, plan=proposal.plan, graphs=proposal.graphs)
        return attrs.evolve(applied, reason=proposal.reason)
    return attrs.evolve(decision, reason=reason)


def put_aside(decision: StartDecision, reason: str, now: str) -> JournalRecord:
    """Return the record that puts the plan of a decision aside."""
    return JournalRecord(
        time=now, run=decision.run, decision=Event.PUT_ASIDE, reason=reason, plan=decision.plan, graphs=decision.graphs
    )


def refused(decision: StartDecision, reason: str) -> StartDecision:
    """Return the decision without its plan, which is put aside before the run."""
    return attrs.evolve(
        decision, event=Event.OBSERVE, plan=None, graphs=None, reason=f"the plan is put aside: {reason}"
    )


def failed(decision: StartDecision, exit_code: int, now: str) -> tuple[JournalRecord, StartDecision]:
    """Return the record that puts aside the plan of a run that ended before its capture, and what to run instead.

    :param decision: of that run, under a plan.
    """
    record = put_aside(decision, f"the engine ended with exit code {exit_code} before it had captured its graphs", now)
    again = StartDecision(
        run=decision.run + 1,
        event=Event.OBSERVE,
        plan=None,
        observed=f"run {decision.run} did not come up under its plan",
        reason=f"the plan is put aside: {record.reason}",
        aside=decision.aside | digests_of([record]),
    )
    return record, again


def start_record(decision: StartDecision, start: DeploymentKey, now: str, plan: Plan | None) -> JournalRecord:
    """Return the record of a start.

    :param plan: the plan that is run.
    """
    promise = None if plan is None else plan.promise
    return JournalRecord(
        time=now,
        run=decision.run,
        decision=decision.event,
        reason=decision.reason,
        plan=decision.plan,
        graphs=decision.graphs,
        file=None if decision.plan is None else plan_file(decision.plan),
        deployment=start,
        tuned_on=decision.tune_on,
        before_ms=None if promise is None else promise.before.mean_step_ms,
        after_ms=None if promise is None else promise.after.mean_step_ms,
    )


def plan_file(plan: str) -> str:
    """Return the name of a plan's file in the folder of a journal, by its digest."""
    return f"plans/{plan.partition(':')[2]}.yaml"


def _runnable(
    history: AutoHistory, own: Sequence[int], aside: frozenset[str], facts: str | None
) -> Iterator[JournalRecord]:
    """Yield the starts under a plan that can run again, the newest first."""
    for number in reversed(own):
        start, run = history.starts[number], history.by_run.get(number)
        is_other = run is not None and run.facts not in (None, facts)
        # A plan whose file is gone, or was changed, cannot run again.
        if start.plan in history.plans and not is_other and not {start.plan, start.graphs} & aside:
            yield start


def _is_worth(history: AutoHistory, base: SeenRun, own: Sequence[int], findings: Sequence[JournalRecord]) -> bool:
    """Whether to tune on a run: it has enough steps, is new, and promises are kept often enough."""
    # The same observation gives the same answer.
    if base.steps < LEAST_STEPS or any(start.tuned_on == base.number for start in history.starts.values()):
        return False
    verdicts = {each.run: each.verdict for each in (*history.judged, *findings) if each.verdict is not None}
    broken = 0
    for number in own:
        verdict = verdicts.get(number)
        broken = 0 if verdict is PromiseVerdict.KEPT else broken + (verdict is PromiseVerdict.BROKEN)
    return broken < MOST_BROKEN


def _reason(history: AutoHistory, own: Sequence[int], start: DeploymentKey, best: JournalRecord | None) -> str:
    if best is not None:
        return f"the plan of run {best.run} is the best one known"
    if not history.starts or all(run.facts is None for run in history.by_run.values()):
        return "nothing was observed yet"
    if not own:
        return f"what was observed is of another deployment ({_changed(history, start)})"
    return "no plan is known to be better"


def _words(key: DeploymentKey) -> list[str]:
    """Return the words of a command as an engine reads them: ``--max_num_seqs=8`` is ``--max-num-seqs 8``."""
    parts = ([spelled(word), *word.split("=", 1)[1:]] if word.startswith("--") else [word] for word in key.command)
    return [*chain.from_iterable(parts)]


def _changed(history: AutoHistory, start: DeploymentKey) -> str:
    """Return what of the deployment differs from the last start."""
    number = max(history.starts)
    key, run = history.starts[number].deployment, history.by_run.get(number)
    if key is None or _words(key) != _words(start):
        return "the command line changed"
    version = (run.engine_version if run else None) or key.engine_version
    if start.engine_version is not None and version not in (None, start.engine_version):
        return f"{version} was installed, now {start.engine_version} is"
    return "the devices changed"


def _observed(history: AutoHistory, own: Sequence[int]) -> str:
    """Say what the newest run of the deployment left."""
    if not own:
        return "nothing"
    number = own[-1]
    run = history.by_run.get(number)
    if run is None or run.facts is None:
        return f"run {number} left no observation that can be read"
    under = "by itself" if run.plan is None else f"under {short(run.plan)}"
    says = f"run {number} {under}, {counted(run.steps, 'step')}"
    return says if run.verdict is None else f"{says}; promise {run.verdict.value.replace('_', ' ')}: {run.reason}"


def short(plan: str) -> str:
    """Return the first characters of a digest, to name a plan by."""
    return f"plan {plan.partition(':')[2][:12]}"


@attrs.frozen(kw_only=True)
class SeenRun:
    """Traces of a run in its folder."""

    number: int
    captured: bool = False
    """Whether the engine captured its graphs."""
    facts: str | None = None
    """Digest of the deployment that was observed (``facts_of``); None: no observation can be read."""
    engine_version: str | None = None
    plan: str | None = None
    """Digest of the plan that the engine applied; None: it ran by itself."""
    steps: int = 0
    verdict: PromiseVerdict | None = None
    """Verdict on the promise of that plan; None: it is not known, or has none."""
    reason: str = ""
    """The reason, in a sentence."""


@attrs.frozen(kw_only=True)
class AutoHistory:
    """A folder of ``launch --auto``, as far as it can be read: its journal by run, and what the runs left."""

    journal: Sequence[JournalRecord] = ()
    """The oldest record first."""
    runs: tuple[SeenRun, ...] = ()
    plans: frozenset[str] = frozenset()
    """Digests of the plans that can be read."""
    live: int | None = None
    """The run that may still be going on, so that nothing follows from what it lacks."""
    problems: tuple[str, ...] = ()
    """Skipped parts, in a sentence each."""

    @cached_property
    def starts(self) -> dict[int, JournalRecord]:
        """Starts by run."""
        return {each.run: each for each in self.journal if each.decision in STARTS}

    @cached_property
    def ends(self) -> dict[int, JournalRecord]:
        """Ends by run."""
        return {each.run: each for each in self.journal if each.decision is Event.END}

    @cached_property
    def by_run(self) -> dict[int, SeenRun]:
        """What runs left, by run."""
        return {each.number: each for each in self.runs}

    @cached_property
    def judged(self) -> tuple[JournalRecord, ...]:
        """Checks, and plans that were put aside."""
        return tuple(each for each in self.journal if each.decision in (Event.CHECK, Event.PUT_ASIDE))

    @cached_property
    def checked(self) -> frozenset[int]:
        """Runs whose promises were checked."""
        return frozenset(each.run for each in self.judged if each.decision is Event.CHECK)

    @cached_property
    def aside(self) -> frozenset[str]:
        """Digests of the plans that were put aside, and of their graphs."""
        return digests_of(each for each in self.judged if each.decision is Event.PUT_ASIDE)

    def runs_of(self, numbers: Iterable[int]) -> Iterator[SeenRun]:
        """Yield what is left of these runs, in their order."""
        return (self.by_run[number] for number in numbers if number in self.by_run)

    def captured(self, number: int) -> bool:
        """Whether the engine of a run captured its graphs, as far as anything of the run was read."""
        known = [each for each in (self.by_run.get(number), self.ends.get(number)) if each is not None]
        # Without an observation nothing could have been checked.
        return not known or number in self.checked or any(each.captured for each in known)

    def is_of(self, number: int, start: DeploymentKey) -> bool:
        """Whether a run was of a deployment, as far as both are known."""
        key, run = self.starts[number].deployment, self.by_run.get(number)
        if key is None or _words(key) != _words(start):
            return False
        # What is not known does not part two runs; what is known of both does.
        versions = {start.engine_version, key.engine_version, run.engine_version if run else None} - {None}
        return len(versions) <= 1 and (not start.devices or not key.devices or start.devices == key.devices)


def digests_of(records: Iterable[JournalRecord]) -> frozenset[str]:
    """Return the digests of the plans of some records, and of their graphs."""
    return frozenset(each for record in records for each in (record.plan, record.graphs) if each is not None)


def findings_of(history: AutoHistory, now: str) -> Iterator[JournalRecord]:
    """Yield what follows from the runs under plans and is not in the journal yet; each plan is put aside once."""
    aside = set(history.aside)
    for number, start in sorted(history.starts.items()):
        if start.plan is None or {start.plan, start.graphs} & aside:
            continue
        run = history.by_run.get(number)
        verdict = run.verdict if run is not None and run.plan == start.plan else None
        kept = verdict is PromiseVerdict.KEPT
        broken = f"it broke its promise: {run.reason}" if run is not None and verdict is PromiseVerdict.BROKEN else None
        fault = broken or _fault(history, number)
        if fault is not None:
            # One record is enough, however many runs were under the plan.
            aside |= digests_of([start])
        # A kept promise is written down once; too little data may still become a verdict.
        elif not kept or number in history.checked:
            continue
        yield JournalRecord(
            time=now,
            run=number,
            decision=Event.CHECK if fault is None else Event.PUT_ASIDE,
            reason=fault or (run.reason if run is not None else ""),
            plan=start.plan,
            graphs=start.graphs,
            verdict=verdict,
        )


def _fault(history: AutoHistory, number: int) -> str | None:
    """Return why the plan of a run is not to be used again, apart from its promise; None: nothing is wrong."""
    # It lacks an end because it still runs.
    if number == history.live:
        return None
    start, end, run = history.starts[number], history.ends.get(number), history.by_run.get(number)
    if history.captured(number):
        # The observation says what ran, whatever was asked for.
        if run is not None and run.facts is not None and run.plan is None:
            return "the engine ran by itself: its plugin did not apply the plan, and its log says why"
        return _ended_again(history, number)
    if end is not None and end.is_error:
        return f"the engine ended with exit code {end.exit_code} before it had captured its graphs"
    if end is not None and not end.interrupted:
        return None  # such as --help, or a program that is not there
    before = _same_plan_before(history, start)
    # One start may fail for any reason, such as a port in use; two in a row under one plan are the plan's.
    if before is None or history.captured(before):
        return None
    earlier = history.ends.get(before)
    if earlier is None or earlier.is_error or earlier.interrupted:
        return f"runs {before} and {number} ended before the engine had captured its graphs"
    return None


def _ended_again(history: AutoHistory, number: int) -> str | None:
    """Return that a plan's runs ended with an error after capture, twice in a row, where no run without it did."""

    def errs(each: int) -> bool:
        end = history.ends.get(each)
        return end is not None and end.is_error

    before = _same_plan_before(history, history.starts[number])
    if before is None or not errs(number) or not errs(before):
        return None
    # An engine that also fails by itself does not fail because of the plan.
    if any(errs(each) for each, start in history.starts.items() if start.plan is None):
        return None
    return f"runs {before} and {number} ended with exit code {history.ends[number].exit_code}, and none without it did"


def _same_plan_before(history: AutoHistory, start: JournalRecord) -> int | None:
    """Return the run before under the same plan."""
    earlier = (each.run for each in history.starts.values() if each.run < start.run and each.plan == start.plan)
    return max(earlier, default=None)
