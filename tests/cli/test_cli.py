"""The command line: help, errors, exit codes and processes; commands have files of their own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import cli
from capture_planner.cli.commands import CORE, installed_commands
from capture_planner.codec.shipped import shipped_environments
from support.commands import PLAN, SPEC, TINY, TINY_PLAN, Run, edited

ROOT = Path(__file__).parent.parent.parent
COMMAND = Path(sysconfig.get_path("scripts")) / "capture-planner"


# Help and usage ----------------------------------------------------------------------------------


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


# Errors ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("command", [("plan",), ("check",), ("explain", "--coverage"), ("export", "--to", "vllm")])
def test_empty_name_is_a_one_line_error(run: Run, command: tuple[str, ...]) -> None:
    ran = run(command[0], "", *command[1:])
    assert (ran.code, ran.err) == (1, "error: '' names no file; give the path of one\n")


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "wrong.yaml"),
        ("show", "wrong.yaml"),
        ("run", "wrong.yaml"),
        ("engine", "vllm", "--bad"),
        ("check", "--engine", "sglang", "--bad"),
        ("compare", "wrong.yaml", "vllm"),
        ("compare", "vllm", "sglang --bad"),
    ],
)
def test_no_note_stands_above_an_unrelated_error(run: Run, command: tuple[str, ...]) -> None:
    """The default machine, and what an emulation assumes."""
    edited("wrong.yaml", SPEC, ("max_num_reqs: 256", "max_num_reqs: 8.7"))
    ran = run(*command)
    assert ran.code == 1
    assert "note:" not in ran.err


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
        f"error: wrong.yaml:{places['8.7'][0]}:{places['8.7'][1]}: limits.max_num_reqs: expected an integer, got 8.7",
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
    wrong = edited("full.yaml", "plans/specs/llama-3.2-3b-eagle-t4.yaml", ("mode: FULL_AND_PIECEWISE", "mode: FULL"))
    ran = run("plan", wrong, "-e", "t4")
    assert ran.code == 1
    assert "mode: FULL is not possible" in ran.err
    assert "request PIECEWISE" in ran.err


def test_a_role_that_the_plan_does_not_have(run: Run) -> None:
    plan = "plans/locked/llama-3.1-8b.h100.yaml"
    ran = run("explain", plan, "--role", "draft_decode", "--num-reqs", "3", "--query-len", "1")
    assert ran.code == 1
    assert "the plan has no role draft_decode" in ran.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", PLAN], "this is a plan, not a spec; give the spec that it was made from"),
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


# backends and schema -----------------------------------------------------------------------------


def test_backends(run: Run) -> None:
    ran = run("backends")
    assert ran.code == 0
    head, _version, *rows = ran.out.splitlines()
    assert [name in head for name in ("environment", "flash_attention", "flashinfer", "reference")] == [True] * 4
    assert [row.split()[0] for row in rows[: len(shipped_environments())]] == list(shipped_environments())


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
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=300, **options)


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["plan", "nowhere.yaml"], 1), (["diff", PLAN, TINY_PLAN], 2)]
)
def test_exit_codes_reach_the_shell(folder: Path, arguments: list[str], code: int) -> None:
    ran = command(*arguments)
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr


def test_it_runs_as_a_module(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-I", "-m", "capture_planner", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("capture-planner, version ")


@pytest.mark.parametrize("arguments", [["plan", TINY, "-e", "cpu"], ["schema", "plan"]])
def test_a_reader_that_goes_away_is_no_traceback(folder: Path, arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run([COMMAND, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr


def test_colours_only_on_a_terminal(folder: Path) -> None:
    assert "\x1b[" not in command("show", TINY_PLAN, env={**os.environ, "TERM": "xterm-256color"}).stdout


def test_standard_input_of_a_process(folder: Path) -> None:
    batch = {"role": "target", "num_reqs": 3, "num_tokens": 12, "query_len": 4}
    ran = command("explain", PLAN, "--batches", "-", input=json.dumps(batch))
    assert json.loads(ran.stdout)["mode"] == "FULL"


def test_no_torch_and_no_cli_libraries_at_import(folder: Path) -> None:
    code = "import sys, capture_planner; print(sorted({'torch', 'rich', 'click'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize(
    ("error", "says", "code"),
    [
        (click.exceptions.Abort(), "interrupted\n", 130),
        (KeyboardInterrupt(), "interrupted\n", 130),
        (BrokenPipeError(), "", 1),
    ],
)
def test_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, says: str, code: int
) -> None:
    def stop(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.cli, "main", stop)
    monkeypatch.setattr(sys, "argv", ["capture-planner", "backends"])
    if not says:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code
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
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for name in ("stdin", "stdout", "stderr")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["capture-planner", *arguments])
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code in (0, 1, 2)


# Standard input ----------------------------------------------------------------------------------


@contextmanager
def pipe_of(text: str) -> Iterator[str]:
    """Yield the name of a pipe with the text in it, as a shell's ``<(...)`` has one."""
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    yield f"/dev/fd/{read}"
    os.close(read)


@pytest.mark.parametrize("arguments", ["plan {} -e h100", "show {} -e h100", "check {} -e h100",
                                       "explain {} -e h100 --num-reqs 8 --query-len 4"])  # fmt: skip
def test_a_spec_is_read_from_a_pipe(arguments: str, call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be read once only, and the answer is that of the file."""
    monkeypatch.chdir(ROOT)
    text = Path(SPEC).read_text("utf-8")
    expected = call(*arguments.format(SPEC).split())
    assert expected.code == 0
    ran = call(*arguments.format("-").split(), stdin=text.encode())
    assert (ran.code, ran.out.replace("<stdin>", SPEC)) == (0, expected.out)
    with pipe_of(text) as name:
        ran = call(*arguments.format(name).split())
    assert (ran.code, ran.out.replace(name, SPEC)) == (0, expected.out)


@pytest.mark.parametrize("line", ["{command} show <(cat {plan})", "cat {plan} | {command} show /dev/stdin"])
def test_a_plan_is_read_from_a_shells_pipe(line: str, call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = line.format(command=f"{sys.executable} -m capture_planner", plan=TINY_PLAN)
    ran = subprocess.run(["bash", "-c", words], capture_output=True, text=True, cwd=ROOT, check=False)
    monkeypatch.chdir(ROOT)
    assert (ran.returncode, ran.stdout) == (0, call("show", TINY_PLAN).out)


def test_problems_of_standard_input_have_a_place_in_it(call: Run) -> None:
    text = (ROOT / SPEC).read_text("utf-8").replace("max_num_reqs: 256", "max_num_reqs: 8.7")
    ran = call("plan", "-", "-e", "h100", stdin=text.encode())
    assert ran.code == 1
    assert ran.err.startswith("error: <stdin>:")
    assert "limits.max_num_reqs: expected an integer, got 8.7" in ran.err


METRICS = 'vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 12.0\n'


def test_standard_input_that_was_read_says_so(call: Run) -> None:
    """One name for it has its text; another finds nothing."""
    for words in (("show", "-"), ("compare", "-", "-"), ("traffic", "-", "-")):
        text = METRICS if words[0] == "traffic" else ""
        assert "error: <stdin>: standard input is empty, or was read before" in call(*words, stdin=text.encode()).err


# The list of commands ----------------------------------------------------------------------------


def test_the_command_list_has_whole_phrases(run: Run) -> None:
    shown = run("--help").out
    for command in (CORE | dict(installed_commands())).values():
        assert command.help.endswith("."), command.name
        assert f"{command.help}\n" in shown
        assert command.load().name == command.name
