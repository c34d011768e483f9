"""The numbers of a run, their tables and their JSON: they add up, whatever happened."""

import io
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from capture_planner import codec
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.report.plain import plain
from capture_planner.report.terminal import tables
from capture_planner.report.writing import size
from capture_planner_runner.graphs.reading import Reading
from capture_planner_runner.ledger.rows import Accounts, Forward, GraphCapture
from capture_planner_runner.ledger.session import Distribution, RunReport
from capture_planner_runner.report.run import (
    MAX_FALLBACKS,
    MAX_GRAPHS,
    MAX_NAMED,
    MOST_APART,
    NONE,
    run_report,
    sections,
    summary,
)
from capture_planner_runner.report.summary import Percentiles
from support import ledgers
from support.pages import grids_of

REPORTS = ledgers.reports()
EMPTY = RunReport(
    plan=ledgers.locked_plan("tiny-reference-cpu.cpu"),
    model="m",
    backends={},
    host={},
    captured=(),
    forwards=(),
    steps=(),
    served=(),
    buffers=0,
    kv_cache=0,
    capture_seconds=0.0,
    serve_seconds=0.0,
)


def printed(report, width):
    """The tables as text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(tables(run_report(report)))
    return console.file.getvalue()


def rows_of(section):
    """Return the rows of all tables of a section."""
    return [row for grid in grids_of(section) for row in grid.rows]


@given(REPORTS)
def test_the_shares_of_a_role_sum_to_one(report):
    """Over FULL, PIECEWISE and NONE; they are all 0 where the role never ran."""
    for role in summary(report).served_from:
        total = sum(mode.share for mode in role.modes)
        assert total == pytest.approx(1 if role.forwards else 0)


@given(REPORTS)
def test_forwards_are_counted_once(report):
    """By role and mode, by graph and fallback, and those that are uniform decodes."""
    numbers = summary(report)
    ran = Counter()
    for forward in report.forwards:
        ran[forward.role, forward.mode] += forward.repeats
    assert {(r.role, m.mode): m.forwards for r in numbers.served_from for m in r.modes if m.forwards} == ran
    by_graph = sum(used.forwards for used in numbers.graphs)
    eager = sum(fallback.forwards for fallback in numbers.fallbacks)
    assert (by_graph, eager) == (
        sum(f.repeats for f in report.forwards if f.entry),
        sum(f.repeats for f in report.forwards if not f.entry),
    )
    for role in numbers.served_from:
        mine = [f for f in report.forwards if f.role is role.role and f.query_len is not None]
        assert role.decodes == sum(f.repeats for f in mine)
        assert role.covered == sum(f.repeats for f in mine if f.entry)
        vary = () if report.plan.speculative is None else report.plan.speculative.varying_decodes
        differ = [f for f in report.forwards if f.role is role.role and f.max_query_len is not None and f.role in vary]
        assert role.varying == sum(f.repeats for f in differ)
        assert role.varying_covered == sum(f.repeats for f in differ if f.mode is GraphMode.FULL)


@given(ledgers.captures(EMPTY.plan), st.integers(1, 7))
def test_an_entry_that_is_captured_twice_serves_from_the_later_capture(captured, repeats):
    """A plan can list an entry twice: lint finds it, and ``--any-plan`` runs it. Its forwards count once."""
    assume(captured)
    twice = [attrs.evolve(graph, waiver=None) for graph in (*captured, captured[0])]
    role, entry = captured[0].role, captured[0].entry
    batch = {"num_reqs": entry.num_reqs or 1, "num_tokens": entry.num_tokens, "query_len": entry.query_len}
    ran = Forward(step=0, role=role, entry=entry, reason=None, repeats=repeats, **batch)
    numbers = summary(attrs.evolve(EMPTY, captured=tuple(twice), forwards=(ran,)))
    assert numbers.graphs[0].graph is twice[-1]
    assert [used.forwards for used in numbers.graphs] == [repeats] + [0] * (len(twice) - 1)
    assert numbers.unused == tuple(twice[:-1])


@given(REPORTS, st.integers(0, 2 * MAX_FALLBACKS))
def test_fallbacks_are_exactly_the_eager_forwards(report, more):
    """By role, reason and shape, the most frequent first; tables list a few and count the rest."""
    eager = (
        Forward(
            step=0,
            role=Role.TARGET,
            num_reqs=2,
            num_tokens=9000 + index,
            query_len=None,
            entry=None,
            reason=Reason.SIZES,
        )
        for index in range(more)
    )
    report = attrs.evolve(report, forwards=(*report.forwards, *eager))
    found = summary(report).fallbacks
    shapes = Counter()
    for f in report.forwards:
        if f.entry is None:
            shapes[f.role, f.reason, f.num_reqs, f.num_tokens, f.query_len] += f.repeats
    assert {(f.role, f.reason, f.num_reqs, f.num_tokens, f.query_len): f.forwards for f in found} == shapes
    assert len(found) == len(shapes)
    assert [f.forwards for f in found] == sorted((f.forwards for f in found), reverse=True)
    shown = next(s for s in sections(report, summary(report)) if s.name == "fallbacks")
    assert len(rows_of(shown)) == min(len(found), MAX_FALLBACKS)
    rest = found[MAX_FALLBACKS:]
    assert bool(shown.texts("note")) == bool(rest)
    if rest:
        assert f"{len(rest)} other shape" in shown.texts("note")[0]
        assert f"{sum(f.forwards for f in rest)} forward" in shown.texts("note")[0]


@given(REPORTS)
def test_padding_is_the_padded_share_of_the_rows(report):
    """Between 0 and 1; on either axis the padded rows over all rows of the mode."""
    for role in summary(report).served_from:
        for mode in role.modes:
            mine = [f for f in report.forwards if (f.role, f.mode) == (role.role, mode.mode)]
            for share, real, padded in (
                (mode.token_padding, "num_tokens", "padded_tokens"),
                (mode.request_padding, "num_reqs", "padded_reqs"),
            ):
                assert 0 <= share <= 1
                added = sum(getattr(f, padded) * f.repeats for f in mine)
                rows = added + sum(getattr(f, real) * f.repeats for f in mine)
                assert share * rows == pytest.approx(added)
            assert mode.mode is not GraphMode.NONE or mode.token_padding == 0


def test_no_values_have_no_percentiles():
    """Rather than zeros."""
    assert of([]) is None


def of(values):
    """Percentiles of a few values, exactly."""
    return Percentiles.of(Distribution.of(values))


@given(REPORTS)
def test_latencies_are_those_of_the_requests_steps_and_forwards(report):
    """Each is over what has it: a request that was cut off has no end, one token has no second."""
    found = summary(report).latency
    ended = [s for s in report.served if s.finished is not None]
    host = [f.host_seconds / f.repeats for f in report.forwards for _ in range(f.repeats)]
    rest = [(s.finished - s.first_token) / (s.output_tokens - 1) for s in ended if s.output_tokens > 1]
    assert found.first_token == of(s.first_token for s in report.served if s.output_tokens)
    assert found.per_token == of(rest)
    assert found.finished == of(s.finished for s in ended)
    assert found.step == of(step.seconds for step in report.steps)
    assert found.forward_host == of(host)


@given(REPORTS)
def test_captured_graphs_add_up(report):
    """Graphs, bytes and seconds, at start and on first use, in data and text; a graph is there, dropped, or to come."""
    numbers, data = summary(report), plain(report)["captured"]
    there = [graph for graph in report.captured if graph.waiver is None]
    assert sum(kind.graphs for kind in numbers.captured) == len(there) == len(numbers.graphs)
    assert sum(kind.memory for kind in numbers.captured) == sum(graph.memory for graph in there)
    assert sum(kind.alone for kind in numbers.captured) == sum(graph.alone for graph in there)
    assert len(there) + len(numbers.dropped) == len(report.captured) <= numbers.planned
    entries = [entry for entry in data["entries"] if entry["reason"] is None]
    assert data["graphs"] == len(entries) == sum(kind["graphs"] for kind in data["by"])
    for name in ("memory", "alone", "driver"):
        assert data[name] == sum(entry[name] for entry in entries) == sum(kind[name] for kind in data["by"])
    late = [entry["seconds"] for entry in data["entries"] if entry["step"] is not None]
    assert data["seconds"] == pytest.approx(report.capture_seconds + sum(late))
    shown = next(s for s in sections(report, numbers) if s.name == "memory")
    assert sum(isinstance(mode, GraphMode) for _, mode, *_ in rows_of(shown)) == len(data["by"])
    for kind in numbers.captured:
        key = kind.role, kind.mode, kind.on_first_use
        tokens = [g.entry.num_tokens for g in there if (g.role, g.entry.mode, g.step is not None) == key]
        assert (kind.smallest.num_tokens, kind.largest.num_tokens) == (min(tokens), max(tokens))


@given(REPORTS)
def test_memory_adds_up_to_what_the_device_reports(report):
    """By graph, by role and mode, and with all that is no graph; the rest is shown, and flagged above 5 %."""
    numbers, accounts = summary(report), Accounts.of(report.captured)
    data = plain(report)
    shown = next(s for s in sections(report, numbers) if s.name == "memory")
    assert sum(kind.driver for kind in numbers.captured) == sum(
        graph.driver for graph in report.captured if graph.waiver is None
    )
    assert data["memory"]["weights"] == report.weights
    read = [graph.readings for graph in report.captured if graph.readings is not None and graph.step is None]
    if not read:
        assert accounts is None is data["memory"]["accounts"]
        assert all(graph.driver == 0 for graph in report.captured if graph.step is None)
        assert not shown.texts("warning")
        assert len(rows_of(shown)) == len(numbers.captured)
    else:
        assert accounts == numbers.accounts
        assert accounts.device == read[-1][2].used - read[0][0].used
        between = sum(after[0].outside - before[2].outside for before, after in pairwise(read))
        assert accounts.unexplained == between
        assert accounts.explained + between == accounts.device
        assert data["memory"]["accounts"]["unexplained"] == between
        assert (accounts.apart == 0) == (between == 0)
        assert bool(shown.texts("warning")) == (accounts.apart > MOST_APART)
        written = [row[-1] for row in rows_of(shown) if row[0] == "others on the device, meanwhile"]
        came_back = " came back" if between < 0 else ""
        assert written == ([f"{size(abs(between))}{came_back}"] if between else [])
        late = sum(kind.on_first_use for kind in numbers.captured)
        assert rows_of(shown)[len(rows_of(shown)) - late - 1][0] == "gone from the device"
        assert not any(str(cell).startswith("-") for row in rows_of(shown) for cell in row)


@given(REPORTS)
def test_the_graphs_that_took_most_memory_are_listed(report):
    """Largest first, and the others by their number; all are in the data."""
    numbers = summary(report)
    there = sorted((g.memory + g.driver for g in report.captured if g.waiver is None), reverse=True)
    listed = [s for s in sections(report, numbers) if s.name == "memory-by-graph"]
    assert bool(listed) == any(g.memory or g.driver for g in report.captured if g.waiver is None)
    for shown in listed:
        assert len(rows_of(shown)) <= MAX_GRAPHS
        left = len(there) - len(rows_of(shown))
        assert bool(shown.texts("note")) == bool(left)
        assert all(f"{left:,} other graph" in note for note in shown.texts("note"))
    entries = plain(report)["captured"]["entries"]
    assert Counter((e["memory"], e["driver"]) for e in entries) == Counter(
        (g.memory, g.driver) for g in report.captured
    )


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_what_a_device_lost_after_the_last_capture_is_told_apart(used, more):
    """It is no part of what the captures took; one without readings, such as one that was not tried, is passed over."""
    plan = ledgers.locked_plan("tiny-reference-cpu.cpu")
    role = plan.roles[0]
    at = Reading(used=used, held=0)
    graph = GraphCapture(role=role.role, entry=role.entries[0], seconds=1, memory=0, alone=0, readings=(at, at, at))
    unread = attrs.evolve(graph, readings=None, step=1)
    end = Reading(used=used + more, held=0)
    report = attrs.evolve(EMPTY, plan=plan, captured=(graph, unread), served_reading=end)
    found = summary(report)
    assert (found.later, found.accounts.device) == (more, 0)
    shown = next(s for s in sections(report, found) if s.name == "memory")
    assert shown.texts("note") == (f"from the last capture to the end, the device lost {size(more)}",)


@given(REPORTS)
def test_unused_graphs_are_those_that_served_nothing(report):
    """And the graphs are listed by their use."""
    numbers = summary(report)
    served = {(forward.role, forward.entry) for forward in report.forwards}
    unused = [g for g in report.captured if g.waiver is None and (g.role, g.entry) not in served]
    assert list(numbers.unused) == unused
    assert [used.forwards for used in numbers.graphs] == sorted(
        (used.forwards for used in numbers.graphs), reverse=True
    )
    line = next(s for s in sections(report, numbers) if s.name == "graphs").texts(None)[0]
    assert line.endswith(" more") == (len(unused) > MAX_NAMED)


@given(REPORTS)
def test_acceptance_is_there_with_a_drafter_only(report):
    """Its rate is a share, and a decode gains between one token and one more than its drafts."""
    found = summary(report).acceptance
    assert (found is None) == (report.plan.speculative is None)
    assert (found is None) == all(s.name != "acceptance" for s in sections(report, summary(report)))
    assume(found is not None)
    assert found.drafted == sum(step.drafted for step in report.steps)
    assert (found.rate is None) == (found.drafted == 0)
    assert found.rate is None or 0 <= found.rate <= 1
    assert found.decodes == sum(step.drafted_at[0] for step in report.steps if step.drafted_at)
    if found.length is not None:
        assert found.length * found.decodes == pytest.approx(found.decodes + found.accepted)
    assert (found.drafted, found.accepted) == (
        sum(place.drafted for place in found.positions),
        sum(place.accepted for place in found.positions),
    )
    for place, each in enumerate(found.positions):
        assert each.drafted == sum(step.drafted_at[place] for step in report.steps if len(step.drafted_at) > place)
        assert each.rate is None or 0 <= each.rate <= 1
    for shown in plain(report)["acceptance"]["positions"]:
        assert shown.keys() == {"drafted", "accepted", "rate"}


@given(REPORTS)
def test_the_data_is_json_and_comes_back_equal(report):
    """Strict JSON: no NaN, no infinity, no key that is no text."""

    def refuse(constant):
        raise AssertionError(constant)

    data = plain(report)
    assert json.loads(codec.dumps_json(data), parse_constant=refuse) == data


@given(REPORTS)
def test_the_data_has_a_row_for_all_that_happened(report):
    """Steps, forwards, graphs and requests, with the tokens that were generated."""
    data = plain(report)
    assert [(row["index"], row["drafted"]) for row in data["steps"]] == [
        (step.index, step.drafted) for step in report.steps
    ]
    assert [(row["mode"], row["padded_tokens"], row["reason"]) for row in data["forwards"]] == [
        (forward.mode.value, forward.padded_tokens, forward.reason) for forward in report.forwards
    ]
    assert [(row["name"], tuple(row["tokens"])) for row in data["requests"]] == [
        (served.name, served.tokens) for served in report.served
    ]
    entries = data["captured"]["entries"]
    assert len(entries) == len(report.captured)
    assert Counter(row["message"] for row in entries) == Counter(
        graph.waiver and graph.waiver.message for graph in report.captured
    )
    assert data["throughput"]["output_tokens"] == sum(len(row["tokens"]) for row in data["requests"])


@given(REPORTS, st.sampled_from((80, 120)))
def test_the_tables_fit_their_width(report, width):
    """Names of any kind are written as they are, and an interrupted run says so first."""
    text = printed(report, width)
    lines = [line.rstrip() for line in text.split("\n")]
    assert max(map(cell_len, lines)) <= width
    assert text.replace("\n", "").isprintable()
    assert ("INTERRUPTED" in lines[0]) == report.interrupted
    # Of several ranks, the first one's numbers are shown.
    titles = {line.removesuffix(" (rank 0)") for line in lines}
    assert titles >= {"Captured", "Served from", "Fallbacks", "Graphs used", "Steps", "Latency"}


@given(REPORTS)
def test_graphs_that_are_used_most_have_their_fingerprints(report):
    """Digest, nodes and kernels in the table as in the JSON; none where nothing read them."""
    numbers = summary(report)
    grids = grids_of(next(s for s in sections(report, numbers) if s.name == "graphs"))
    shown = [(row[3], row[5], row[6]) for grid in grids for row in grid.rows]
    used = [each["fingerprint"] for each in plain(report)["captured"]["entries"] if each["forwards"]]
    expected = [
        (NONE, NONE, NONE) if each is None else (each["topology"], f"{each['nodes']:,}", f"{len(each['kernels']):,}")
        for each in used[: len(shown)]
    ]
    assert shown == expected
    assert bool(shown) == bool(used)


@given(REPORTS)
def test_what_was_not_captured_is_named(report):
    """The largest dropped graph of each role and mode at start with its waiver's sentence, the others and those
    that had no turn by their number.
    """
    numbers = summary(report)
    warnings = next(s for s in sections(report, numbers) if s.name == "captured").texts("warning")
    kinds = {}
    started = [graph for graph in report.captured if graph.step is None]
    for graph in started:
        if graph.waiver is not None:
            kinds.setdefault((graph.role.value, graph.entry.mode.value), []).append(graph)
    for warning, ((role, mode), graphs) in zip(warnings, kinds.items(), strict=False):
        assert f"{role} {mode}" in warning
        assert graphs[0].waiver.message in warning
        assert (f"{len(graphs) - 1} smaller" in warning) == (len(graphs) > 1)
    assert len(warnings) == len(kinds) + (numbers.planned - report.plan.num_lazy > len(started))


def test_reporting_needs_neither_torch_nor_what_draws_the_page():
    """They are imported where the page is made, and torch never."""
    code = "import capture_planner_runner.report.run, capture_planner.report.page, sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib", "jinja2", "numpy"} & set(ran.stdout.split())
