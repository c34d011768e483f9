"""The command line: every command in every format, every exit code, and what errors say."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import click
import pytest
from commands import Run
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import cli, codec, lint
from capture_planner.plan import Plan

ROOT = Path(__file__).parent.parent
SPEC = "plans/specs/qwen3-8b-eagle3.yaml"
PLAN = "plans/locked/qwen3-8b-eagle3.h100.yaml"
TINY = "plans/specs/tiny-reference-cpu.yaml"
TINY_PLAN = "plans/locked/tiny-reference-cpu.cpu.yaml"
COMMAND = Path(sysconfig.get_path("scripts")) / "capture-planner"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the repository's plans, which is the current one."""
    shutil.copytree(ROOT / "plans", tmp_path / "plans", ignore=shutil.ignore_patterns("*.py", "*.pyc"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path, call: Run) -> Run:
    """Return a function that runs a command there, in this process, as ``main`` does."""
    return call


def edited(name: str, source: str, *changes: tuple[str, str]) -> str:
    """Write a copy of a file in which each text is replaced, and return its name."""
    text = Path(source).read_text("utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    Path(name).write_text(text, "utf-8")
    return name


# Help and usage --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [None, *cli.cli.commands])
def test_help(run: Run, command: str | None) -> None:
    ran = run(*([command] if command else []), "--help")
    assert ran.code == 0
    assert ran.out.startswith("Usage: capture-planner")


def test_version(run: Run) -> None:
    import capture_planner

    assert run("--version").out == f"capture-planner, version {capture_planner.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["draw"], "No such command 'draw'"),
        (["plan"], "Missing argument 'SPEC'"),
        (["plan", SPEC, "--format", "xml"], "'xml' is not one of"),
        (["plan", SPEC, "--fast"], "No such option"),
        (["explain", PLAN], "Give one of --num-reqs, --coverage or --batches"),
        (["explain", PLAN, "--coverage", "--num-reqs", "1"], "Give one of"),
        (["explain", PLAN, "--num-reqs", "many"], "not a valid integer"),
        (["explain", PLAN, "--num-reqs", "0", "--query-len", "4"], "0 is not in the range"),
        (["explain", PLAN, "--num-reqs", "3", "--query-len", "4", "--num-tokens", "9"], "not 9"),
        (["explain", PLAN, "--num-reqs", "3"], "Give --num-tokens, or --query-len"),
        (["explain", PLAN, "--num-reqs", "3", "--role", "drafter"], "'drafter' is not one of"),
        (["explain", PLAN, "--batches", "nowhere.jsonl"], "nowhere.jsonl"),
        (["show", PLAN, "-e", "h100"], "is a plan, for h100; --environment goes with a spec"),
        (["check"], "Missing argument"),
        (["diff", PLAN], "Missing argument 'NEW'"),
        (["schema", "model"], "'model' is not one of"),
    ],
)
def test_a_wrong_command_line_exits_with_1(run: Run, arguments: list[str], says: str) -> None:
    ran = run(*arguments)
    assert ran.code == 1
    assert ran.out == ""
    assert says in ran.err


# Errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "show", "check"])
def test_a_missing_file(run: Run, command: str) -> None:
    ran = run(command, "nowhere.yaml")
    assert (ran.code, ran.out) == (1, "")
    assert "error: nowhere.yaml: cannot be read: No such file or directory\n" in ran.err


def test_a_folder_for_a_file(run: Run) -> None:
    assert "plans: cannot be read" in run("show", "plans").err


@pytest.mark.parametrize("command", ["plan", "show", "check"])
def test_yaml_that_is_not(run: Run, command: str) -> None:
    Path("broken.yaml").write_text("model: [1,\nlimits: 2\n", "utf-8")
    ran = run(command, "broken.yaml")
    assert ran.code == 1
    assert "error: broken.yaml:" in ran.err
    assert "not YAML" in ran.err


def test_every_error_of_a_file_with_its_line_and_column(run: Run) -> None:
    wrong = edited(
        "wrong.yaml",
        SPEC,
        ("max_num_reqs: 256", "max_num_reqs: 8.7"),
        ("mode: FULL_AND_PIECEWISE", "mode: FULL_AND_PIECEWIZE"),
        ("speculative:", "speculativ:"),
    )
    lines = Path(wrong).read_text("utf-8").splitlines()
    places = {
        key: next((n, line.index(key) + 1) for n, line in enumerate(lines, 1) if key in line)
        for key in ("8.7", "FULL_AND_PIECEWIZE", "speculativ")
    }
    ran = run("plan", wrong, "-e", "h100")
    assert ran.code == 1
    assert ran.err.splitlines() == [
        f"error: wrong.yaml:{places['8.7'][0]}:{places['8.7'][1]}: limits.max_num_reqs: "
        "expected an integer, got 8.7",
        f"error: wrong.yaml:{places['FULL_AND_PIECEWIZE'][0]}:{places['FULL_AND_PIECEWIZE'][1]}: mode: "
        "expected one of NONE, PIECEWISE, FULL_DECODE_ONLY, FULL_AND_PIECEWISE, FULL, "
        "got 'FULL_AND_PIECEWIZE'; did you mean FULL_AND_PIECEWISE?",
        f"error: wrong.yaml:{places['speculativ'][0]}:1: speculativ: unknown key; did you mean speculative?",
    ]


def test_errors_as_json(run: Run) -> None:
    wrong = edited("wrong.yaml", SPEC, ("max_num_reqs: 256", "max_num_reqs: 8.7"))
    ran = run("plan", wrong, "-e", "h100", "--format", "json")
    (error,) = ran.document(1)["errors"]
    assert error["path"] == ["limits", "max_num_reqs"]
    assert (error["file"], error["message"]) == (wrong, "expected an integer, got 8.7")
    assert set(error) == {"path", "message", "remedy", "file", "line", "column"}


def test_an_unknown_backend_names_a_near_one(run: Run) -> None:
    ran = run("plan", edited("wrong.yaml", SPEC, ("flashinfer", "flashinfr")), "-e", "h100")
    assert ran.code == 1
    assert ran.err.startswith("error: wrong.yaml:")
    assert ": backend: no backend named 'flashinfr' is installed; did you mean 'flashinfer'?" in ran.err


def test_an_unknown_environment_names_a_near_one(run: Run) -> None:
    ran = run("plan", SPEC, "-e", "h10")
    assert ran.code == 1
    assert "no environment is named 'h10'" in ran.err
    assert "did you mean h100?" in ran.err


def test_a_spec_without_a_plan(run: Run) -> None:
    wrong = edited(
        "full.yaml", "plans/specs/llama-3.2-3b-eagle-t4.yaml", ("mode: FULL_AND_PIECEWISE", "mode: FULL")
    )
    ran = run("plan", wrong, "-e", "t4")
    assert ran.code == 1
    assert "mode: FULL is out of reach" in ran.err
    assert "ask for PIECEWISE" in ran.err


def test_a_role_that_the_plan_does_not_have(run: Run) -> None:
    plan = "plans/locked/llama-3.1-8b.h100.yaml"
    ran = run("explain", plan, "--role", "draft_decode", "--num-reqs", "3", "--query-len", "1")
    assert ran.code == 1
    assert "the plan has no role draft_decode" in ran.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", PLAN], "this is a plan, not a spec"),
        (["check", SPEC, "--spec", SPEC, "-e", "h100"], "this is a spec, not a plan"),
        (["check", PLAN, "--spec", PLAN], "this is a plan, not a spec"),
    ],
)
def test_a_plan_for_a_spec_and_a_spec_for_a_plan(run: Run, arguments: list[str], says: str) -> None:
    ran = run(*arguments)
    assert ran.code == 1
    assert says in ran.err


def test_a_newer_file_names_the_remedy(run: Run) -> None:
    ran = run("plan", edited("newer.yaml", SPEC, ("version: 1", "version: 2")), "-e", "h100")
    assert ran.code == 1
    assert "schema version 2" in ran.err
    assert "upgrade capture-planner" in ran.err


# plan ------------------------------------------------------------------------------------------


def test_plan_prints_the_plan(run: Run) -> None:
    ran = run("plan", SPEC, "-e", "h100")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.encode() == Path(PLAN).read_bytes()


def test_plan_says_which_environment_it_took(run: Run) -> None:
    assert "note: no --environment was named, so this is for h100" in run("plan", SPEC).err


def test_plan_writes_a_file_and_a_summary(run: Run) -> None:
    ran = run("plan", SPEC, "-o", "mine.h100.yaml")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[0].startswith("Qwen/Qwen3-8B on h100: 126 graphs")
    assert ran.out.endswith("written to mine.h100.yaml\n")
    assert Path("mine.h100.yaml").read_bytes() == Path(PLAN).read_bytes()


def test_plan_takes_the_environment_from_the_file_name(run: Run) -> None:
    run("plan", SPEC, "-o", "mine.a100.yaml")
    assert codec.load_plan("mine.a100.yaml").environment.name == "a100"


def test_a_named_environment_beats_the_file_name(run: Run) -> None:
    run("plan", SPEC, "-o", "mine.a100.yaml", "-e", "b200")
    assert codec.load_plan("mine.a100.yaml").environment.name == "b200"


def test_plan_as_json_is_the_same_plan(run: Run) -> None:
    ran = run("plan", SPEC, "-e", "h100", "--format", "json")
    assert codec.loads(ran.out, Plan) == codec.load_plan(PLAN)


def test_a_json_file_is_written_as_json(run: Run) -> None:
    run("plan", SPEC, "-o", "mine.h100.json")
    json.loads(Path("mine.h100.json").read_text("utf-8"))
    assert codec.load_plan("mine.h100.json") == codec.load_plan(PLAN)


def test_a_failed_plan_leaves_the_old_file(run: Run, folder: Path) -> None:
    old = Path(PLAN).read_text("utf-8")
    Path("kept.h100.yaml").write_text(old, "utf-8")
    before = set(folder.iterdir())
    wrong = edited("wrong.yaml", SPEC, ("max_num_reqs: 256", "max_num_reqs: -1"))
    assert run("plan", wrong, "-o", "kept.h100.yaml").code == 1
    assert Path("kept.h100.yaml").read_text("utf-8") == old
    assert set(folder.iterdir()) == before | {folder / "wrong.yaml"}


def test_a_failed_write_leaves_the_old_file(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    old = Path(PLAN).read_text("utf-8")
    Path("kept.h100.yaml").write_text(old, "utf-8")
    before = set(folder.iterdir())
    monkeypatch.setattr(Path, "replace", full)
    ran = run("plan", SPEC, "-o", "kept.h100.yaml")
    assert ran.code == 1
    assert "kept.h100.yaml: cannot be written: No space left on device" in ran.err
    assert Path("kept.h100.yaml").read_text("utf-8") == old
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize("taken", ["spec", "text"])
def test_only_a_plan_is_replaced(run: Run, taken: str) -> None:
    """A slip with --output does not cost anybody a spec, or any other file."""
    mine = edited("mine.yaml", SPEC)
    target = mine if taken == "spec" else "notes.txt"
    if taken == "text":
        Path(target).write_text("mine\n", "utf-8")
    before = Path(target).read_text("utf-8")
    ran = run("plan", mine, "-e", "h100", "-o", target)
    assert ran.code == 1
    assert ("the spec itself" if taken == "spec" else "no plan") in ran.err
    assert Path(target).read_text("utf-8") == before


def test_a_link_is_followed(run: Run) -> None:
    """The plan behind a link is replaced, and the link stays."""
    Path("real.h100.yaml").write_text("", "utf-8")
    Path("link.h100.yaml").symlink_to("real.h100.yaml")
    assert run("plan", SPEC, "-o", "link.h100.yaml").code == 0
    assert Path("link.h100.yaml").is_symlink()
    assert codec.load_plan("real.h100.yaml") == codec.load_plan(PLAN)


def test_a_full_standard_output_is_an_error_and_a_device_stays_one() -> None:
    """Neither printing to a full device nor writing to it is a traceback, and it is not replaced."""
    for arguments, where in (("", "> /dev/full"), ("-o /dev/full", "")):
        command = f"{sys.executable} -m capture_planner.cli plan {SPEC} -e h100 {arguments} {where}"
        ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert ran.returncode == 1
        assert "No space left on device" in ran.stderr
        assert "Traceback" not in ran.stderr
    assert not Path("/dev/full").is_file()


def test_a_name_for_another_machine_is_noted(run: Run) -> None:
    assert (
        "named for a100, and this is for h100" in run("plan", SPEC, "-e", "h100", "-o", "mine.a100.yaml").err
    )


def test_a_folder_that_is_not_there(run: Run) -> None:
    ran = run("plan", SPEC, "-o", "nowhere/mine.h100.yaml")
    assert ran.code == 1
    assert "nowhere/mine.h100.yaml: cannot be written: No such file or directory" in ran.err


# show ------------------------------------------------------------------------------------------


def test_show_has_every_role_graph_and_decision(run: Run) -> None:
    ran = run("show", PLAN)
    plan = codec.load_plan(PLAN)
    words = ran.out.split()
    assert ran.code == 0
    for role in plan.roles:
        assert role.role in words
        for entry in role.entries:
            assert str(entry.num_tokens if entry.query_len is None else entry.num_reqs) in words
        for decision in role.decisions:
            assert decision.rule in words
        for waiver in role.waivers:
            assert f"waived ({waiver.reason})" in ran.out


def test_show_plans_a_spec(run: Run) -> None:
    assert run("show", SPEC, "-e", "h100").out == run("show", PLAN).out


def test_show_as_json_is_the_plan(run: Run) -> None:
    assert codec.loads(run("show", PLAN, "--format", "json").out, Plan) == codec.load_plan(PLAN)


@pytest.mark.parametrize("path", sorted((ROOT / "plans" / "locked").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_locked_plan_can_be_shown_and_explained(run: Run, path: Path) -> None:
    assert run("show", str(path)).code == 0
    assert run("explain", str(path), "--coverage").code == 0


# explain ---------------------------------------------------------------------------------------


def test_explain_a_batch(run: Run) -> None:
    ran = run("explain", PLAN, "--num-reqs", "100", "--query-len", "4")
    assert ran.code == 0
    assert ran.out.startswith("target: 100 requests, 400 tokens, 4 each -> FULL\n")
    assert "has room for" in ran.out


def test_explain_as_json(run: Run) -> None:
    data = run("explain", PLAN, "--num-reqs", "100", "--query-len", "4", "--format", "json").data
    assert set(data) == {
        "batch",
        "mode",
        "entry",
        "padded_tokens",
        "padded_reqs",
        "reason",
        "says",
        "rejected",
    }
    assert data["batch"]["num_tokens"] == 400
    assert data["mode"] == "FULL"
    assert data["entry"]["num_tokens"] == 400 + data["padded_tokens"]
    assert data["entry"]["num_reqs"] == 100 + data["padded_reqs"]
    assert data["reason"] is None
    assert data["rejected"]
    for rejected in data["rejected"]:
        assert set(rejected) == {"entry", "rejection", "says"}


@pytest.mark.parametrize(
    ("arguments", "mode", "reason"),
    [
        (["--num-reqs", "8", "--query-len", "4", "--prompt"], "PIECEWISE", None),
        (["--num-reqs", "8", "--num-tokens", "40"], "PIECEWISE", None),
        (["--num-reqs", "8", "--num-tokens", "8000"], "NONE", "sizes"),
        (["--num-reqs", "300", "--query-len", "4"], "NONE", "not_admissible"),
        (["--num-reqs", "8", "--query-len", "1", "--role", "draft_decode"], "FULL", None),
        (["--num-reqs", "8", "--query-len", "4", "--active-loras", "2"], "NONE", "not_admissible"),
    ],
)
def test_explain_says_the_mode_or_the_reason(
    run: Run, arguments: list[str], mode: str, reason: str | None
) -> None:
    data = run("explain", PLAN, *arguments, "--format", "json").data
    assert (data["mode"], data["reason"]) == (mode, reason)
    assert mode in run("explain", PLAN, *arguments).out


def test_explain_names_prompts_and_adapters(run: Run) -> None:
    plan = "plans/locked/llama-3.1-8b-lora8.a100.yaml"
    out = run("explain", plan, "--num-reqs", "8", "--query-len", "1", "--prompt", "--active-loras", "3").out
    assert "prompts among them, 3 active LoRA" in out


def test_coverage(run: Run) -> None:
    ran = run("explain", PLAN, "--coverage")
    assert ran.code == 0
    assert ran.out.split()[:2] == ["role", "batches"]
    assert "1 to 256 requests of 4" in ran.out
    assert "NONE (sizes)" in ran.out


def test_coverage_as_json(run: Run) -> None:
    data = run("explain", PLAN, "--coverage", "--format", "json").data
    assert data["covered"] is True
    for cell in data["cells"]:
        assert set(cell) == {
            "role", "kind", "query_len", "first", "last", "min_reqs", "max_reqs", "min_loras", "max_loras",
            "mode", "entry", "reason", "share_padded", "worst_ratio",
        }  # fmt: skip
        assert (cell["entry"] is None) == (cell["reason"] is not None)


BATCHES = [
    {"role": "target", "num_reqs": 3, "num_tokens": 12, "query_len": 4, "past_prompt": True},
    {"role": "target", "num_reqs": 3, "num_tokens": 12, "query_len": None, "past_prompt": False},
    {"role": "draft_decode", "num_reqs": 3, "num_tokens": 3, "query_len": 1, "active_loras": 0},
    {"role": "target", "num_reqs": 300, "num_tokens": 8000},
]


def test_batches_answer_a_line_for_a_line(run: Run) -> None:
    lines = "\n".join(json.dumps(batch) for batch in BATCHES).encode()
    Path("batches.jsonl").write_bytes(lines)
    ran = run("explain", PLAN, "--batches", "batches.jsonl")
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 0
    assert [answer["mode"] for answer in answers] == ["FULL", "PIECEWISE", "FULL", "NONE"]
    for answer in answers:
        assert list(answer) == ["mode", "num_tokens", "num_reqs", "query_len", "active_loras", "reason"]
    assert answers[-1] == {
        "mode": "NONE",
        "num_tokens": 8000,
        "num_reqs": 300,
        "query_len": None,
        "active_loras": 0,
        "reason": "not_admissible",
    }
    assert run("explain", PLAN, "--batches", "-", stdin=lines).out == ran.out


def test_empty_lines_are_left_out(run: Run) -> None:
    lines = f"\n{json.dumps(BATCHES[0])}\n  \n".encode()
    assert len(run("explain", PLAN, "--batches", "-", stdin=lines).out.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"role": "target", "num_reqs": 1}', "num_tokens: is missing"),
        ('{"role": "drafter", "num_reqs": 1, "num_tokens": 1}', "role: expected one of target"),
        ('{"role": "target", "num_reqs": "1", "num_tokens": 1}', "num_reqs: expected a whole number"),
        ('{"role": "target", "num_reqs": 1, "num_tokens": -1}', "num_tokens: expected a whole number"),
        ('{"role": "target", "num_reqs": true, "num_tokens": 1}', "num_reqs: expected a whole number"),
        ('{"role": "target", "num_reqs": 1, "num_tokens": 1, "past_prompt": 1}', "past_prompt: expected"),
        ('{"role": "target", "num_reqs": 1, "num_tokens": 1, "lora": 1}', "lora: unknown key"),
        ("[" * 5000, "not JSON"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_answered(run: Run, line: str, says: str) -> None:
    good = json.dumps(BATCHES[0])
    Path("batches.jsonl").write_text(f"{good}\n\n{line}\n{good}\n{line}\n", "utf-8")
    ran = run("explain", PLAN, "--batches", "batches.jsonl")
    assert (ran.code, ran.out) == (1, "")
    first, second = ran.err.splitlines()
    assert first.startswith(f"error: batches.jsonl:3: {says}")
    assert second.startswith(f"error: batches.jsonl:5: {says}")


def test_bytes_that_are_not_text(run: Run) -> None:
    ran = run("explain", PLAN, "--batches", "-", stdin=b'{"role": "\xff"}\n')
    assert ran.code == 1
    assert ":1: not JSON" in ran.err


# check -----------------------------------------------------------------------------------------


def test_check_of_sound_plans(run: Run) -> None:
    ran = run("check", *sorted(str(path) for path in Path("plans/locked").glob("*.yaml")))
    assert ran.code == 0
    assert " warning" not in ran.out
    assert " error" not in ran.out


def test_notes_count_only_when_strict(run: Run) -> None:
    plan = "plans/locked/llama-3.2-3b-eagle-t4.t4.yaml"
    assert run("check", plan).code == 0
    ran = run("check", plan, "--strict")
    assert ran.code == 2
    assert ": note: CP" in ran.out


def test_check_of_a_spec_points_into_the_spec(run: Run) -> None:
    few = edited("few.yaml", "plans/specs/llama-3.1-8b.yaml", ("num_tokens: 8192", "num_tokens: 128"))
    ran = run("check", few, "-e", "h100")
    line = next(n for n, text in enumerate(Path(few).read_text().splitlines(), 1) if "limits:" in text)
    assert ran.code == 2
    assert f"few.yaml:{line}:" in ran.out
    assert "warning: CP003 tokens-limit-requests" in ran.out
    assert "1 file checked: 1 warning" in ran.out.splitlines()[-1]


@pytest.fixture
def unsound(folder: Path) -> str:
    """Return a plan that lost its waivers and gained a graph that nothing reaches."""
    text = Path(TINY_PLAN).read_text("utf-8")
    old = "num_reqs: [8, 7,"
    assert old in text
    Path("unsound.yaml").write_text(text.replace(old, "num_reqs: [9, 8, 7,", 1), "utf-8")
    return "unsound.yaml"


def test_findings_exit_with_2(run: Run, unsound: str) -> None:
    ran = run("check", unsound)
    assert ran.code == 2
    assert ": warning: CP020 unreachable-entry: target: 1 of" in ran.out


def test_findings_as_json(run: Run, unsound: str) -> None:
    data = run("check", unsound, "--format", "json").document(2)
    assert set(data) == {"findings", "drift"}
    for finding in data["findings"]:
        assert set(finding) == {
            "code", "name", "severity", "class", "role", "message", "remedy", "threads", "file", "line",
            "column",
        }  # fmt: skip
        assert finding["code"] in lint.RULES
        assert finding["file"] == unsound
        assert finding["line"] > 1


def test_findings_for_github(run: Run, unsound: str) -> None:
    ran = run("check", unsound, "--format", "github")
    assert ran.code == 2
    for line in ran.out.splitlines():
        command, properties, _message = line.split(" ", 1)[0], *line.split(" ", 1)[1].split("::", 1)
        assert command in ("::error", "::warning", "::notice")
        assert properties.startswith("file=unsound.yaml,line=")
        assert ",title=CP" in properties


def test_nothing_to_say_is_nothing_for_github(run: Run) -> None:
    ran = run("check", "plans/locked/llama-3.1-8b.h100.yaml", "--format", "github")
    assert (ran.code, ran.out) == (0, "")


def test_names_are_escaped_for_github(run: Run, unsound: str) -> None:
    shutil.copy(unsound, "a:b,c%d.yaml")
    out = run("check", "a:b,c%d.yaml", "--format", "github").out
    assert "file=a%3Ab%2Cc%25d.yaml,line=" in out


def test_sarif(run: Run, unsound: str) -> None:
    data = run("check", unsound, "--spec", SPEC, "--format", "sarif").document(2)
    assert data["version"] == "2.1.0"
    assert data["$schema"].endswith("sarif-2.1.0.json")
    (once,) = data["runs"]
    driver = once["tool"]["driver"]
    assert driver["name"] == "capture-planner"
    ids = [rule["id"] for rule in driver["rules"]]
    assert set(ids) == {*lint.RULES, "CP099"}
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
    assert {result["ruleId"] for result in once["results"]} >= {"CP020", "CP099"}
    for result in once["results"]:
        assert result["ruleId"] in ids
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert place["artifactLocation"]["uri"] == unsound
        assert place["region"]["startLine"] >= 1
        assert place["region"]["startColumn"] >= 1


def test_no_drift(run: Run) -> None:
    ran = run("check", PLAN, "--spec", SPEC)
    assert ran.code == 0
    assert "CP099" not in ran.out


@pytest.fixture
def drifted(folder: Path) -> str:
    """Return a spec that moved on after its plan was made."""
    return edited("moved.yaml", TINY, ("max_num_reqs: 8", "max_num_reqs: 12"))


@pytest.mark.parametrize("form", ["text", "github", "sarif", "json"])
def test_drift_is_found(run: Run, drifted: str, form: str) -> None:
    ran = run("check", TINY_PLAN, "--spec", drifted, "--format", form)
    assert ran.code == 2
    assert f"{drifted} gives another plan: limits: max_num_reqs 8 became 12" in ran.out


def test_drift_as_json(run: Run, drifted: str) -> None:
    drift = run("check", TINY_PLAN, "--spec", drifted, "--format", "json").document(2)["drift"]
    assert drift
    for difference in drift:
        assert set(difference) == {"file", "message"}


def test_drift_goes_away_by_planning_again(run: Run, drifted: str) -> None:
    assert run("plan", drifted, "-o", TINY_PLAN).code == 0
    assert run("check", TINY_PLAN, "--spec", drifted).code == 0


# diff ------------------------------------------------------------------------------------------


def test_diff_of_equal_plans(run: Run) -> None:
    ran = run("diff", PLAN, SPEC, "-e", "h100")
    assert (ran.code, ran.out) == (0, "the plans are the same\n")
    assert run("diff", PLAN, PLAN, "--format", "json").data == {"changes": []}


def test_diff_in_words(run: Run, drifted: str) -> None:
    ran = run("diff", TINY_PLAN, drifted, "-e", "cpu")
    assert ran.code == 2
    lines = ran.out.splitlines()
    assert lines[0] == "limits: max_num_reqs 8 became 12"
    assert "target captures in addition 2 graphs: FULL decodes of 3 at 12, 10 requests" in lines


def test_diff_is_the_other_way_round(run: Run, drifted: str) -> None:
    run("plan", drifted, "-o", "moved.cpu.yaml")
    out = run("diff", "moved.cpu.yaml", TINY_PLAN).out
    assert "target no longer captures 2 graphs: FULL decodes of 3 at 12, 10 requests" in out


def test_diff_as_json(run: Run, drifted: str) -> None:
    changes = run("diff", TINY_PLAN, drifted, "-e", "cpu", "--format", "json").document(2)["changes"]
    for change in changes:
        assert set(change) == {"role", "what", "says", "entries"}
    (added,) = [c for c in changes if c["what"] == "added" and c["role"] == "target"]
    assert [entry["num_reqs"] for entry in added["entries"]] == [12, 10]


def test_diff_says_when_a_mode_changes(run: Run) -> None:
    spec = "plans/specs/llama-3.2-3b-eagle-t4.yaml"
    run("plan", spec, "-o", "new.h100.yaml")
    out = run("diff", "plans/locked/llama-3.2-3b-eagle-t4.t4.yaml", "new.h100.yaml").out
    assert "target runs FULL_AND_PIECEWISE, it ran PIECEWISE" in out
    assert "environment: name t4 became h100" in out


# backends and schema ---------------------------------------------------------------------------


def test_backends(run: Run) -> None:
    ran = run("backends")
    assert ran.code == 0
    assert ran.out.split()[:4] == ["backend", "version", "a100", "b200"]
    for name in ("flash_attention", "flashinfer", "reference"):
        assert name in ran.out


def test_backends_with_reasons(run: Run) -> None:
    ran = run("backends", "-e", "t4", "--spec", "plans/specs/gpt-oss-20b-eagle3.yaml")
    assert "NEVER" in ran.out
    assert "sliding" in ran.out
    assert "SM75" in ran.out


def test_backends_as_json(run: Run) -> None:
    data = run("backends", "--format", "json").data
    assert [backend["name"] for backend in data] == sorted(backend["name"] for backend in data)
    for backend in data:
        assert set(backend) == {"name", "distribution", "version", "support"}
        for support in backend["support"]:
            assert set(support) == {"environment", "role", "group", "level", "reason"}


@pytest.mark.parametrize("kind", ["spec", "plan", "environment"])
def test_schema(run: Run, kind: str) -> None:
    ran = run("schema", kind)
    assert ran.code == 0
    assert ran.data["title"] == f"capture-planner {kind}"


# In a process of its own -------------------------------------------------------------------------


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=60, **options
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["schema", "spec"], 0),
        (["plan", "nowhere.yaml"], 1),
        (["plan"], 1),
        (["check", "plans/locked/llama-3.2-3b-eagle-t4.t4.yaml", "--strict"], 2),
        (["diff", PLAN, TINY_PLAN], 2),
    ],
)
def test_exit_codes_reach_the_shell(folder: Path, arguments: list[str], code: int) -> None:
    ran = command(*arguments)
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr


def test_it_runs_as_a_module(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-I", "-m", "capture_planner.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith("capture-planner, version ")


@pytest.mark.parametrize(
    "arguments", [["plan", SPEC, "-e", "h100"], ["schema", "plan"], ["explain", PLAN, "--coverage"]]
)
def test_a_reader_that_goes_away_is_no_traceback(folder: Path, arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run([COMMAND, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr


def test_colours_only_on_a_terminal(folder: Path) -> None:
    assert "\x1b[" not in command("show", PLAN, env={**os.environ, "TERM": "xterm-256color"}).stdout


def test_standard_input_of_a_process(folder: Path) -> None:
    ran = command("explain", PLAN, "--batches", "-", input=json.dumps(BATCHES[0]))
    assert json.loads(ran.stdout)["mode"] == "FULL"


def test_no_torch_and_no_cli_libraries_at_import(folder: Path) -> None:
    code = "import sys, capture_planner; print(sorted({'torch', 'rich', 'click'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize(
    ("error", "says"), [(click.exceptions.Abort(), "interrupted\n"), (BrokenPipeError(), "")]
)
def test_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, says: str
) -> None:
    def stop(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.cli, "main", stop)
    monkeypatch.setattr(sys, "argv", ["capture-planner", "backends"])
    if not says:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == says


# Whatever is given -------------------------------------------------------------------------------

_WORDS = st.sampled_from(
    [
        "plan", "show", "explain", "check", "diff", "backends", "schema", SPEC, PLAN, TINY, "nowhere.yaml",
        "-e", "h100", "cpu", "--num-reqs", "8", "-1", "--query-len", "4", "--coverage", "--spec", "--strict",
        "--format", "json", "sarif", "--role", "draft_decode", "--batches", "-", "plans", "",
    ]
)  # fmt: skip


@given(st.lists(_WORDS, max_size=7))
def test_no_command_line_ends_in_a_traceback(arguments: list[str]) -> None:
    """``main`` ends by SystemExit with 0, 1 or 2, whatever it is given; nothing else gets out."""
    streams = {
        name: io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for name in ("stdin", "stdout", "stderr")
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["capture-planner", *arguments])
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code in (0, 1, 2)
