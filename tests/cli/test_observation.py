"""Observations on the command line: wherever a plan or an engine's command line goes, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capture_planner import codec
from capture_planner.codec.shipped import find_environment
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines import emulate
from capture_planner.measuring.recorder import Recorder
from capture_planner.modes import Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.observation import Observation
from support.commands import PLAN, SPEC, Run, edited
from support.observing import observation_of


@pytest.fixture
def of_plan(tmp_path: Path) -> str:
    """What an engine did under a plan: one batch in ten ran eager."""
    plan = codec.load_plan(PLAN)
    recorder = Recorder(tmp_path, "of-plan")
    recorder.begin(replace(observation_of(plan), device="NVIDIA H100", kv_blocks=4321, capture_seconds=2.5))
    entry = Dispatcher(plan).dispatch(Batch.decode(Role.TARGET, 5, 4)).entry
    graph = plan.role(Role.TARGET).entries.index(entry)
    for step in range(50):
        eager = step % 10 == 0
        recorder.count(Role.TARGET, 5, 20, 4, True, 0, None if eager else graph, Reason.RANK if eager else None)
        recorder.sample(Role.TARGET, 5, 20, 4, True, 0, 1.25)
    recorder.draft([50, 50, 50], [40, 20, 10])
    recorder.close()
    return str(recorder.path)


@pytest.fixture
def of_flags(tmp_path: Path) -> str:
    """What vLLM did with its own flags, right after capture."""
    emulation = emulate(
        "vllm", ["--max-num-seqs", "64", "--cudagraph-capture-sizes", "1", "48"], find_environment("h100")
    )
    path = tmp_path / "of-flags.yaml"
    codec.write(path, codec.dumps(observation_of(emulation)))
    return str(path)


@pytest.mark.parametrize(
    ("accepted", "wrong"),
    [
        ("[40, 51, 10]", "accepted[1]: expected at most 50, as drafted, got 51"),
        ("[40]", "accepted: 1 positions, drafted has 3"),
        ("[40, 20, 10, 0]", "accepted: 4 positions, drafted has 3"),
    ],
)
def test_more_accepted_than_drafted_is_refused(run: Run, of_plan: str, accepted: str, wrong: str) -> None:
    """Of each position, with its place in the file."""
    edited("wrong.yaml", of_plan, ("accepted: [40, 20, 10]", f"accepted: {accepted}"))
    line = 1 + Path("wrong.yaml").read_text("utf-8").splitlines().index(f"accepted: {accepted}")
    shown = run("show", "wrong.yaml")
    assert shown.code == 1
    assert f"error: wrong.yaml:{line}:" in shown.err
    assert wrong in shown.err


def test_show_has_what_was_captured_and_what_ran(run: Run, of_plan: str) -> None:
    shown = run("show", of_plan)
    assert shown.code == 0
    for text in ("vllm 0.33.0: 126 graphs, 50 passes, 10.0% eager", "NVIDIA H100", "4,321 blocks", "2.5 s"):
        assert text in shown.out
    assert "draft 1: 80.0%, draft 2: 40.0%, draft 3: 20.0%, 2.40 tokens" in shown.out
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["eager", "5", "10.0%", "rank"] in rows
    assert any(row[:6] == ["5", "requests", "of", "4", "45", "90.0%"] and row[-1] == "1.250" for row in rows)


def test_json_of_an_observation_is_its_file(run: Run, of_plan: str) -> None:
    shown = run("show", of_plan, "--format", "json")
    assert codec.loads(shown.out, Observation) == codec.load_observation(of_plan)


def test_explain_answers_as_the_engine_and_says_how_often(run: Run, of_plan: str) -> None:
    asked = ("--num-reqs", "5", "--query-len", "4")
    planned, observed = (run("explain", file, *asked, "--format", "json").data for file in (PLAN, of_plan))
    assert observed.pop("observed") == {"steps": 50, "of": 50, "milliseconds": 1.25}
    assert observed == planned
    assert "observed: 50 of 50 steps (100.0%), 1.250 ms each" in run("explain", of_plan, *asked).out


def test_coverage_of_an_observation_is_that_of_its_plan(run: Run, of_plan: str) -> None:
    planned, observed = (run("explain", file, "--coverage").out.splitlines() for file in (PLAN, of_plan))
    assert observed == planned


def test_batches_are_answered_line_by_line(run: Run, of_plan: str) -> None:
    lines = [
        {"role": "target", "num_reqs": 5, "num_tokens": 20, "query_len": 4},
        {"role": "target", "num_reqs": 5, "num_tokens": 100, "past_prompt": False},
        {"role": "draft_decode", "num_reqs": 7, "num_tokens": 7, "query_len": 1},
        {"role": "target", "num_reqs": 999, "num_tokens": 999},
    ]
    Path("batches.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    planned, observed = (run("explain", file, "--batches", "batches.jsonl").out for file in (PLAN, of_plan))
    assert observed == planned


def test_explain_refuses_a_role_that_did_not_run(run: Run, of_flags: str) -> None:
    ran = run("explain", of_flags, "--num-reqs", "1", "--query-len", "1", "--role", "draft_decode")
    assert (ran.code, ran.out) == (1, "")
    assert "the engine ran no draft_decode; it ran target" in ran.err


@pytest.mark.parametrize("form", ["text", "json", "github", "sarif"])
def test_check_has_findings_in_every_format(run: Run, of_flags: str, form: str) -> None:
    ran = run("check", of_flags, "--format", form)
    assert ran.code == 2
    assert "EN001" in ran.out
    assert "--cudagraph-capture-sizes" in ran.out
    if form == "json":
        (first, *_) = ran.document(2)["findings"]
        assert (first["code"], first["steps"], first["of"], first["file"]) == ("EN001", 0, 0, of_flags)
    if form == "sarif":
        (result,) = ran.document(2)["runs"]
        known = {rule["id"] for rule in result["tool"]["driver"]["rules"]}
        assert {each["ruleId"] for each in result["results"]} <= known


def test_check_points_at_the_role(run: Run, of_flags: str) -> None:
    (found, *_) = run("check", of_flags).out.splitlines()
    line = int(found.removeprefix(f"{of_flags}:").split(":")[0])
    assert Path(of_flags).read_text("utf-8").splitlines()[line - 1] == "  - role: target"


def test_diff_of_a_plan_and_its_observation(run: Run, of_plan: str) -> None:
    """Law 12 holds here but for what ran eager; graphs without a step are notes."""
    ran = run("diff", PLAN, of_plan)
    assert ran.code == 2
    (eager, *notes) = ran.out.splitlines()
    assert eager.startswith(
        "target: 5 of 50 steps (10.0%) ran eager, and the plan has a graph, such as 5 requests of 4"
    )
    assert [note.split(":")[:2] for note in notes] == [["note", " target"]]
    assert "no step ran on 50 graphs" in notes[0]
    found = run("diff", PLAN, of_plan, "--format", "json").document(2)
    assert [change["what"] for change in found["changes"]] == ["eager"]
    assert len(found["notes"]) == 1


def test_diff_of_an_observation_with_itself(run: Run, of_flags: str) -> None:
    ran = run("diff", of_flags, of_flags)
    assert (ran.code, ran.out) == (0, "no differences\n")


def test_diff_with_another_deployment_names_what_it_captures(run: Run, of_plan: str, of_flags: str) -> None:
    ran = run("diff", of_plan, of_flags)
    assert ran.code == 2
    for text in ("applied plan: sha256:", "draft_decode is gone", "target no longer captures 5"):
        assert text in ran.out


def test_check_of_a_plan_with_an_observation(run: Run, of_plan: str) -> None:
    """Each difference is an error at the plan."""
    ran = run("check", PLAN, "--observation", of_plan)
    assert ran.code == 2
    assert f"{PLAN}:1:1: error: CP099 drift: {of_plan}: target: 5 of 50 steps (10.0%) ran eager" in ran.out
    assert "1 difference" in ran.out


def test_compare_takes_observations(run: Run, of_plan: str, of_flags: str) -> None:
    """Next to a plan, a command line and each other; no machine is asked for where none is needed."""
    both = run("compare", of_plan, PLAN)
    assert both.code == 0
    assert both.err == ""
    assert "nothing is eager in A that has a graph in B" in both.out
    other = run("compare", of_plan, of_flags, "--format", "json").data
    assert {modes["role"]: modes["b"] for modes in other["modes"]}["draft_decode"] is None
    flags = run("compare", of_flags, "vllm --max-num-seqs 64 --cudagraph-capture-sizes 1 48", "-e", "h100")
    assert flags.out.count("nothing is eager in") == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "{observation}"], "this is an observation, not a spec"),
        (["export", "{observation}", "--to", "vllm"], "this is an observation, not a spec"),
        (["launch", "{observation}", "--", "vllm", "serve", "x"], "this is an observation, not a plan"),
        (["check", PLAN, "--spec", "{observation}"], "this is an observation, not a spec"),
        (["check", "{observation}", "--spec", SPEC], "this is an observation, not a"),
        (["check", PLAN, "--observation", SPEC], "this is a spec, not an observation"),
        (["check", PLAN, "--observation", PLAN], "this is a plan, not an observation"),
        (["show", "{observation}", "-e", "h100"], "is an observation of a machine; --environment goes with a spec"),
        (["compare", "{observation}", PLAN, "-e", "h100"], "--environment goes with a spec or an engine"),
        (["check", "--engine", "vllm", "--observation", "{observation}"], "--observation is for plans"),
    ],
)
def test_a_wrong_kind_of_file_is_an_error(run: Run, of_plan: str, arguments: list[str], says: str) -> None:
    ran = run(*(argument.format(observation=of_plan) for argument in arguments))
    assert (ran.code, ran.out) == (1, "")
    assert says in ran.err


def test_a_damaged_observation_has_its_places(run: Run, of_plan: str) -> None:
    """A graph that the role does not have, and a column that is too short."""
    text = Path(of_plan).read_text("utf-8")
    assert "steps: [45]" in text
    Path("wrong.yaml").write_text(text.replace("steps: [45]", "steps: [45, 1]"), "utf-8")
    ran = run("show", "wrong.yaml")
    assert ran.code == 1
    assert "steps: 2 values, and num_reqs has 1; list one for each" in ran.err
    Path("wrong.yaml").write_text(text.replace("graph: [", "graph: [9", 1), "utf-8")
    assert "and the role has 51; graphs count from 0" in run("show", "wrong.yaml").err
