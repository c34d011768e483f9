"""The record: verdicts tell the truth, and the page and the tables show all of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from rich.console import Console  # noqa: E402

from capture_planner.modes import GraphMode, Role  # noqa: E402
from capture_planner.report.page import page  # noqa: E402
from capture_planner.report.plain import plain  # noqa: E402
from capture_planner.report.terminal import tables  # noqa: E402
from capture_planner_runner.bench import record, verdicts  # noqa: E402
from capture_planner_runner.bench.record import BenchReport, TargetVerdict  # noqa: E402
from capture_planner_runner.ledger.rows import GraphCapture  # noqa: E402
from capture_planner_runner.report.bench import bench_report  # noqa: E402
from support.examples import at_most  # noqa: E402
from support.pages import check_plots  # noqa: E402
from support.tiny import planned  # noqa: E402

PLAN = planned(4, GraphMode.FULL_AND_PIECEWISE)
ENTRIES = [(role.role, entry) for role in PLAN.roles for entry in role.entries]
HOSTILE = ("<script>alert(1)</script>", "[bold]x[/b]", "a\x1b[31m", "&amp;")

seconds = st.floats(1e-7, 10)
counts = st.integers(1, 300)
sizes = st.integers(0, 1 << 36)
words = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20))


def lists(element: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    """Return few of them."""
    return st.lists(element, max_size=3).map(tuple)


graphs = st.sampled_from(ENTRIES).flatmap(
    lambda found: st.builds(record.GraphReplays, role=st.just(found[0]), entry=st.just(found[1]), times=counts)
)
captured = st.sampled_from(ENTRIES).flatmap(
    lambda found: st.builds(
        GraphCapture,
        role=st.just(found[0]),
        entry=st.just(found[1]),
        seconds=seconds,
        memory=sizes,
        alone=sizes,
        readings=st.none(),
        waiver=st.none(),
    )
)
decodes = st.builds(
    record.Decode,
    num_reqs=counts,
    graphs=lists(graphs),
    windows=counts,
    steps=counts,
    step=seconds,
    bare=seconds,
    eager=st.none() | seconds,
    host=seconds,
)
preparations = st.builds(
    record.Preparation,
    num_reqs=st.sampled_from([1, 64, record.MANY]),
    role=st.sampled_from(Role),
    backends=st.lists(words, min_size=1, max_size=2).map(tuple),
    steps=counts,
    step=seconds,
    stage=seconds,
    prepare=seconds,
    stock=st.none() | seconds,
)
chains = st.builds(
    record.ChainTiming,
    num_reqs=counts,
    steps=counts,
    fused=st.none() | seconds,
    single=seconds,
    eager=seconds,
    host=st.none() | seconds,
)
throughputs = st.builds(
    record.Throughput,
    num_requests=counts,
    prompt_tokens=counts,
    output_tokens=counts,
    tokens_per_second=st.floats(1, 1e6),
    other=st.none() | st.floats(1, 1e6),
    other_says=words,
)
costs = st.builds(record.CaptureCost, seconds=seconds, pool=sizes, driver=sizes)
capturings = st.builds(
    record.CaptureFigure,
    graphs=counts,
    first_seconds=seconds,
    first_compiled=seconds,
    first_driver=sizes,
    ours=costs,
    bare=st.none() | costs,
    captured=lists(captured),
)
pools = st.builds(
    record.Pools, shared=sizes, per_role=sizes, requests=counts, differing=st.lists(words, max_size=3).map(tuple)
)
absences = st.builds(record.AbsentFigure, figure=st.sampled_from(record.FIGURES), says=words, failed=st.booleans())
reports = st.builds(
    BenchReport,
    plan=st.just(PLAN),
    model=words,
    backends=st.dictionaries(words, words, max_size=2),
    facts=st.dictionaries(words, words, max_size=3),
    clock=st.sampled_from(["CUDA events", "perf_counter"]),
    page_size=counts,
    decode=lists(decodes),
    preparation=lists(preparations),
    chain=lists(chains),
    throughput=st.none() | throughputs,
    capture=st.none() | capturings,
    pools=st.none() | pools,
    absent=lists(absences),
    interrupted=st.booleans(),
)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.booleans())
def test_verdict_states_how_far_a_target_is_missed(wanted: float, reached: float, at_most: bool) -> None:
    """Met exactly where the value is on the right side; else the share of the target that lacks."""
    verdict = TargetVerdict(figure="decode", what="x", wanted=wanted, reached=reached, at_most=at_most)
    assert verdict.holds == (reached == wanted or (reached < wanted) == at_most)
    assert (verdict.missed_by == 0) == verdict.holds
    if not verdict.holds:
        sign = 1 if at_most else -1
        assert wanted * (1 + sign * verdict.missed_by) == pytest.approx(reached)


@at_most(25)
@given(reports)
def test_every_measured_target_has_a_verdict(report: BenchReport) -> None:
    """A ratio is judged as it stands in the record; what was not compared is not judged."""
    found = Counter(verdict.figure for verdict in verdicts(report))
    assert found["decode"] == len(report.decode)
    assert found["chain"] == 2 * sum(row.fused is not None for row in report.chain)
    assert found["throughput"] == (report.throughput is not None and report.throughput.other is not None)
    bare = report.capture and report.capture.bare
    ratios = report.capture and (report.capture.of_seconds, report.capture.of_memory)
    assert found["capture"] == (sum(ratio is not None for ratio in ratios) if bare and ratios else 0)
    judged = [row for row in report.preparation if row.role is Role.TARGET]
    assert found["preparation"] == sum(row.stock is not None or row.num_reqs == 256 for row in judged)


@at_most(25)
@given(reports)
def test_report_data_is_json_with_its_numbers(report: BenchReport) -> None:
    """Nothing in it is an object of ours."""
    data = json.loads(json.dumps(plain(report), allow_nan=False))
    assert [row["step"] for row in data["decode"]] == [row.step for row in report.decode]
    assert [row["overhead"] for row in data["decode"]] == [row.step / row.bare for row in report.decode]
    assert [row["fused"] for row in data["chain"]] == [row.fused for row in report.chain]
    assert [row["host"] for row in data["chain"]] == [row.host for row in report.chain]
    assert [row["one"] for row in data["chain"]] == [row.single / row.steps for row in report.chain]
    assert data["interrupted"] == report.interrupted
    assert (data["capture"] is None) == (report.capture is None)
    assert [each["holds"] for each in data["targets"]] == [each.holds for each in verdicts(report)]
    assert [each["message"] for each in data["absent"]] == [each.says for each in report.absent]


class Page(HTMLParser):
    """Reads a page; elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: Counter[str | None] = Counter()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids.update(value for name, value in attrs if name == "id")
        assert not any(name.startswith("on") for name, _ in attrs)
        links = [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        assert all(link.startswith("#") for link in links)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@settings(max_examples=8 if settings.default.max_examples >= 100 else 3)
@given(reports)
def test_report_page_is_complete_and_self_contained(report: BenchReport) -> None:
    """Balanced, with no script and no other file, a picture for each figure that is drawn."""
    text = page(bench_report(report))
    parsed = Page(text)
    assert parsed.open == []
    assert not parsed.tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert max(parsed.ids.values()) == 1
    check_plots(bench_report(report).charts(), text)
    drawn = set(re.findall(r'id="figure-(\w+)"', text))
    assert drawn == {
        name
        for name, is_there in {
            "decode": report.decode,
            "preparation": report.preparation,
            "chain": report.chain,
            "capture": report.capture and report.capture.captured,
        }.items()
        if is_there
    }
    assert ("INCOMPLETE" in text) == bool(report.failed)
    assert ("INTERRUPTED" in text) == report.interrupted
    assert text.count("missed by") == sum(not verdict.holds for verdict in verdicts(report))
    assert "Bench of tiny-llama: report of a bench" in unescape(text)


@at_most(15)
@given(reports)
def test_report_tables_can_be_printed(report: BenchReport) -> None:
    """Whatever names and sentences hold; each absence and each target is told."""
    console = Console(width=400, color_system=None, markup=False)
    with console.capture() as capture:
        console.print(tables(bench_report(report)))
    shown = capture.get()
    assert "\x1b" not in shown
    assert shown.count("missed by") == sum(not verdict.holds for verdict in verdicts(report))
    assert ("interrupted: the bench was stopped" in shown) == report.interrupted
    bounds = [row.host is not None and row.host < row.one for row in report.chain]
    assert shown.count("a chain saves only launches") == sum(bounds)
    slower = sum(row.host is not None for row in report.chain) - sum(bounds)
    assert shown.count("a chain saves host time too") == slower
    assert re.search(r"(?<!\d)1 (requests|draft decodes|windows|steps)\b", shown) is None
    for figure in {absent.figure for absent in report.failed}:
        assert f"{figure} broke: " in shown
    if report.pools is not None:
        assert ("the same tokens" in shown) == (not report.pools.differing)
