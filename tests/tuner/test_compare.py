"""Two deployments side by side: against brute force, against themselves, and over traces."""

import io
import json
from collections import Counter

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from capture_planner.analysis.arrivals import for_role, simulate
from capture_planner.codec.shipped import find_environment
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines import emulate
from capture_planner.engines.deployments import emulation_of
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import batches, decode_families, is_admissible
from capture_planner.report.plain import plain
from capture_planner.report.terminal import tables
from capture_planner.testing import arbitrary_plans, plans
from capture_planner_tuner.report.compare import MAX_HOLES, side_by_side_report
from capture_planner_tuner.side_by_side import compare

SMALL = {"max_reqs": 16, "max_tokens": 64}


@attrs.frozen
class TraceRequest:
    """A request of a trace."""

    arrival: float
    prompt: int
    output: int


def without(plan, dropped):
    """The plan with fewer graphs: ``dropped`` says of each whether it goes."""
    return replace(
        plan,
        roles=tuple(
            replace(role, entries=tuple(entry for entry in role.entries if not dropped(entry))) for role in plan.roles
        ),
    )


def swapped(data):
    """What is said of A and B, said of B and A."""
    if isinstance(data, list):
        return [swapped(item) for item in data]
    if not isinstance(data, dict):
        return {"a": "b", "b": "a"}.get(data, data) if isinstance(data, str) else data
    return {{"a": "b", "b": "a"}.get(key, key): swapped(value) for key, value in data.items()}


def text_of(compared):
    """The tables as plain text."""
    out = io.StringIO()
    Console(file=out, width=160).print(tables(side_by_side_report(compared)))
    return out.getvalue()


@given(plans(**SMALL))
def test_plan_compared_with_itself_has_no_difference(plan):
    """Both sides are the same, nothing is a hole, and an emulation of it is no other thing."""
    compared = compare(plan, plan)
    assert not compared.holes
    assert all(pair.a == pair.b for pair in compared.families)
    assert all(captured.a == captured.b for captured in compared.graphs)
    assert all(modes.a is modes.b for modes in compared.modes)
    assert compare(emulation_of(plan), plan) == compared


@settings(max_examples=settings.default.max_examples // 2)
@given(arbitrary_plans(max_tokens=64))
def test_comparison_figures_equal_brute_force(plan):
    """Each admissible batch by the definition of compatibility: counts, shares, and both ratios."""
    compared = compare(plan, plan)
    for pair in compared.families:
        role, served = plan.role(pair.family.role), pair.a
        families = decode_families(role.role, plan)
        ratios, modes = [], Counter()
        for batch, _ in batches(role.role, plan):
            decode = pair.family.kind is Kind.DECODE
            if (batch.uniform_query_len if decode else batch.past_prompt) != (pair.family.query_len or False):
                continue
            assert is_admissible(batch, plan, families)
            if Dispatcher(plan).dispatch(batch).reason is Reason.UNKNOWN:
                continue  # neither side's figures count it
            answer = Dispatcher(plan).dispatch(batch) if role.role is Role.DRAFT_DECODE else None
            fitting = [entry for entry in role.entries if entry.rejection(batch) is None]
            best = answer.entry if answer else min(fitting, key=lambda entry: entry.cost, default=None)
            modes[GraphMode.NONE if best is None else best.mode] += 1
            if best is not None:
                ratios.append(best.num_tokens / batch.num_tokens)
        assert (served.full, served.piecewise) == (modes[GraphMode.FULL], modes[GraphMode.PIECEWISE])
        assert served.batches == sum(modes.values())
        assert served.coverage == pytest.approx(len(ratios) / served.batches)
        assert served.worst == max(ratios, default=1.0)
        assert served.mean == pytest.approx(sum(ratios) / len(ratios) if ratios else 1.0)


@given(plans(**SMALL), plans(**SMALL))
def test_comparison_is_symmetric(one, other):
    """Whichever comes first."""
    forth = plain(compare(one, other, names=("x", "y")))
    back = swapped(plain(compare(other, one, names=("y", "x"))))
    holes = [sorted(data.pop("holes"), key=str) for data in (forth, back)]
    assert forth == back
    assert holes[0] == holes[1]


@given(plans(**SMALL), st.integers(0, 5))
def test_holes_are_batches_without_their_graph(plan, seed):
    """A plan beside one with fewer graphs: each batch that is eager there, once, and no other."""
    fewer = without(plan, lambda entry: hash((entry.num_tokens, seed)) % 3 == 0)
    compared = compare(fewer, plan)
    lost = Counter()
    for role in plan.roles:
        for batch, _ in batches(role.role, plan):
            if Dispatcher(fewer).dispatch(batch).entry is None and Dispatcher(plan).dispatch(batch).entry:
                lost[role.role] += 1
    found = Counter()
    for hole in compared.holes:
        assert hole.eager == "a"
        assert hole.first <= hole.last
        found[hole.family.role] += hole.batches
    assert found == lost
    spans = [(hole.family, hole.active_loras, hole.first, hole.last) for hole in compared.holes]
    by_case = sorted(spans, key=str)
    assert len(set(by_case)) == len(by_case)


@given(plans(**SMALL), plans(**SMALL))
def test_comparison_is_written_as_json_and_tables(one, other):
    """As JSON, and as tables that name both sides and count every hole."""
    compared = compare(one, other, names=("left", "right"))
    data = json.loads(json.dumps(plain(compared)))
    assert (data["a"], data["b"], data["batches"]) == ("left", "right", "admissible")
    assert len(data["holes"]) == len(compared.holes)
    text = text_of(compared)
    assert "A: left" in text
    assert "B: right" in text
    for side in "AB":
        holes = [hole for hole in compared.holes if hole.eager == side.lower()]
        assert ("and " + str(len(holes) - MAX_HOLES) + " more" in text) or len(holes) <= MAX_HOLES
        assert (f"nothing is eager in {side}" in text) is not bool(holes)


def traces():
    """Short traces of short requests."""
    request = st.builds(TraceRequest, arrival=st.floats(0, 3), prompt=st.integers(1, 40), output=st.integers(1, 30))
    return st.lists(request, min_size=1, max_size=12)


def steps_of(requests, deployment):
    """How often each batch of the target runs."""
    return simulate(requests, deployment.limits, deployment.speculative, lambda batch: 20.0).counts


@given(plans(**SMALL), plans(**SMALL), traces())
def test_comparison_over_a_trace_counts_steps(one, other, requests):
    """Figures count steps; holes are among the batches that both meet, and the side that is eager counts them."""
    compared = compare(one, other, (steps_of(requests, one), steps_of(requests, other)))
    assert compared.from_traffic
    met = steps_of(requests, one)
    target = [pair.a for pair in compared.families if pair.family.role is Role.TARGET and pair.a is not None]
    assert sum(served.batches for served in target) == sum(met.values())
    for hole in compared.holes:
        side = one if hole.eager == "a" else other
        families = decode_families(hole.family.role, side)
        of_role = for_role(steps_of(requests, side), hole.family.role, families)
        assert 1 <= hole.batches <= sum(of_role.values())
    assert "steps of the traffic" in text_of(compared)
    assert json.dumps(plain(compared))


@given(plans(**SMALL), traces())
def test_comparison_over_a_trace_has_no_worse_ratio_than_all_batches(plan, requests):
    """What traffic meets of decodes is admissible: its worst ratio is none that the space does not have."""
    assume(plan.parallel.tensor == 1)
    whole = {pair.family: pair.a for pair in compare(plan, plan).families}
    steps = steps_of(requests, plan)
    for pair in compare(plan, plan, (steps, steps)).families:
        if pair.family.kind is Kind.DECODE:
            assert pair.a.worst <= whole[pair.family].worst
            assert pair.a.coverage == 1 or whole[pair.family].coverage < 1


def test_comparison_matches_decodes_by_requests():
    """Where drafts cost large batches their graphs, that is a hole: requests are compared, not widths."""
    machine = find_environment("h100")
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}']
    plain, drafted = (emulate("vllm", ["m", "--max-num-seqs", "256", *more], machine) for more in ([], drafts))
    holes = [hole for hole in compare(plain, drafted).holes if hole.family.kind is Kind.DECODE]
    lost = [
        n
        for n in range(1, 257)
        if drafted.dispatch(Batch.decode(Role.TARGET, n, 5)).entry is None
        and plain.dispatch(Batch.decode(Role.TARGET, n, 1)).entry is not None
    ]
    assert [(hole.eager, hole.first, hole.last, hole.family.query_len) for hole in holes] == [
        ("b", lost[0], lost[-1], 5)
    ]
