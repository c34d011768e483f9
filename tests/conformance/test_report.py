"""The report of the conformance suite: the same numbers as tables, page and data, whatever was found."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import capture_planner_conformance as suite
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.report.page import page
from capture_planner.report.plain import plain
from capture_planner.report.terminal import tables
from capture_planner_conformance.audits import AuditResult, Verdict, verdicts
from capture_planner_conformance.report import Conformance, attempts, conformance_report
from capture_planner_conformance.scene import Arrive, Depart, Move, Reload, RunBatch, Serve, describe_case
from capture_planner_conformance.shapes import CANDIDATES, RefusedShape
from capture_planner_conformance.tampering import Attack
from support.examples import at_most
from support.pages import check_plots

SHAPES = [shape for shapes in CANDIDATES for shape in shapes]
WORDS = st.text("abc '\"$`\\<&[]", max_size=8)
NUMBERS = st.integers(0, 99)
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=3).map(tuple)
STEPS = st.one_of(
    st.builds(Arrive, prompt=NUMBERS, computed=NUMBERS, shares=st.none() | NUMBERS),
    st.builds(Depart, request=NUMBERS),
    st.builds(Move, request=NUMBERS),
    st.builds(Reload, seed=NUMBERS),
    st.builds(RunBatch, rows=ROWS),
    st.builds(Serve, requests=ROWS),
)
CASES = st.builds(suite.Case, scene=suite.scenes(SHAPES), steps=st.lists(STEPS, max_size=5).map(tuple))
ENTRY = Entry(mode=GraphMode.FULL, num_tokens=4, num_reqs=4, query_len=1)
FINDINGS = st.builds(
    suite.Failure,
    check=st.sampled_from(suite.Check),
    message=WORDS,
    role=st.none() | st.sampled_from(Role),
    entry=st.none() | st.just(ENTRY),
    batch=WORDS,
    field=WORDS,
    axis=WORDS,
    causes=st.lists(WORDS, max_size=2).map(tuple),
    case=st.just("") | CASES.map(suite.dumps),
)
AUDITED = st.builds(
    AuditResult,
    role=st.sampled_from(Role),
    group=st.just(""),
    field=st.sampled_from(["seq_lens", "layers.mine"]),
    axis=st.just("request"),
    declared_by=st.sampled_from(["runner", "acme"]),
    attack=st.sampled_from(Attack),
    matters=st.booleans(),
    entry=st.none() | st.just(ENTRY),
    case=CASES.map(suite.dumps),
)
COUNTS = st.integers(0, 5000)
KEYS = [f"{role.value} {mode.value}" for role in Role for mode in GraphMode]
LOGS = st.builds(
    suite.Log,
    examples=COUNTS,
    steps=st.dictionaries(st.sampled_from(["arrive", "forward", "serve"]), COUNTS).map(Counter),
    forwards=st.dictionaries(st.sampled_from(KEYS), COUNTS).map(Counter),
    largest=st.tuples(COUNTS, COUNTS),
)
REPORTS = st.builds(
    Conformance,
    backend=st.just("acme"),
    distribution=st.just("acme-planner"),
    version=st.just("1.2"),
    environment=st.just(Environment(name="here", device=Device(kind=DeviceKind.CPU, name="x86_64", memory=1 << 30))),
    differences=st.lists(WORDS, max_size=1).map(tuple),
    host=st.just({"device": "x86_64", "torch": "2.13"}),
    seed=COUNTS,
    profile=st.none() | st.just(suite.DEFAULT),
    drafts=st.just((0, 2)),
    base=st.just(("capture-planner", "conformance", "acme", "-e", "it's here.yaml")),
    named=st.just(("--head-dim", "8")),
    outcome=st.builds(
        suite.SuiteResult,
        shapes=st.lists(st.sampled_from(SHAPES), max_size=2).map(tuple),
        refused=st.lists(st.builds(RefusedShape, st.sampled_from(SHAPES), WORDS), max_size=2).map(tuple),
        log=LOGS,
        failures=st.lists(FINDINGS, max_size=2).map(tuple),
        audited=st.lists(AUDITED, max_size=4).map(tuple),
        seconds=st.floats(0, 1000),
    ),
    interrupted=st.booleans(),
)


def text(report: Conformance) -> str:
    """Return the tables at a width that folds nothing."""
    console = Console(width=2000, color_system=None, markup=False)
    with console.capture() as capture:
        console.print(tables(conformance_report(report)))
    return capture.get()


@at_most(3)
@given(report=REPORTS)
def test_tables_and_page_have_what_was_found_and_tried(report: Conformance) -> None:
    """Every finding with its law and steps, every count, every verdict; the page is of bounded size."""
    written = conformance_report(report)
    shown, html = text(report), unescape(page(written))
    check_plots(written.charts(), page(written))
    assert len(html) < 2_000_000
    for number, finding in enumerate(report.outcome.failures, 1):
        for said in (f"Finding {number}: {finding.check.value}", finding.check.law, *finding.causes):
            assert said.strip() in shown
            assert said in html
        if finding.case:
            for index, step in enumerate(describe_case(suite.loads(finding.case)), 1):
                assert f"{index}. {step}" in shown
        assert report.command(finding.case) in html
    for key, count in report.log.forwards.items():
        if report.profile is not None and count:
            role, mode = key.split()
            assert re.search(rf"^ *{role} +{'eager' if mode == 'NONE' else mode} +{count:,} *$", shown, re.M)
    for (role, field), verdict in verdicts(report.outcome.audited).items():
        assert re.search(rf"^ *{role.value} +{re.escape(field)} .*{verdict.value}", shown, re.M)
        over = verdict is Verdict.OVER_DECLARED
        assert (f"over-declared: {role.value} {field}" in shown) == over
    assert ("passed" in shown.splitlines()[0]) == (not report.outcome.failures and not report.interrupted)


@given(report=REPORTS, other=st.floats(0, 1000))
def test_data_is_json_and_only_the_seconds_differ(report: Conformance, other: float) -> None:
    """A report is what was done, not when; each command is that of its case, whatever has to be quoted."""
    data = json.loads(json.dumps(plain(report)))
    later = attrs.evolve(report, outcome=attrs.evolve(report.outcome, seconds=other))
    assert {**plain(later), "seconds": 0} == {**plain(report), "seconds": 0}
    assert data["passed"] == (not data["findings"] and not data["interrupted"])
    for given_, kept in zip(report.outcome.failures, data["findings"], strict=True):
        words = shlex.split(kept["command"])
        assert words[: len(report.base)] == list(report.base)
        if given_.case:
            assert words[len(report.base) :] == ["--case", given_.case]
            assert len(kept["steps"]) == 1 + len(suite.loads(given_.case).steps)
        else:
            assert words[len(report.base) :] == [*report.named, "--examples", "1", "--no-audits"]
    for attack in data["audited"]:
        words = shlex.split(attack["command"])
        named = f"{attack['role']} {attack['field']} {attack['attack']}"
        assert words[-2:] == (["--attack", named] if attack["matters"] else [])


@given(case=CASES)
def test_a_case_is_told_step_by_step(case: suite.Case) -> None:
    """A line each, the scene first; requests have the number of their arrival, which steps name."""
    told = describe_case(case)
    assert len(told) == 1 + len(case.steps)
    assert str(case.scene.shape) in told[0]
    assert case.scene.mode.value in told[0]
    arrivals = [line for line, step in zip(told[1:], case.steps, strict=True) if isinstance(step, Arrive)]
    assert all(line.startswith(f"request {number} arrives") for number, line in enumerate(arrivals))
    for line, step in zip(told[1:], case.steps, strict=True):
        numbers = {int(number) for number in re.findall(r"\d+", line)}
        match step:
            case Depart(request=request) | Move(request=request):
                assert numbers == {request}
            case RunBatch(rows=rows):
                assert {number for request, count, _ in rows for number in (request, count)} <= numbers
            case Serve(requests=requests):
                assert {number for prompt, output, _ in requests for number in (prompt, output)} <= numbers


@given(case=CASES)
def test_a_case_is_read_as_it_was_written(case: suite.Case) -> None:
    """Types are checked on the way, and refuse nothing that the suite draws."""
    assert suite.loads(suite.dumps(case)) == case


@given(log=LOGS)
def test_a_check_counts_what_it_was_tried_on(log: suite.Log) -> None:
    """A check without forwards, scenes, loads or steps of its own has not held."""
    counts = {
        "forward": sum(log.forwards.values()),
        "scene": log.examples,
        "load": log.steps["serve"],
        "step": log.steps["forward"],
        "shape": 1,
    }
    for check in suite.Check:
        count, unit = attempts(check, log, 1)
        drafts = sum(n for name, n in log.forwards.items() if name.startswith("draft_"))
        assert count == (drafts if check is suite.Check.STATE else counts[unit]), check


def _result(case: str, date: str, folder: Path, **changed: Any) -> None:
    result = {
        "case": case,
        "backend": case,
        "host": {"torch": "2.13.0", "driver": "580.1"},
        "passed": True,
        "findings": [],
        "scenes": 2000,
        "steps": {"forward": 1200},
        "forwards": [{"role": "target", "mode": "FULL", "count": 7}],
        "audited": [],
        "fields": [],
    }
    made = {
        "provenance": {"date": date, "hardware": {"cpu": "a CPU", "gpu": "a GPU"}, "packages": {}},
        "results": [{**result, **changed}],
    }
    (folder / f"conformance-{case}-{date[:10]}.json").write_text(json.dumps(made), "utf-8")


def test_the_table_of_the_docs_has_the_newest_result_of_each_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not measured has a row that says so; what was found or broke stands below."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools" / "docs")
    tables = importlib.import_module("conformance_tables")
    assert tables.kept(tmp_path).count("not measured") == len(tables.BACKENDS)
    _result("triton", "2026-11-21T07:00:00+00:00", tmp_path, scenes=3)
    _result("triton", "2026-11-22T07:00:00+00:00", tmp_path)
    finding = {"check": "rows", "message": "a row is off"}
    _result("flashinfer", "2026-11-22T07:00:00+00:00", tmp_path, passed=False, findings=[finding])
    _result("reference", "2026-11-22T07:00:00+00:00", tmp_path, broke="RunError: no")
    _result("other", "2026-11-22T07:00:00+00:00", tmp_path, skipped="no device")
    shown = tables.kept(tmp_path)
    assert "| triton | 2026-11-22 | a GPU | torch 2.13.0, driver 580.1 | passed | 2,000 | 1,200 | 7 | 0 |" in shown
    assert "| flash_attention | - | - | - | not measured |" in shown
    assert "- flashinfer: rows: a row is off" in shown
    assert "- reference broke: RunError: no" in shown
    assert "other" not in shown
