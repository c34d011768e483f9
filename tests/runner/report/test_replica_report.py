"""Reports of replicas: what is one rank's is said to be, and what is everybody's is counted of all."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.records._base import replace
from capture_planner_runner.ledger.rows import RankRecord, RequestResult, Wait
from capture_planner_runner.report.run import JOINT, alert, sections, summary
from capture_planner_runner.report.summary import verdict
from support import ledgers

TOLD = RankRecord(rows=(), agreements=0, skews=(), vectors=())


@st.composite
def replica_reports(draw):
    """Reports of one replica or several, whose other ranks have told their numbers or not."""
    report, data = draw(ledgers.reports()), draw(st.integers(1, 3))
    plan = replace(report.plan, parallel=replace(report.plan.parallel, data=data))
    return attrs.evolve(report, plan=plan, ranks=draw(st.sampled_from((None, TOLD))) if data > 1 else None)


@given(replica_reports())
def test_numbers_of_the_first_rank_are_said_to_be_its(report):
    """In the title of each section, but for what all replicas add up to; of one replica nothing is said."""
    found = sections(report, summary(report))
    joint = {"run"} if report.ranks is None else JOINT
    for section in found:
        is_alone = report.plan.parallel.data == 1 or section.name in joint
        assert section.title.endswith(" (rank 0)") == (not is_alone)
    forwards = verdict(report, summary(report))[0]
    if forwards.startswith("graphs served"):
        assert (" of rank 0" in forwards) == (report.plan.parallel.data > 1)


@given(replica_reports(), st.sampled_from(("", "capture", "serving")), st.sampled_from(("", "rank 1 died")))
def test_a_stopped_run_says_in_what_and_whose_requests_it_counts(report, stage, fault):
    """Numbers of the first rank are labelled while the report lacks the other ranks."""
    report = attrs.evolve(report, interrupted=True, stage=stage, fault=fault)
    text = alert(report, summary(report))
    kind = "STOPPED" if fault else "INTERRUPTED"
    assert text.startswith(f"{kind} during {stage}: " if stage else f"{kind}: ")
    is_partial = report.plan.parallel.data > 1 and report.ranks is None
    assert text.endswith(" of rank 0 finished") == is_partial


@given(replica_reports())
def test_requests_wait_for_the_places_of_all_that_they_are_counted_of(report):
    """Places of all replicas, or of the first while the report lacks the other ranks."""
    waited = RequestResult(
        name="r", prompt_tokens=1, output_tokens=0, first_token=None, finished=None, waited_for=Wait.PLACES
    )
    report = attrs.evolve(report, served=(waited,))
    (line,) = (line for line in verdict(report, summary(report)) if " waited for " in line)
    replicas = 1 if report.ranks is None else report.plan.parallel.data
    assert f"one of {report.plan.limits.max_num_reqs * replicas:,} places" in line
    assert (" of rank 0 waited" in line) == (report.ranks is None and report.plan.parallel.data > 1)
