"""The page of a run: one valid, self-contained file with the numbers of the tables, of bounded size."""

import re
import sys
from collections import Counter
from functools import lru_cache
from html import unescape
from html.parser import HTMLParser

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode, Role
from capture_planner.report.page import page
from capture_planner.report.plots import MAX_POINTS
from capture_planner.report.printable import printable
from capture_planner.report.writing import ran
from capture_planner_runner.ledger.rows import Forward, GraphCapture, RequestResult, Step
from capture_planner_runner.ledger.session import RunReport
from capture_planner_runner.report.charts import Buckets, cumulative, thinned
from capture_planner_runner.report.run import run_report, sections
from capture_planner_runner.report.summary import summary
from support import ledgers
from support.pages import check_plots, grids_of

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page and keeps its elements and its text; elements must be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.cells = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.cells.append(data.strip())


def run_of(name, *, steps=0, requests=0, captured=True, **changes):
    """A run of a locked plan whose batches grow and shrink, with a prompt now and then."""
    plan = ledgers.locked_plan(name)
    dispatcher, most = Dispatcher(plan), plan.limits.max_num_reqs
    graphs = [(role.role, entry) for role in plan.roles for entry in role.entries] if captured else []
    forwards, taken, drafts = [], [], plan.speculative is not None
    for index in range(steps):
        num_reqs = 1 + index * 7 % most
        longest = plan.limits.max_num_tokens - num_reqs
        prompt = index * 31 % longest if index % 3 == 0 else 0
        for role in plan.roles:
            tokens = num_reqs + (prompt if role.role is not Role.DRAFT_DECODE else 0)
            answer = dispatcher.dispatch_counts(role.role, num_reqs, tokens, None if prompt else 1)
            forwards.append(
                Forward(
                    step=index,
                    role=role.role,
                    num_reqs=num_reqs,
                    num_tokens=tokens,
                    query_len=None if prompt else 1,
                    entry=answer.entry,
                    reason=answer.reason,
                    padded_tokens=answer.padded_tokens,
                    padded_reqs=answer.padded_reqs,
                    host_seconds=1e-5 * (1 + index % 97),
                    seconds=1e-3 * (1 + index % 89),
                )
            )
        taken.append(
            Step(
                index=index,
                num_reqs=num_reqs,
                num_tokens=num_reqs + prompt,
                prompts=prompt > 0,
                drafted=3 * num_reqs * drafts,
                accepted=index % (3 * num_reqs) * drafts,
                seconds=1e-3,
                waiting=index % 5,
            )
        )
    served = tuple(
        RequestResult(
            name=f"r{index}",
            prompt_tokens=9,
            output_tokens=5,
            first_token=0.01 * (1 + index),
            finished=0.02 * (1 + index) + 0.1,
        )
        for index in range(requests)
    )
    report = RunReport(
        plan=plan,
        model="a model",
        backends={"reference": "0.1.0"},
        host={"device": "cpu"},
        captured=tuple(
            GraphCapture(role=role, entry=entry, seconds=0.1, memory=0, alone=entry.num_tokens << 10)
            for role, entry in graphs
        ),
        forwards=tuple(forwards),
        steps=tuple(taken),
        served=served,
        buffers=1 << 20,
        kv_cache=1 << 30,
        capture_seconds=1.0,
        serve_seconds=2.0,
    )
    return attrs.evolve(report, **changes)


def long_run(count):
    """A run of more forwards than ``count``, which repeats 2,000 steps."""
    short = run_of(EAGLE, steps=2_000, requests=400)
    copies = count // len(short.forwards) + 1
    forwards = tuple(
        attrs.evolve(forward, step=forward.step + 2_000 * copy) for copy in range(copies) for forward in short.forwards
    )
    steps = tuple(attrs.evolve(step, index=step.index + 2_000 * copy) for copy in range(copies) for step in short.steps)
    return attrs.evolve(short, forwards=forwards, steps=steps, served=short.served * 50)


TINY, EAGLE, PLAIN = "tiny-reference-cpu.cpu", "qwen3-8b-eagle3.h100", "llama-3.1-8b.h100"
RUNS = {
    "long": lambda: long_run(20_000),
    "longest": lambda: long_run(200_000),
    "nothing": lambda: run_of(TINY, captured=False),
    "interrupted-before-anything": lambda: run_of(EAGLE, captured=False, interrupted=True),
    "captured-only": lambda: run_of(TINY, interrupted=True),
    "all-eager": lambda: run_of(TINY, steps=4, requests=2, captured=False),
    "no-drafter": lambda: run_of(PLAIN, steps=20, requests=3),
    "one-request": lambda: run_of(TINY, steps=1, requests=1),
    "cut-off-in-the-first-step": lambda: attrs.evolve(run_of(TINY, steps=1), steps=(), interrupted=True),
}


@lru_cache
def page_of(name):
    """Return a run with its page, which is drawn once."""
    report = RUNS[name]()
    return report, page(run_report(report))


def check(report, page):
    """What holds for the page of any report."""
    read = Page(page)
    assert read.open == []
    assert page.encode("utf-8")
    tags = {tag for tag, _ in read.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "image"}
    ids = Counter(value for _, attributes in read.elements for name, value in attributes if name == "id")
    assert max(ids.values()) == 1
    for _, attributes in read.elements:
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                assert value.startswith("#")
                assert value[1:] in ids
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert "@import" not in page
    assert ("INTERRUPTED" in page) == report.interrupted
    shown = set(read.cells)
    for section in sections(report, summary(report)):
        for text in (part for part in section.parts if isinstance(part, str)):
            assert not printable(text).strip() or printable(text).strip() in shown
        for row in (row for grid in grids_of(section) for row in grid.rows):
            for cell in row:
                text = ran(cell) if isinstance(cell, GraphMode) else printable(cell).strip()
                assert not text or text in shown
    assert report.plan.spec_digest in page
    check_plots(run_report(report).charts(), page)


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize("name", [pytest.param(name, marks=THOROUGH if name == "longest" else ()) for name in RUNS])
def test_the_page_of_every_kind_of_run_is_whole(name):
    """Also where there is nothing to draw; a picture is there where there is something to show."""
    report, html = page_of(name)
    check(report, html)
    drawn = set(re.findall(r'id="figure-(\w+)"', html))
    wanted = {
        "memory": bool(report.captured),
        "batches": bool(report.forwards),
        "padding": any(forward.entry for forward in report.forwards),
        "steps": bool(report.steps),
        "acceptance": report.plan.speculative is not None and any(step.drafted for step in report.steps),
        "latency": bool(report.forwards) or bool(report.served),
    }
    assert drawn == {figure for figure, is_wanted in wanted.items() if is_wanted}


@settings(max_examples=max(settings.default.max_examples // 6, 3))
@given(ledgers.reports())
def test_the_page_of_any_report_is_whole(report):
    """Balanced, self-contained, and with every number of the tables."""
    check(report, page(run_report(report)))


@pytest.mark.parametrize("hostile", ledgers.HOSTILE)
def test_names_are_escaped(hostile):
    """Wherever they come from: model, machine, backend."""
    report = run_of(TINY, model=hostile, backends={hostile: hostile}, host={hostile: hostile}, captured=False)
    html = page(run_report(report))
    check(report, html)
    assert hostile.isalnum() or "<" not in hostile or hostile not in html
    assert unescape(html).count(printable(hostile)) == 5


@pytest.mark.parametrize(("name", "count"), [("long", 20_000), pytest.param("longest", 200_000, marks=THOROUGH)])
def test_the_page_of_a_long_run_stays_small(name, count):
    """Below 2 MB."""
    report, html = page_of(name)
    assert len(report.forwards) > count
    assert len(html.encode()) < 2_000_000
    assert f"{len(report.steps):,} steps of" in html


def test_the_same_run_gives_the_same_page():
    """To the byte: pages can be compared."""
    assert page(run_report(RUNS["one-request"]())) == page_of("one-request")[1]


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_missing_library_is_named_with_its_remedy(missing, monkeypatch):
    """The page is the only part that needs them."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(CapturePlannerError, match=rf"needs {missing}.*pip install '\.\[pages\]'"):
        page(run_report(run_of(TINY, captured=False)))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=3 * MAX_POINTS))
def test_a_cumulative_curve_tells_the_truth_where_it_has_a_point(values):
    """From 0 at the least to 1 at the most, by few points, each the share of values up to there."""
    x, y = cumulative(values)
    assert len(x) == len(y) <= MAX_POINTS + 2
    assert (x[0], y[0], x[-1], y[-1]) == (min(values), 0, max(values), 1)
    ordered = sorted(values)
    for at, share in zip(x[1:], y[1:], strict=True):
        rank = round(share * len(values))
        assert ordered[rank - 1] == at


@given(st.dictionaries(st.tuples(st.integers(0, 60), st.integers(0, 60)), st.integers(1, 9), max_size=900))
def test_thinned_points_are_points_and_stand_for_all(counts):
    """None is invented, none is forgotten in the counts, and few are all."""
    points = thinned(counts)
    assert len(points) <= MAX_POINTS
    assert {at for at, _ in points} <= set(counts)
    assert sum(count for _, count in points) == sum(counts.values())
    assert len(counts) > MAX_POINTS or dict(points) == counts


@given(st.integers(0, 5000), st.integers(1, 3 * MAX_POINTS), st.data())
def test_bucket_means_keep_the_total(first, length, data):
    """Mean by steps gives the sum back; what belongs to no step that ended is left out."""
    steps = [
        Step(
            index=first + i,
            num_reqs=data.draw(st.integers(0, 9)) if i < 20 else i % 5,
            num_tokens=0,
            prompts=0,
            drafted=0,
            accepted=0,
            seconds=0.0,
            waiting=0,
        )
        for i in range(length)
    ]
    buckets = Buckets.of(steps)
    means = buckets.means([(s.index, s.num_reqs) for s in steps] + [(first + length + MAX_POINTS, 1e9)])
    assert len(means) == len(buckets.steps) <= MAX_POINTS
    assert sum(buckets.steps) == length
    assert buckets.edges[0] == first
    assert buckets.edges[-2] < first + length <= buckets.edges[-1]
    total = sum(mean * count for mean, count in zip(means, buckets.steps, strict=True))
    assert total == pytest.approx(sum(step.num_reqs for step in steps))
