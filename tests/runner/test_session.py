"""Sessions that keep a sample of their rows: bounded, evenly spread, and counts that are those of all rows."""

import json

import attrs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner_runner.ledger.session import Distribution, Session, Tally
from capture_planner_runner.report.summary import Percentiles
from support import ledgers


def counts_of(tally):
    """All that a tally counts, with percentiles in place of distributions."""
    counts = attrs.asdict(tally, recurse=False)
    return {name: Percentiles.of(each) if isinstance(each, Distribution) else each for name, each in counts.items()}


def noted(report, most):
    """A session to which all of a report happened, step by step."""
    session = Session(most=most)
    ended = {step.index: step for step in report.steps}
    for index in sorted({forward.step for forward in report.forwards} | set(ended)):
        for forward in report.forwards:
            if forward.step == index:
                session.add_forward(forward)
        if index in ended:
            session.add_step(ended[index])
    for request in report.served:
        session.add_request(request)
    return session


@given(ledgers.reports(), st.sampled_from((None, 1, 2, 5)))
def test_counts_are_of_all_rows_however_few_are_kept(report, most):
    """The tally is what the rows of the whole run add up to."""
    session = noted(report, most)
    assert counts_of(session.tally) == counts_of(Tally.of(report.forwards, report.steps, report.served))
    if most is None:
        assert (session.forwards, session.steps) == (list(report.forwards), list(report.steps))
        assert session.served == list(report.served)


@given(st.lists(ledgers.reports(), min_size=1, max_size=3))
def test_counts_of_replicas_are_those_of_all_their_requests(reports):
    """Sent as JSON, waits, times and drafts equal those of one tally that saw everything."""
    first, *others = (Tally.of((), each.steps, each.served) for each in reports)
    for each in others:
        first.add_request_counts(json.loads(json.dumps(each.request_counts)))
    whole = Tally.of((), [s for each in reports for s in each.steps], [r for each in reports for r in each.served])
    names = whole.request_counts.keys()
    found, expected = counts_of(first), counts_of(whole)
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}


@given(ledgers.reports(), st.integers(1, 5))
def test_kept_rows_are_one_of_so_many_and_no_more_than_the_bound(report, most):
    """Steps whose number the stride divides, each with all of its forwards; requests by their order."""
    session = noted(report, most)
    kept, every = {step.index for step in session.steps}, session.every_step
    assert kept == {step.index for step in report.steps if step.index % every == 0}
    assert session.forwards == [forward for forward in report.forwards if forward.step % every == 0]
    assert session.served == list(report.served[:: session.every_request])
    assert len(session.steps) <= max(most, 1)
    assert len(session.served) <= most
    # All forwards of one step are kept, or none.
    assert len(session.forwards) <= most or len({forward.step for forward in session.forwards}) == 1
