"""``plan`` and ``show``: every format, and files that stay whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from capture_planner import codec
from capture_planner.records.plan import Plan
from support.commands import PLAN, SPEC, TINY, Run, edited

ROOT = Path(__file__).parent.parent.parent


# environment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [SPEC, PLAN])
def test_environment_replaces_no_other_file(run: Run, file: str) -> None:
    pytest.importorskip("torch")
    before = Path(file).read_bytes()
    ran = run("environment", "-o", file)
    assert ran.code == 1
    assert f"--output {file} is a file that is not an environment; name another file, or remove it first" in ran.err
    assert Path(file).read_bytes() == before


def test_environment_replaces_an_environment(run: Run) -> None:
    pytest.importorskip("torch")
    for name in ("first", "second"):
        ran = run("environment", "-o", "here.yaml", "--name", name)
        assert (ran.code, ran.out) == (0, "written to here.yaml\n")
        assert codec.load_environment("here.yaml").name == name


# plan --------------------------------------------------------------------------------------------


def test_plan_prints_the_plan(run: Run) -> None:
    ran = run("plan", SPEC, "-e", "h100")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.encode() == Path(PLAN).read_bytes()


def test_plan_says_which_environment_it_took(run: Run) -> None:
    assert "note: no --environment given; using h100" in run("plan", SPEC).err


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
    assert ("the spec itself" if taken == "spec" else "not a plan") in ran.err
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
        command = f"{sys.executable} -m capture_planner plan {TINY} -e cpu {arguments} {where}"
        ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert ran.returncode == 1
        assert "No space left on device" in ran.stderr
        assert "Traceback" not in ran.stderr
    assert not Path("/dev/full").is_file()


def test_a_name_for_another_machine_is_noted(run: Run) -> None:
    assert "named for a100, but the plan is for h100" in run("plan", SPEC, "-e", "h100", "-o", "mine.a100.yaml").err


def test_a_folder_that_is_not_there(run: Run) -> None:
    ran = run("plan", SPEC, "-o", "nowhere/mine.h100.yaml")
    assert ran.code == 1
    assert "nowhere/mine.h100.yaml: no such folder" in ran.err


# show --------------------------------------------------------------------------------------------


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
