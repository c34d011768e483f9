"""launch: what it adds and prints, what it refuses, and how it runs the engine."""

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.engines.command_line import started
from capture_planner.engines.launch import STARTED, mark_started
from capture_planner.engines.shell import split_variables
from capture_planner_tuner import child
from support.commands import SPEC, Run, edited

launch = importlib.import_module("capture_planner_tuner.cli.launch")
ROOT = Path(__file__).parents[3]
PLAN = str(ROOT / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml")
DENSE = str(ROOT / "plans" / "locked" / "llama-3.1-8b.h100.yaml")
SERVE = ("vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct")
DRAFTER = '{"method": "eagle3", "model": "x/y", "num_speculative_tokens": 3}'


def test_dry_run_prints_variables_and_command_and_runs_nothing(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One per line, quoted as a shell takes them; the variables of the command itself stay."""
    monkeypatch.setattr(child, "run_engine", lambda *words: pytest.fail("it ran"))
    ran = call("launch", DENSE, "--observe", "a b", "--profile", "--strict", "--dry-run", "--", "X=1", *SERVE)
    assert (ran.code, ran.err) == (0, "")
    *variables, command = ran.out.splitlines()
    assert variables == [
        "X=1",
        f"CAPTURE_PLANNER_PLAN={DENSE}",
        f"CAPTURE_PLANNER_OBSERVE={shlex.quote(str(Path('a b').absolute()))}",
        "CAPTURE_PLANNER_PROFILE=1",
        "CAPTURE_PLANNER_STRICT=1",
    ]
    words = shlex.split(command)
    assert words[:3] == list(SERVE)
    assert words[3:] == [
        *("--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--attention-backend", "FLASH_ATTN"),
        *("--max-cudagraph-capture-size", "512", "-cc.cudagraph_mode=FULL_AND_PIECEWISE"),
    ]


@pytest.mark.parametrize("code", [0, 3])
def test_engine_runs_with_what_was_printed(call: Run, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The words, and the variables on top of the environment; its exit code is that of the command."""
    ran_with = []

    def run_engine(words: list[str], environment: dict[str, str], received: object) -> int:
        ran_with.append((words, environment))
        Path(environment[STARTED]).touch()
        return code

    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setattr(child, "run_engine", run_engine)
    ran = call("launch", DENSE, "--", *SERVE)
    ((words, environment),) = ran_with
    assert (ran.code, ran.err) == (code, "")
    assert words == shlex.split(ran.out.splitlines()[-1])
    assert (environment["KEPT"], environment["CAPTURE_PLANNER_PLAN"]) == ("1", DENSE)


@pytest.mark.parametrize("command", [SERVE, ("/venv/bin/vllm", *SERVE[1:]), ("X=1", *SERVE), ("python", "serve.py")])
def test_an_engine_is_observed_without_a_plan(call: Run, command: tuple[str, ...]) -> None:
    """It runs by itself: nothing is added, and no plan is named."""
    observed = f"CAPTURE_PLANNER_OBSERVE={Path('seen').absolute()}"
    own = [word for word in command if "=" in word]
    ran = call("launch", "--observe", "seen", "--profile", "--dry-run", "--", *command)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [*own, observed, "CAPTURE_PLANNER_PROFILE=1", shlex.join(command[len(own) :])]


def test_a_program_with_its_folder_is_no_plan(call: Run, tmp_path: Path) -> None:
    """A server's program is a file, too."""
    program = tmp_path / "vllm"
    program.touch()
    for command in ((str(program), *SERVE[1:]), (sys.executable, "serve.py")):
        ran = call("launch", "--observe", "seen", "--dry-run", "--", *command)
        assert ran.out.splitlines()[-1] == shlex.join(command)
        assert "PLAN is missing" in call("launch", "--dry-run", "--", *command).err


def test_an_observed_engine_runs_without_an_exported_plan(
    call: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By itself means without a plan; if it fails early, the advice is to start it unobserved."""
    environments = []
    monkeypatch.setenv("CAPTURE_PLANNER_PLAN", "other.yaml")
    monkeypatch.setattr(child, "run_engine", lambda words, environment, received: environments.append(environment) or 1)
    ran = call("launch", "--observe", str(tmp_path / "seen"), "--", *SERVE)
    (environment,) = environments
    assert (ran.code, "CAPTURE_PLANNER_PLAN" in environment) == (1, False)
    assert environment["CAPTURE_PLANNER_OBSERVE"] == str(tmp_path / "seen")
    assert ran.err.splitlines()[1:] == [
        "It ran observed. If it starts unobserved, please report both logs.",
        f"To start it unobserved: {shlex.join(SERVE)}",
    ]


@pytest.mark.parametrize(("code", "explained"), [(1, True), (137, True), (0, False), (130, False), (143, False)])
def test_engine_that_fails_early_is_explained(
    call: Run, monkeypatch: pytest.MonkeyPatch, code: int, explained: bool
) -> None:
    """With its plan, and the command that starts it without; one that was told to end needs no advice."""
    monkeypatch.setattr(child, "run_engine", lambda words, environment, received: code)
    ran = call("launch", DENSE, "--", "X=a b", *SERVE)
    assert ran.code == code
    lines = ran.err.splitlines()
    assert bool(lines) is explained
    if explained:
        assert lines[0] == f"vllm ended with exit code {code} before it had captured its graphs."
        assert lines[1].startswith(f"It ran under the plan {DENSE} (sha256:")
        assert lines[2] == f"To start it without the plan: X='a b' {shlex.join(SERVE)}"


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("--dry-run", "--", *SERVE), "PLAN"),
        (("--dry-run", "X=1", *SERVE), "PLAN"),
        (("--", "python3", "serve.py"), "PLAN"),
        (("--dry-run",), "PLAN"),
        ((DENSE, "--dry-run"), "the engine's command"),
        (("--observe", "seen", "--dry-run"), "the engine's command"),
    ],
)
def test_missing_words_are_named_with_an_example(call: Run, words: tuple[str, ...], missing: str) -> None:
    """A command in the place of the plan is not read as a file."""
    ran = call("launch", *words)
    assert ran.code == 1
    assert f"Error: {missing} is missing: capture-planner launch PLAN -- vllm serve MODEL\n" in ran.err
    assert "cannot be read" not in ran.err


@pytest.mark.parametrize(
    ("folder", "code", "says"), [("absent", 127, "No such file or directory"), (".", 126, "Permission denied")]
)
def test_a_program_that_cannot_be_run_is_an_error(call: Run, tmp_path: Path, folder: str, code: int, says: str) -> None:
    """With the exit code of a shell, and what to do."""
    (tmp_path / "vllm").touch()
    program = str(tmp_path / folder / "vllm")
    ran = call("launch", DENSE, "--", program, "serve")
    assert ran.code == code
    assert f"{program}: {says}; activate its environment first\n" in ran.err


def test_flags_that_agree_are_not_repeated(call: Run) -> None:
    """In any spelling of vLLM's: a flag, a part of a JSON flag, a dotted part."""
    ran = call(
        *("launch", DENSE, "--dry-run", "--", *SERVE, "--max_num_seqs=256", "-cc.cudagraph_mode=FULL_AND_PIECEWISE"),
        *("--attention-config", '{"backend": "flash_attn"}'),
    )
    assert ran.code == 0
    added = ran.out.splitlines()[-1].partition("flash_attn")[2]
    assert "--max-num-seqs" not in added
    assert "cudagraph_mode" not in added
    assert "--attention-backend" not in added
    assert "--max-num-batched-tokens 8192" in added


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--max-num-seqs", "8"), "--max-num-seqs: given 8, the plan has 256; give --max-num-seqs 256"),
        (("-cc.cudagraph_mode=FULL",), 'give "cudagraph_mode": "FULL_AND_PIECEWISE"'),
        (("--compilation-config", '{"mode": 0}'), 'give \'{"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}\''),
        (("--cudagraph-capture-sizes", "1", "2"), "--cudagraph-capture-sizes: the plugin sets the plan's sizes"),
        (("--max-cudagraph-capture-size", "64"), "give --max-cudagraph-capture-size 512"),
        (("--enforce-eager",), "--enforce-eager: the plan has graphs; leave it out"),
        (("--enable-dbo",), "--enable-dbo: no plan has the graphs of half batches"),
        (("--tensor-parallel-size", "2"), "give --tensor-parallel-size 1"),
        (("--enable-lora",), "--enable-lora: the plan has no adapters"),
        (("--speculative-config", DRAFTER), "--speculative-config: the plan does not speculate"),
    ],
)
def test_flag_that_contradicts_the_plan_is_an_error(call: Run, flags: tuple[str, ...], error: str) -> None:
    """Each with the value to give."""
    ran = call("launch", DENSE, "--dry-run", "--", *SERVE, *flags)
    assert (ran.code, ran.out) == (1, "")
    assert error in ran.err


def test_all_contradictions_are_named_at_once(call: Run) -> None:
    """A line for each."""
    ran = call("launch", DENSE, "--dry-run", "--", *SERVE, "--max-num-seqs", "8", "--enforce-eager", "--enable-lora")
    assert [line.partition(":")[0] for line in ran.err.splitlines()] == ["error"] * 3


def test_draft_model_must_be_named(call: Run) -> None:
    """A plan does not know it; what it knows of speculation is checked."""
    missing = call("launch", PLAN, "--dry-run", "--", "vllm", "serve", "Qwen/Qwen3-8B")
    assert missing.code == 1
    assert "a plan does not name the draft model; give --speculative-config '{" in missing.err
    given = call("launch", PLAN, "--dry-run", "--", "vllm", "serve", "Qwen/Qwen3-8B", "--speculative-config", DRAFTER)
    assert given.code == 0, given.err
    assert given.out.count("--speculative-config") == 1
    other = DRAFTER.replace("3}", "5}")
    wrong = call("launch", PLAN, "--dry-run", "--", "vllm", "serve", "Qwen/Qwen3-8B", "--speculative-config", other)
    assert 'given 5, the plan has 3; give "num_speculative_tokens": 3' in wrong.err


def test_other_model_is_a_note(call: Run) -> None:
    """A folder may well hold the planned model; without one, the plan's own is served."""
    ran = call("launch", DENSE, "--dry-run", "--", "vllm", "serve", "/models/llama")
    assert ran.err == "note: the plan is for meta-llama/Llama-3.1-8B-Instruct, the command serves /models/llama\n"
    assert "--model meta-llama/Llama-3.1-8B-Instruct" in call("launch", DENSE, "--dry-run", "--", "vllm", "serve").out


def test_the_line_of_a_shell_script_is_run(call: Run, tmp_path: Path) -> None:
    """With the variables that it exports, by itself or behind its shell; what only a shell can expand is refused."""
    script = tmp_path / "serve.sh"
    line = "vllm serve meta-llama/Llama-3.1-8B-Instruct --port 1"
    script.write_text(f"#!/bin/bash\nexport NAME=7\ncd /tmp\n{line}\n", "utf-8")
    plain = call("launch", DENSE, "--dry-run", "--", "NAME=7", *line.split()).out
    for words in (("bash", str(script)), (str(script),)):
        ran = call("launch", DENSE, "--dry-run", "--", *words)
        assert ran.code == 0, ran.err
        assert ran.out == plain
        assert "only the line of vllm is run" in ran.err
    script.write_text("vllm serve $MODEL --port $(free)\n", "utf-8")
    ran = call("launch", DENSE, "--dry-run", "--", "bash", str(script))
    assert (ran.code, "the variable MODEL, which a shell expands" in ran.err) == (1, True)


def test_script_gets_the_environment_and_notes(call: Run) -> None:
    """Its flags are not known, so that nothing is added; what it must set is said, drafter included."""
    ran = call("launch", PLAN, "--dry-run", "--", "python3.12", "serve.py", "--port", "1")
    assert ran.out == f"CAPTURE_PLANNER_PLAN={PLAN}\npython3.12 serve.py --port 1\n"
    assert "note: a script that runs vllm must set: --model Qwen/Qwen3-8B --max-num-seqs 256" in ran.err
    assert "DRAFT_MODEL" in ran.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((DENSE, "--dry-run", "--", "ls"), "ls: expected one of "),
        ((DENSE, "--dry-run", "--", "trtllm-serve", "serve", "x"), "tensorrt-llm has no plugin that runs a plan"),
        (
            ("--observe", "seen", "--", "trtllm-serve", "serve", "x"),
            "tensorrt-llm has no plugin that runs a plan or obs",
        ),
        (("--observe", "seen", "--", "ls"), "ls: expected one of "),
        ((DENSE, "--profile", "--", *SERVE), "give --observe FOLDER too"),
        ((DENSE, "--observe", "--", *SERVE), "--observe needs a FOLDER, got --"),
        ((DENSE,), "is missing"),
        (("missing.yaml", "--", *SERVE), "missing.yaml: cannot be read"),
        ((DENSE, "--dry-run", "--", "bash", "-c", "true"), "bash -c true: expected one of "),
        ((DENSE, "--dry-run", "--", *SERVE, "--", "--x"), "words after -- are no flags"),
        (("-", "--", *SERVE), "the engine reads the plan itself; name its file"),
        (("/dev/stdin", "--", *SERVE), "the engine reads the plan itself; name its file"),
        ((DENSE, "--observe", DENSE, "--", *SERVE), f"--observe {DENSE} is a file; name a folder."),
        ((DENSE, "--observe", "/proc/x", "--", *SERVE), "--observe /proc/x cannot be written"),
    ],
)
def test_command_that_is_none_is_refused(call: Run, words: tuple[str, ...], error: str) -> None:
    """Before anything runs, with what was expected."""
    ran = call("launch", *words)
    assert (ran.code, ran.out) == (1, "")
    assert error in ran.err


def test_a_pipe_is_no_plan_for_an_engine(call: Run, tmp_path: Path) -> None:
    """It is read to its end before the engine opens it: ``launch <(...)``."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ran = call("launch", str(pipe), "--", *SERVE)
    assert (ran.code, ran.out) == (1, "")
    assert "the engine reads the plan itself; name its file" in ran.err


def test_exported_variables_are_shown_and_checked(call: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They reach the engine, too; an option goes before them."""
    monkeypatch.setattr(child, "run_engine", lambda *words: pytest.fail("it ran"))
    monkeypatch.setenv("CAPTURE_PLANNER_STRICT", "1")
    monkeypatch.setenv("CAPTURE_PLANNER_OBSERVE", "/proc/x")
    monkeypatch.setenv("CAPTURE_PLANNER_PLAN", "other.yaml")
    ran = call("launch", DENSE, "--dry-run", "--", *SERVE)
    assert ran.out.splitlines()[:3] == [
        "CAPTURE_PLANNER_OBSERVE=/proc/x",
        "CAPTURE_PLANNER_STRICT=1",
        f"CAPTURE_PLANNER_PLAN={DENSE}",
    ]
    ran = call("launch", DENSE, "--", *SERVE)
    assert (ran.code, "CAPTURE_PLANNER_OBSERVE /proc/x cannot be written" in ran.err) == (1, True)
    ran = call("launch", DENSE, "--observe", str(tmp_path), "--dry-run", "--", *SERVE)
    assert f"CAPTURE_PLANNER_OBSERVE={tmp_path}\n" in ran.out


def test_spec_is_refused(run: Run) -> None:
    """The engine reads a plan."""
    edited("spec.yaml", str(ROOT / SPEC))
    assert (
        "spec.yaml is a spec; write its plan first: capture-planner plan"
        in run("launch", "spec.yaml", "--", *SERVE).err
    )


def test_a_plan_that_was_cut_off_is_no_spec(run: Run, tmp_path: Path) -> None:
    """What is missing is said, and nothing is advised that cannot help."""
    (tmp_path / "cut.yaml").write_text(Path(DENSE).read_text("utf-8").partition("\nroles:")[0], "utf-8")
    ran = run("launch", str(tmp_path / "cut.yaml"), "--dry-run", "--", *SERVE)
    assert (ran.code, "roles: is missing" in ran.err, "spec" in ran.err) == (1, True, False)


def test_export_prints_the_launch_command(call: Run) -> None:
    """Of a plan, for an engine whose plugin runs one, with the drafter to be named; JSON has the flags only."""
    line = next(line for line in call("export", PLAN, "--to", "vllm").out.splitlines() if "launch" in line)
    label, _, command = line.partition(": ")
    words = shlex.split(command)
    assert label == "to run the plan itself"
    assert words[:7] == ["capture-planner", "launch", PLAN, "--", "vllm", "serve", "Qwen/Qwen3-8B"]
    assert "DRAFT_MODEL" in words[-1]
    assert "launch" not in call("export", PLAN, "--to", "tensorrt-llm").out


def test_programs_are_recognized_with_folder_and_version() -> None:
    """As a shell starts them; the shorter names of emulated lines are no programs."""

    class Server:
        """An engine, as far as programs go."""

        programs = ("vllm serve", "serve", "python -m vllm.server")

    server = Server()
    assert started(["/opt/bin/vllm", "serve", "m"], [server]) == (server, 2)
    assert started(["/usr/bin/python3.12", "-m", "vllm.server", "--x"], [server]) == (server, 3)
    assert started(["serve", "m"], [server]) is None
    assert started([], [server]) is None
    assert split_variables(["A=1", "B=x=y", "vllm", "C=2"]) == ({"A": "1", "B": "x=y"}, ("vllm", "C=2"))
    assert split_variables(["A=1"]) == ({"A": "1"}, ())


def test_file_is_made_where_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing otherwise; a folder that is not there, as on another host, is no error of the engine's."""
    monkeypatch.delenv(STARTED, raising=False)
    mark_started()
    monkeypatch.setenv(STARTED, str(tmp_path / "nowhere" / "file"))
    mark_started()
    monkeypatch.setenv(STARTED, str(tmp_path / "file"))
    mark_started()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1))
def test_what_is_printed_can_be_pasted(words: list[str]) -> None:
    """Bash reads the same words, and no control character is among what it is given."""
    line = " ".join(map(launch.quoted, words))
    assert line.isprintable()
    ran = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert ran.stdout.decode("utf-8").split("\0")[:-1] == words
