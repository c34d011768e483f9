"""The verdict of a run: short, and it names what to change."""

import attrs
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.modes import Reason
from capture_planner.report.plain import plain
from capture_planner.report.writing import seconds
from capture_planner_runner.ledger.rows import Forward, GraphCapture, LazyCaptures, RequestResult, Step, Wait
from capture_planner_runner.ledger.session import RunReport
from capture_planner_runner.report.run import sections, summary
from capture_planner_runner.report.summary import verdict
from support import ledgers


def flag(wait, report):
    """Return what removes a wait: what was chosen, or what is short."""
    cache, limits = report.cache_memory, report.plan.limits
    return {
        Wait.PLACES: f"max_num_{'reqs' if report.counts.most_reqs >= limits.max_num_reqs else 'tokens'}",
        Wait.PAGES: "--pages" if cache is None or cache.share is None else "--memory-utilization",
        Wait.STATES: "states.rows",
        Wait.ADAPTERS: "lora.max_active",
    }[wait]


SLOWER = ("", "give --rate", "lower --rate", "lower --speed")


@st.composite
def lazy_reports(draw):
    """A report of a lazy plan: from some graph on, captured on first use."""
    report = draw(ledgers.reports())
    first = draw(st.integers(0, len(report.captured)))
    late = [attrs.evolve(done, step=9) for done in report.captured[first:]]
    budget = LazyCaptures(
        memory=1 << 20,
        taken=0,
        seconds_per_minute=1.0,
        seconds=sum(done.seconds for done in late),
        left=draw(st.floats(-9, 1)),
        asked=draw(st.integers(0, 3)),
        unused=0,
        untried=0,
    )
    return attrs.evolve(report, captured=(*report.captured[:first], *late), lazy=budget)


def eager(report, reason):
    """Return a report whose forwards all ran eager."""
    return attrs.evolve(
        report, forwards=tuple(attrs.evolve(each, entry=None, reason=reason) for each in report.forwards)
    )


def first_reason(report):
    """Return the first part of a verdict that is about eager forwards, and the most frequent kind of these."""
    numbers = summary(report)
    (line,) = verdict(report, numbers)[:1]
    said = next((part for part in line.split("; ") if part.startswith("most eager ones: ")), None)
    return said, numbers.fallbacks[0] if numbers.fallbacks else None


@given(ledgers.reports())
def test_a_report_begins_with_three_lines_at_most(report):
    """Whatever ran, in the tables as in the data; shares are of all forwards."""
    numbers = summary(report)
    lines = verdict(report, numbers)
    assert 1 <= len(lines) <= 3
    assert all(lines)
    assert sections(report, numbers)[0].texts(None) == lines
    assert plain(report)["verdict"] == list(lines)
    assert (lines[0] == "nothing ran") == (not report.forwards)
    if numbers.unused and report.forwards:
        assert f"{len(numbers.unused):,} of {len(numbers.graphs):,} graph" in lines[0]


@given(ledgers.reports(), st.lists(st.none() | st.sampled_from(Wait), min_size=1, max_size=9), st.sampled_from(SLOWER))
def test_who_waited_is_counted_with_what_was_missing(report, waits, slower):
    """The most frequent reason is named with what removes it in this run, the others are counted."""
    requests = tuple(
        RequestResult(
            name="r", prompt_tokens=1, output_tokens=1, first_token=0.1, finished=0.2, tokens=(1,), waited_for=wait
        )
        for wait in waits
    )
    report = attrs.evolve(report, served=requests, slower=slower)
    waited = report.counts.waited
    assert waited == {wait: waits.count(wait) for wait in Wait if wait in waits}
    assert plain(report)["waited"] == {wait.value: waits.count(wait) for wait in Wait}
    lines = [line for line in verdict(report, summary(report)) if " waited for " in line]
    assert bool(lines) == bool(waited)
    for line in lines:
        (most, count), *_ = waited.most_common(1)
        assert line.startswith(f"{count} of {len(waits)} request")
        assert flag(most, report) in line
        assert ("--memory-utilization" in line) == (flag(most, report) == "--memory-utilization")
        assert line.count(" --rate") + line.count("--speed") == (most is Wait.PLACES and bool(slower))
        assert (f"; {waited.total() - count} for other reasons" in line) == (waited.total() > count)


@given(ledgers.reports(), st.integers(0, 5), st.lists(st.floats(0, 9), max_size=3), st.booleans())
def test_times_and_tokens_that_mislead_are_said(report, otherwise, compiled, synthetic):
    """What compiled meanwhile, a rehearsal that did not hold, and acceptance that was drawn."""
    rates = (0.5, 0.25) if synthetic else ()
    report = attrs.evolve(report, mismatched_requests=otherwise, compiled=tuple(compiled), acceptance=rates)
    text = "\n".join(verdict(report, summary(report)))
    assert ("answered differently than in the rehearsal" in text) == bool(otherwise)
    assert ("use --acceptance" in text) == bool(otherwise)
    assert ("compiled: run again" in text) == bool(compiled)
    assert ("acceptance is synthetic (0.5, 0.25): the tokens are not the model's" in text) == synthetic


@given(lazy_reports())
def test_captures_on_first_use_are_said_where_they_matter(report):
    """Their share of the time of serving, and the graphs that the budget gave no turn."""
    lazy, late = report.lazy, [done for done in report.captured if done.step is not None]
    text = "\n".join(verdict(report, summary(report)))
    said = f"times include {seconds(lazy.seconds)} of {len(late)} capture"
    assert (said in text) == (lazy.seconds > 0.05 * report.serve_seconds)
    overdrawn = lazy.asked > 0 and lazy.left <= 0 and bool(report.forwards)
    assert (f"{lazy.asked} graph" in text and "had no turn: raise capture.seconds_per_minute" in text) == overdrawn


@given(lazy_reports())
def test_memory_is_raised_where_it_was_short(report):
    """``capture.memory`` where a graph was refused on first use, the pool's where one was at start."""
    said, most = first_reason(eager(report, Reason.MEMORY))
    assume(said is not None)
    refused = [done for done in report.captured if done.role is most.role and done.waiver is not None]
    steps = {done.step for done in refused if done.waiver.reason is Reason.MEMORY}
    on_first_use = bool(steps - {None})
    assert ("capture.memory" in said) == on_first_use
    assert ("--graph-memory" in said) == (not on_first_use or None in steps)


@given(ledgers.reports(), st.sampled_from((Reason.MODE, Reason.LAZY)))
def test_a_run_without_graphs_is_told_from_a_plan_without_them(report, reason):
    """``--eager`` captures nothing of a plan that has graphs; a first use lacks neither memory nor seconds."""
    said, _ = first_reason(eager(report, reason))
    assume(said is not None)
    without = reason is Reason.MODE and report.plan.num_graphs > 0 and not report.captured
    assert ("run without --eager" in said) == without
    assert ("CP047" in said) == (reason is Reason.LAZY)
    assert "seconds_per_minute" not in said


@given(st.integers(1, 8), st.sampled_from((2, 6, 9, 20, 60)), st.sampled_from((None, *Wait)))
def test_more_requests_are_wanted_only_where_they_fit(most, drafts, wait):
    """Where so many decodes fill a step, or requests have places and no turn, more requests change nothing."""
    plan = ledgers.locked_plan("tiny-reference-cpu.cpu")
    role, limits = plan.roles[0], plan.limits
    plan = attrs.evolve(plan, speculative=attrs.evolve(plan.speculative, num_tokens=drafts), roles=())
    captured = GraphCapture(role=role.role, entry=role.entries[0], seconds=0.1, memory=1, alone=1)
    forward = Forward(
        step=0, role=role.role, num_reqs=most, num_tokens=64, query_len=None, entry=None, reason=Reason.SIZES
    )
    step = Step(index=0, num_reqs=most, num_tokens=64, prompts=0, drafted=0, accepted=0, seconds=0.1, waiting=0)
    request = RequestResult(
        name="r", prompt_tokens=1, output_tokens=0, first_token=None, finished=None, waited_for=wait
    )
    report = RunReport(
        plan=plan,
        model="model",
        backends={},
        host={},
        captured=(captured,),
        forwards=(forward,),
        steps=(step,),
        served=(request,),
        buffers=0,
        kv_cache=0,
        capture_seconds=0.1,
        serve_seconds=0.1,
    )
    line = verdict(report, summary(report))[0]
    has_room = (most + 1) * (1 + drafts) <= limits.max_num_tokens
    lacks_tokens = most < limits.max_num_reqs and (wait is Wait.PLACES or not has_room)
    assert ("limits.max_num_tokens" in line) == lacks_tokens
    assert ("send more" in line) == (most < limits.max_num_reqs and not lacks_tokens and wait is None)
