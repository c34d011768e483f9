"""The command ``conformance``: every option, what it refuses, exit codes, and commands that show it again."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import capture_planner_conformance as conformance
from capture_planner.cli import cli
from capture_planner.modes import GraphSupport, Role
from capture_planner.plugins import registry
from capture_planner.records.backend import Support
from capture_planner_conformance.cli.conformance import DTYPES, SHAPES, shapes_named
from capture_planner_conformance.cli.suite import _jobs
from capture_planner_conformance.shapes import CANDIDATES
from capture_planner_conformance.tampering import Attack
from capture_planner_runner.numerics.tolerance import TOLERANCES
from support import conformance_command
from support.commands import Run
from support.conformance_command import CASE, FEW, ONE, PLAIN, TWO_THEN_ONE, FaultyBackends, Unread

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Run) -> Iterator[Run]:
    """Return a function that calls ``conformance`` in an empty folder, with faulty backends installed."""
    load, before = registry.load_backends, torch.get_num_threads()
    monkeypatch.setattr(
        registry, "load_backends", lambda *plugins, **options: load(FaultyBackends(), *plugins, **options)
    )
    monkeypatch.chdir(tmp_path)
    yield partial(call, "conformance")
    torch.set_num_threads(before)


# Passing ---------------------------------------------------------------------------------------


def test_a_healthy_backend_passes_and_the_report_says_what_was_tried(run: Run) -> None:
    """Sections in their order; nothing but what was asked for is left in the folder."""
    ran = run("reference", *FEW, "--html", "page.html", "-o", "kept.json", "--threads", "1")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("Conformance of reference: passed\n")
    titles = re.findall(r"^([A-Z][a-z]+(?: tried)?)$", ran.out, re.M)
    assert titles == ["Checks", "Steps", "Forwards", "Shapes", "Not tried"]
    assert "the largest batches had " in ran.out
    assert {path.name for path in Path().iterdir()} == {"page.html", "kept.json"}
    page = Path("page.html").read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert 'id="figure-forwards"' in page
    assert json.loads(Path("kept.json").read_text("utf-8"))["passed"] is True


def test_json_has_the_documented_keys_and_is_the_same_for_a_seed(run: Run) -> None:
    """docs/extending/conformance.md lists them, for a search and for a case; only seconds differ in two processes."""
    text = (ROOT / "docs" / "extending" / "conformance.md").read_text("utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text.partition("| key |")[2], re.M)
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    few = ("reference", *FEW, *ONE, "--seed", "0", "--no-progress", "--format", "json")
    searched, same = run(*few).data, run(*few, "--jobs", "2").data
    assert searched["seconds"] > 0
    assert searched | {"seconds": 0} == same | {"seconds": 0}
    again = run("reference", "--case", CASE, "--format", "json").data
    assert set(searched) == set(again) == documented
    assert searched["profile"] == {"name": "own", "examples": 2, "steps": 4, "long_steps": 0}
    assert (again["profile"], again["passed"]) == (None, True)
    assert sum(each["count"] for each in searched["forwards"]) > 0
    assert searched["largest"]["num_tokens"] >= searched["largest"]["num_reqs"] > 0


def test_scenes_are_as_they_were_asked_for(run: Run) -> None:
    """Shapes: each once, in the place of what would be tried. Without drafts no drafter runs.

    The report has what larger and longer scenes would have shown among what was not tried.
    """
    scenes = (*ONE, "--heads", "2:2", "--no-window", "--drafts", "0", "--max-reqs", "2")
    data = run("reference", *FEW, *scenes, "--format", "json").data
    reqs = data["largest"]["num_reqs"]
    assert reqs <= 2
    assert any(line.startswith(f"batches of more than {reqs} request") for line in data["untried"])
    assert data["longest"]["steps"] > 0

    assert [(shape["heads"], shape["kv_heads"]) for shape in data["shapes"]] == [(2, 1), (2, 2)]
    assert {shape["dtype"] for shape in data["shapes"]} == {"float32"}
    assert {each["role"] for each in data["forwards"]} == {"target"}
    assert data["drafts"] == [0]


@given(
    dtype=st.sets(st.sampled_from(["float32", "bfloat16"])),
    heads=st.sets(st.sampled_from([(2, 1), (4, 2)])),
    head_dim=st.sets(st.integers(1, 8), max_size=2),
    page_size=st.sets(st.integers(1, 8), max_size=2),
    window=st.sampled_from([None, True, False]),
)
def test_what_is_named_holds_in_every_shape(
    dtype: set[str], heads: set[tuple[int, int]], head_dim: set[int], page_size: set[int], window: bool | None
) -> None:
    """All combinations of it, none twice; what was not named is as it was in some candidate."""
    named: dict[str, Any] = dict.fromkeys(SHAPES, ())
    named |= {"dtype": dtype, "heads": heads, "head_dim": head_dim, "page_size": page_size, "window": window}
    for candidates in CANDIDATES:
        shapes = shapes_named(candidates, named)
        assert len(set(shapes)) == len(shapes)
        for values, of in (
            (dtype, lambda shape: shape.dtype),
            (heads, lambda shape: (shape.heads, shape.kv_heads)),
            (head_dim, lambda shape: shape.head_dim),
            (page_size, lambda shape: shape.page_size),
            (set() if window is None else {window}, lambda shape: shape.windowed),
        ):
            assert {of(shape) for shape in shapes} == (values or {of(shape) for shape in candidates})


def test_profiles_are_those_of_the_suite(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--thorough`` is ``--profile thorough``; without either it is the default one."""
    asked: list[Any] = []
    healthy = conformance.conform

    def conform(on: Any, choices: Any, *progress: Any) -> Any:
        asked.append(choices)
        few = conformance.SearchProfile(name="few", examples=1, steps=2)
        small = {"profile": few, "audits": False, "drafts": (0,), "max_reqs": 2, "jobs": 1}
        return healthy(on, attrs.evolve(choices, **small), *progress)

    monkeypatch.setattr(importlib.import_module("capture_planner_conformance.cli.suite"), "conform", conform)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16), raising=False)
    others = ("--shrink", "--no-shrink", "--no-audits", "-j", "3")
    for arguments in ((), ("--thorough",), ("--profile", "thorough"), others):
        assert run("reference", *ONE, *arguments).code == 0
    assert [choices.profile.name for choices in asked] == ["default", "thorough", "thorough", "default"]
    assert [(choices.audits, choices.shrink) for choices in asked] == [*[(True, True)] * 3, (False, False)]
    assert [choices.jobs for choices in asked] == [9, 16, 16, 3]


@pytest.mark.parametrize(("gib", "jobs"), [(139, 9), (79, 6), (15, 1)])
def test_processes_have_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch, gib: int, jobs: int) -> None:
    """Each may hold 12 GiB at a time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16), raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib << 30, 140 << 30))
    assert _jobs(conformance.DEFAULT, torch.device("cuda")) == jobs


# Findings --------------------------------------------------------------------------------------


def test_a_broken_backend_is_found_and_its_command_shows_it_again(run: Run) -> None:
    """Exit code 2 both times, from a text or a file; the healthy backend passes the same case."""
    ran = run("baked", *PLAIN, "-o", "kept.json", "--html", "page.html")
    assert ran.code == 2
    assert "does not hold: a replay computes attention for real rows" in ran.out
    assert "  1. set up " in ran.out
    assert "  2. request 0 arrives: a prompt of " in ran.out
    (command,) = (line for line in ran.out.splitlines() if line.startswith("capture-planner "))
    data = json.loads(Path("kept.json").read_text("utf-8"))
    (finding,) = data["findings"]
    assert (finding["check"], finding["command"], data["passed"]) == ("rows", command, False)
    assert finding["entry"]["mode"] == "FULL"
    page = Path("page.html").read_text("utf-8")
    assert "1 finding: it does not hold that a replay computes attention for real rows" in page
    words = shlex.split(command)[2:]
    once = run(*words)
    assert once.code == 2
    assert "does not hold: a replay computes attention for real rows" in once.out
    assert command in once.out
    Path("case.json").write_text(words[-1] + "\n", "utf-8")
    assert run("reference", "--case", "@case.json").code == 0


def test_a_declaration_that_changes_is_a_finding_with_a_command(run: Run) -> None:
    """There is no case, so the command asks for the declarations again."""
    ran = run("moody", *FEW, *ONE, "--window")
    assert ran.code == 2
    assert "Finding 1: declared" in ran.out
    command = next(line for line in ran.out.splitlines() if line.startswith("capture-planner "))
    assert "--max-model-len 16 --window" in command
    assert run(*shlex.split(command)[2:]).code == 2


def test_an_over_declared_field_is_a_warning_and_with_strict_a_finding(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audits are told to look at that field alone, in one case."""
    audit = importlib.import_module("capture_planner_conformance.audits")
    attackable, cases = audit.attackable, audit._cases

    def few(role: Any) -> dict[str, Any]:
        return {
            key: field for key, field in attackable(role).items() if role.role is Role.TARGET and key.endswith("wanted")
        }

    monkeypatch.setattr(audit, "attackable", few)
    monkeypatch.setattr(audit, "_cases", lambda *given: [next(cases(*given))])
    one_scene = (*PLAIN, "--examples", "1", "--audits", "--progress")
    ran = run("greedy", *one_scene)
    assert ran.code == 0
    assert "over-declared: target " in ran.out
    assert "scenes" in ran.err
    assert "attacks" in ran.err
    data = run("greedy", *one_scene, "--strict", "--format", "json").document(2)
    assert data["findings"] == []
    assert [each["verdict"] for each in data["fields"]] == ["over-declared"]
    assert {each["attack"] for each in data["audited"]} == {attack.value for attack in Attack}


def test_an_attack_is_done_again(run: Run) -> None:
    """Exit code 2 where it changes a real row, and 0 where it does not; its own command is the same."""
    data = run("reference", *TWO_THEN_ONE, "target slot_mapping other fill", "--format", "json").document(2)
    (attack,) = data["audited"]
    assert (attack["field"], attack["matters"], data["findings"]) == ("slot_mapping", True, [])
    assert run(*shlex.split(attack["command"])[2:]).code == 2
    assert run("reference", *TWO_THEN_ONE, "target sampled_rows stale tail").code == 0


def test_an_interruption_ends_in_a_report_of_what_was_done(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 130, and nothing claims that it passed."""
    machine = importlib.import_module("capture_planner_conformance.machine")
    done: list[object] = []
    run_step = machine.run_step

    def interrupted(stage: Any, step: object) -> bool:
        done.append(step)
        if len(done) > 8:
            raise KeyboardInterrupt
        return bool(run_step(stage, step))

    monkeypatch.setattr(machine, "run_step", interrupted)
    ran = run("reference", *FEW, "--output", "kept.json")
    assert ran.code == 130
    assert "stopped before its end" in ran.out
    data = json.loads(Path("kept.json").read_text("utf-8"))
    assert (data["interrupted"], data["passed"]) == (True, False)
    assert data["scenes"] > 0


def test_a_case_says_what_ran_and_what_did_not(run: Run) -> None:
    """A step that does not apply is named, and what was done is counted, as in a search."""
    ran = run("reference", "--case", CASE.replace('"steps":[', '"steps":[{"do":"depart","request":4},'))
    assert ran.code == 0
    assert "step 1 of the case did not apply and was left out" in ran.out
    assert "Forwards" in ran.out


@pytest.mark.parametrize(("field", "code"), [("slot_mapping", 2), ("seq_lens", 0)])
def test_an_attack_says_whether_it_matters(run: Run, field: str, code: int) -> None:
    """On one request in a graph of three: slots behind it are somebody's, lengths are nobody's."""
    ran = run("reference", *TWO_THEN_ONE, f"target {field} other fill", "--format", "json")
    assert ran.document(code)["passed"] is (code == 0)
    said = run("reference", *TWO_THEN_ONE, f"target {field} other fill")
    assert ("changes real rows" in said.out) is (code == 2)
    assert ("changes no real row of this case" in said.out) is (code == 0)


# Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("referense",), "no backend named 'referense' is installed; did you mean 'reference'?"),
        (("reference", "--environment", "h200x"), "no environment is named 'h200x'"),
        (("reference", "--dtype", "int4"), "'int4'"),
        (("reference", "--heads", "3:2"), "'3:2': Q must be a multiple of KV"),
        (("reference", "--heads", "1000000:1"), "'1000000:1': each number must be from 1 to 256"),
        (("reference", "--heads", "4:0"), "'4:0': each number must be from 1 to 256"),
        (("reference", "--heads", "4"), "'4' is not two whole numbers"),
        (("reference", "--drafts", "1,x"), "'1,x': give whole numbers from 0 to 8"),
        (("reference", "--drafts", "9"), "'9': give whole numbers from 0 to 8"),
        (("reference", "--examples", "0"), "--examples"),
        (("reference", "--thorough", "--profile", "default"), "--thorough and --profile default: give one"),
        (("reference", "--strict", "--no-audits"), "--strict goes with audits"),
        (("reference", "--attack", "target seq_lens shrunk"), "--attack goes with --case"),
        (("reference", "--case", CASE, "--seed", "1"), "--seed goes with a search, so without --case"),
        (("reference", "--case", CASE, "--head-dim", "8"), "--head-dim goes with a search"),
        (("reference", "--case", CASE, "--attack", "target x gone"), "--attack 'target x gone': give a role"),
        (("reference", "--case", "{}"), "not a case of the conformance suite"),
        (("reference", "--case", CASE.replace("[0,1,0]", "[0,1]")), "steps[1].rows[0]: expected"),
        (("reference", "--case", CASE.replace("float32", "int4")), "'int4' is not a valid DataType"),
        (
            ("reference", "--case", CASE.replace('"prompt":3', '"prompt":"3"')),
            "steps[0].prompt: expected an integer, got '3'",
        ),
        (("reference", "--case", "@nowhere.json"), "--case @nowhere.json: No such file"),
        (("reference", "-o", "nowhere/x.json"), "--output nowhere/x.json: no such folder"),
        (("reference", "--html", "x", "-o", "x"), "--html x is also the file of --output"),
        (("reference", "--case", "@case.json", "-o", "case.json"), "case.json is also the file of --case"),
    ],
)
def test_what_cannot_be_done_is_refused(run: Run, arguments: tuple[str, ...], says: str) -> None:
    """In a sentence, with exit code 1, before anything runs."""
    Path("case.json").write_text(CASE, "utf-8")
    ran = run(*arguments)
    assert (ran.code, ran.out) == (1, "")
    assert says in " ".join(ran.err.split())


@pytest.mark.parametrize("named", [(), ONE])
def test_a_backend_that_runs_nothing_here_is_an_error_with_its_reasons(
    run: Run, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]
) -> None:
    """It neither passes nor fails."""
    never = Support(level=GraphSupport.NEVER, reason="It is tired of this processor.")
    monkeypatch.setattr(Unread, "support", lambda self, *asked: never)
    ran = run("greedy", *FEW, *named)
    assert (ran.code, ran.out) == (1, "")
    assert "It is tired of this processor." in ran.err


def test_another_machine_is_planned_for_where_it_can_run_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's plan needs a GPU; the command that shows a finding again names the environment."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = run("reference", "-e", "h100", *FEW)
    assert refused.code == 1
    assert "this machine has no CUDA device" in refused.err
    data = run("moody", "-e", "cpu", "--threads", "2", *FEW, *ONE, "--format", "json").document(2)
    assert data["environment"]["name"] == "cpu"
    assert shlex.split(data["findings"][0]["command"])[3:7] == ["-e", "cpu", "--threads", "2"]


def test_without_hypothesis_the_error_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the suite is imported."""
    find = importlib.util.find_spec

    def found(name: str, *package: Any) -> Any:
        return None if name == "hypothesis" else find(name, *package)

    def imported(*given: object) -> NoReturn:
        raise AssertionError("the suite ran")

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(importlib.import_module("capture_planner_conformance.cli.suite"), "run_suite", imported)
    ran = run("reference")
    assert ran.code == 1
    assert "the suite needs hypothesis; install capture-planner-conformance with its dependencies" in ran.err


def test_a_shape_can_be_named_in_every_dtype_that_is_compared() -> None:
    """And in no other: a cache of eight bits has no tolerance."""
    assert set(DTYPES) == {str(dtype).removeprefix("torch.") for dtype in TOLERANCES}


def test_every_option_of_conformance_has_a_test() -> None:
    """A new option needs a test."""
    text = "".join(Path(file).read_text("utf-8") for file in (__file__, conformance_command.__file__))
    command = cli.commands["conformance"]
    options = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    tried = set(re.findall(r'"(--?[\w-]+)"', text))
    assert {name for name in options if name.startswith("--")} <= tried
