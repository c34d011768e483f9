"""The verdict of a run: short, and it names what to change."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.report.plain import plain
from capture_planner.report.run import summary
from capture_planner.report.sections import sections
from capture_planner.report.verdict import verdict
from capture_planner.runtime.ledger import RequestResult, Wait
from support import ledgers

FLAGS = {
    Wait.PLACES: "limits.max_num_reqs",
    Wait.PAGES: "--memory-utilization",
    Wait.STATES: "states.rows",
    Wait.ADAPTERS: "lora.max_active",
}


@given(ledgers.reports())
def test_a_report_begins_with_three_lines_at_most(report):
    """Whatever ran, in the tables as in the data; shares are of all forwards."""
    numbers = summary(report)
    lines = verdict(report, numbers)
    assert 1 <= len(lines) <= 3
    assert all(lines)
    assert sections(report, numbers)[0].lines == lines
    assert plain(report)["verdict"] == list(lines)
    assert (lines[0] == "nothing ran") == (not report.forwards)
    if numbers.unused and report.forwards:
        assert f"{len(numbers.unused):,} of {len(numbers.graphs):,} graph" in lines[0]


@given(ledgers.reports(), st.lists(st.none() | st.sampled_from(Wait), min_size=1, max_size=9))
def test_who_waited_is_counted_with_what_was_missing(report, waits):
    """The most frequent reason is named with the flag that removes it, the others are counted."""
    requests = tuple(
        RequestResult(
            name="r", prompt_tokens=1, output_tokens=1, first_token=0.1, finished=0.2, tokens=(1,), waited_for=wait
        )
        for wait in waits
    )
    report = attrs.evolve(report, served=requests)
    waited = report.counts.waited
    assert waited == {wait: waits.count(wait) for wait in Wait if wait in waits}
    assert plain(report)["waited"] == {wait.value: waits.count(wait) for wait in Wait}
    lines = [line for line in verdict(report, summary(report)) if " waited for " in line]
    assert bool(lines) == bool(waited)
    for line in lines:
        (most, count), *_ = waited.most_common(1)
        assert line.startswith(f"{count} of {len(waits)} request")
        assert FLAGS[most] in line
        assert (f"; {waited.total() - count} for other reasons" in line) == (waited.total() > count)


@given(ledgers.reports(), st.integers(0, 5), st.lists(st.floats(0, 9), max_size=3), st.booleans())
def test_times_and_tokens_that_mislead_are_said(report, otherwise, compiled, synthetic):
    """What compiled meanwhile, a rehearsal that did not hold, and acceptance that was drawn."""
    rates = (0.5, 0.25) if synthetic else ()
    report = attrs.evolve(report, otherwise=otherwise, compiled=tuple(compiled), acceptance=rates)
    text = "\n".join(verdict(report, summary(report)))
    assert ("answered otherwise than in the rehearsal" in text) == bool(otherwise)
    assert ("use --acceptance" in text) == bool(otherwise)
    assert ("compiled: run again" in text) == bool(compiled)
    assert ("acceptance is synthetic (0.5, 0.25): the tokens are not the model's" in text) == synthetic
