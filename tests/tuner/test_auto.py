"""What launch --auto decides: whatever the history, an engine starts, and never under a plan that was put aside."""

import json
import random

import attrs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.codec import structure, to_data
from capture_planner_tuner.auto.decisions import (
    LEAST_STEPS,
    MOST_BROKEN,
    AutoHistory,
    SeenRun,
    StartDecision,
    TuneProposal,
    conclude,
    decide,
    failed,
    start_record,
)
from capture_planner_tuner.auto.start import LATEST_RUNS, line_of, record_of
from capture_planner_tuner.journal import STARTS, DeploymentKey, Event, JournalRecord, PromiseVerdict

NOW = "2026-11-24T12:00:00Z"
KEYS = (
    DeploymentKey(command=("vllm", "serve", "m"), engine_version="0.33.0", devices=("NVIDIA H200",)),
    DeploymentKey(command=("vllm", "serve", "m", "--max-num-seqs", "64"), engine_version="0.33.0"),
    DeploymentKey(command=("vllm", "serve", "m"), engine_version="0.34.0"),
)


def plan_named(number: int) -> str:
    """Return a digest."""
    return f"sha256:{number:064x}"


plans = st.integers(1, 4).map(plan_named)
keys = st.sampled_from(KEYS)
verdicts = st.sampled_from((None, *PromiseVerdict))
runs = st.builds(
    SeenRun,
    number=st.integers(1, 9),
    captured=st.booleans(),
    facts=st.sampled_from((None, "a", "b")),
    engine_version=st.sampled_from((None, "0.33.0", "0.34.0")),
    plan=st.none() | plans,
    steps=st.sampled_from((0, LEAST_STEPS - 1, LEAST_STEPS, 10**6)),
    verdict=verdicts,
    reason=st.sampled_from(("", "slow")),
)


@st.composite
def records(draw: st.DrawFn) -> JournalRecord:
    """Return any record."""
    plan = draw(st.none() | plans)
    return JournalRecord(
        time=NOW,
        run=draw(st.integers(1, 9)),
        decision=draw(st.sampled_from(Event)),
        plan=plan,
        graphs=None if plan is None else plan_named(int(plan[7:], 16) + 100),
        deployment=draw(st.none() | keys),
        tuned_on=draw(st.none() | st.integers(1, 9)),
        verdict=draw(verdicts),
        captured=draw(st.booleans()),
        exit_code=draw(st.sampled_from((None, 0, 1, 137))),
        interrupted=draw(st.booleans()),
    )


journals = st.lists(records(), max_size=24).map(tuple)
folders = st.builds(
    AutoHistory,
    runs=st.lists(runs, max_size=9, unique_by=lambda run: run.number).map(tuple),
    plans=st.frozensets(plans),
    live=st.none() | st.integers(1, 9),
)
proposals = st.none() | st.builds(
    TuneProposal,
    reason=st.just("less time"),
    plan=st.none() | plans,
    graphs=st.integers(101, 104).map(plan_named),
    promised=st.booleans(),
)


def aside_in(journal: tuple[JournalRecord, ...]) -> set[str | None]:
    """Return the plans that a journal puts aside, and their graphs."""
    return {each for record in journal if record.decision is Event.PUT_ASIDE for each in (record.plan, record.graphs)}


@given(journals, folders, keys, proposals)
def test_law16_a_plan_that_is_put_aside_never_runs_and_an_engine_always_starts(
    journal: tuple[JournalRecord, ...], seen: AutoHistory, start: DeploymentKey, proposal: TuneProposal | None
) -> None:
    """Whatever the folder has in it."""
    decision = conclude(decide(attrs.evolve(seen, journal=journal), start, NOW), proposal)
    assert decision.event in STARTS
    assert decision.run > max((each.run for each in journal if each.decision in STARTS), default=0)
    assert (decision.plan is None) is (decision.event is Event.OBSERVE)
    aside = aside_in((*journal, *decision.findings)) - {None}
    assert not {decision.plan, decision.graphs} & aside
    if decision.plan is not None:
        assert decision.plan in seen.plans or (proposal is not None and proposal.promised)


@given(journals, folders, keys)
def test_law16_a_broken_promise_always_puts_its_plan_aside(
    journal: tuple[JournalRecord, ...], seen: AutoHistory, start: DeploymentKey
) -> None:
    """Of every run whose observation names the plan that it was started under."""
    decision = decide(attrs.evolve(seen, journal=journal), start, NOW)
    starts = {each.run: each for each in journal if each.decision in STARTS}
    aside = aside_in((*journal, *decision.findings))
    for run in seen.runs:
        ran = starts.get(run.number)
        if run.verdict is PromiseVerdict.BROKEN and ran is not None and ran.plan is not None and ran.plan == run.plan:
            assert {ran.plan, ran.graphs} & aside


@given(journals, folders, keys, st.randoms(use_true_random=False))
def test_reading_again_finds_nothing_new_and_order_decides_nothing(
    journal: tuple[JournalRecord, ...], seen: AutoHistory, start: DeploymentKey, shuffle: random.Random
) -> None:
    """Findings are found once; the order in which a folder lists its runs is no matter."""
    decision = decide(attrs.evolve(seen, journal=journal), start, NOW)
    again = decide(attrs.evolve(seen, journal=(*journal, *decision.findings)), start, NOW)
    assert again.findings == ()
    assert (again.plan, again.run, again.tune_on) == (decision.plan, decision.run, decision.tune_on)
    mixed = list(seen.runs)
    shuffle.shuffle(mixed)
    other = attrs.evolve(seen, journal=journal, runs=tuple(mixed), plans=frozenset(sorted(seen.plans, reverse=True)))
    assert decide(other, start, NOW) == decision


@given(records())
def test_law7_journal_lines(record: JournalRecord) -> None:
    """A record's line gives the record again, on one line."""
    line = line_of(record)
    assert line.count("\n") == 1
    assert record_of(line) == record
    assert structure(to_data(record), JournalRecord) == record
    json.loads(line)


class Folder:
    """A folder in memory: starts engines, and remembers what they leave."""

    def __init__(self) -> None:
        self.journal: list[JournalRecord] = []
        self.runs: list[SeenRun] = []
        self.plans: set[str] = set()

    def read(self, live: int | None = None) -> AutoHistory:
        """Return what ``JournalFolder.read`` does: of the latest runs, also of those that left nothing."""
        starts = {each.run: SeenRun(number=each.run) for each in self.journal if each.decision in STARTS}
        latest = sorted({**starts, **{run.number: run for run in self.runs}}.items())[-LATEST_RUNS:]
        runs = tuple(run for _, run in latest)
        return AutoHistory(journal=tuple(self.journal), runs=runs, plans=frozenset(self.plans), live=live)

    def start(self, proposal: TuneProposal | None = None, key: DeploymentKey = KEYS[0]) -> StartDecision:
        """Decide, and write it down."""
        first = decide(self.read(), key, NOW)
        decision = conclude(first, proposal) if proposal is not None else first
        if decision.plan is not None:
            self.plans.add(decision.plan)
        self.journal += [*decision.findings, start_record(decision, key, NOW, None)]
        return decision

    def end(
        self, decision: StartDecision, verdict: PromiseVerdict | None = None, steps: int = 5000, *, noted: bool = True
    ) -> None:
        """Let the engine serve, and end; where that is not ``noted``, its host was lost."""
        if noted:
            end = JournalRecord(
                time=NOW, run=decision.run, decision=Event.END, plan=decision.plan, captured=True, exit_code=0
            )
            self.journal.append(end)
        self.runs.append(
            SeenRun(
                number=decision.run,
                captured=True,
                facts="a",
                plan=decision.plan,
                steps=steps,
                verdict=verdict,
                reason="slow" if verdict is PromiseVerdict.BROKEN else "",
            )
        )


def proposal_of(number: int, *, promised: bool = True) -> TuneProposal:
    """Return a plan that is proposed."""
    return TuneProposal(reason="less time", plan=plan_named(number), graphs=plan_named(number + 100), promised=promised)


def test_five_starts() -> None:
    """By itself, tuned, kept, another load, and a plan that breaks its promise: the one before runs again."""
    folder = Folder()
    first = folder.start()
    assert (first.event, first.plan, first.tune_on) == (Event.OBSERVE, None, None)
    folder.end(first)
    second = folder.start(proposal_of(1))
    assert (second.event, second.plan, second.tune_on) == (Event.APPLY, plan_named(1), 1)
    folder.end(second, PromiseVerdict.KEPT)
    third = folder.start(TuneProposal(reason="no table of sizes is faster"))
    assert (third.event, third.plan, third.tune_on) == (Event.KEEP, plan_named(1), 2)
    assert [each.decision for each in third.findings] == [Event.CHECK]
    folder.end(third, PromiseVerdict.KEPT)
    fourth = folder.start(proposal_of(2))
    assert (fourth.event, fourth.plan, fourth.tune_on) == (Event.APPLY, plan_named(2), 3)
    folder.end(fourth, PromiseVerdict.BROKEN)
    fifth = folder.start(proposal_of(2))
    assert (fifth.event, fifth.plan, fifth.tune_on) == (Event.KEEP, plan_named(1), None)
    assert "the plan of run 4 is put aside: it broke its promise: slow" in fifth.says
    folder.end(fifth, PromiseVerdict.KEPT)
    sixth = folder.start(proposal_of(2))
    assert (sixth.plan, sixth.tune_on) == (plan_named(1), 5)
    assert "put aside" in sixth.reason


def test_plan_that_keeps_an_engine_from_starting_is_put_aside() -> None:
    """At once where it ended with an error; after two starts where nothing says how they ended."""
    folder = Folder()
    folder.end(folder.start())
    second = folder.start(proposal_of(1))
    record, again = failed(second, 1, NOW)
    assert (again.event, again.plan, again.run) == (Event.OBSERVE, None, second.run + 1)
    folder.journal += [record, start_record(again, KEYS[0], NOW, None)]
    folder.end(again)
    assert folder.start(proposal_of(1)).plan is None

    silent = Folder()
    silent.end(silent.start())
    assert silent.start(proposal_of(1)).plan == plan_named(1)
    assert silent.start().plan == plan_named(1)
    third = silent.start()
    assert third.plan is None
    assert "runs 2 and 3 ended before the engine had captured its graphs" in third.says


@given(st.lists(st.tuples(st.booleans(), st.sampled_from((None, PromiseVerdict.KEPT))), min_size=2, max_size=12))
def test_runs_that_captured_never_put_their_plan_aside(runs: list[tuple[bool, PromiseVerdict | None]]) -> None:
    """However many there are since, and whether or not anything says how they ended."""
    folder = Folder()
    folder.end(folder.start())
    for noted, verdict in runs:
        decision = folder.start(proposal_of(1))
        assert decision.plan == plan_named(1), decision.says
        folder.end(decision, verdict, noted=noted)


def test_run_that_was_checked_had_captured() -> None:
    """Also where the files of the runs were removed since."""
    folder = Folder()
    folder.end(folder.start())
    for _ in range(2):
        folder.end(folder.start(proposal_of(1)), PromiseVerdict.KEPT, noted=False)
    folder.start()
    folder.runs.clear()
    assert folder.start().plan == plan_named(1)


def test_run_that_may_be_going_on_proves_nothing() -> None:
    """A second launch reads a folder while the first one's engine starts."""
    folder = Folder()
    folder.end(folder.start())
    folder.start(proposal_of(1))
    folder.start()
    decision = decide(folder.read(live=3), KEYS[0], NOW)
    assert (decision.plan, decision.findings) == (plan_named(1), ())


def test_other_deployments_are_observed_anew() -> None:
    """Another version, other flags: their plans stay for when they come back."""
    folder = Folder()
    folder.end(folder.start())
    folder.end(folder.start(proposal_of(1)), PromiseVerdict.KEPT)
    flags = folder.start(key=KEYS[1])
    assert (flags.plan, flags.tune_on) == (None, None)
    assert "the command line changed" in flags.reason
    upgraded = folder.start(key=KEYS[2])
    assert upgraded.plan is None
    back = folder.start()
    assert back.plan == plan_named(1)


def test_plan_that_the_plugin_did_not_apply_is_put_aside() -> None:
    """It would be started again and again, and change nothing."""
    folder = Folder()
    folder.end(folder.start())
    second = folder.start(proposal_of(1))
    folder.journal.append(JournalRecord(time=NOW, run=second.run, decision=Event.END, captured=True, exit_code=0))
    folder.runs.append(SeenRun(number=second.run, captured=True, facts="a", plan=None, steps=5000))
    third = folder.start(proposal_of(1))
    assert third.plan is None
    assert any("did not apply the plan" in each.reason for each in third.findings)


def test_estimate_is_not_applied_and_broken_promises_end_the_trying() -> None:
    """Without a promise nothing could be checked; after some broken ones the costs are not to be trusted."""
    folder = Folder()
    folder.end(folder.start())
    estimate = folder.start(proposal_of(1, promised=False))
    assert estimate.plan is None
    assert "without a promise" in estimate.reason
    folder.end(estimate)
    for number in range(1, MOST_BROKEN + 1):
        tried = folder.start(proposal_of(number))
        assert tried.plan == plan_named(number)
        folder.end(tried, PromiseVerdict.BROKEN)
        folder.end(folder.start())
    assert folder.start(proposal_of(50)).plan is None
