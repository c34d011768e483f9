"""Outputs that cannot be written, interruptions, and text of files that is not meant for a terminal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from capture_planner import codec
from capture_planner.cli.common import show_text
from capture_planner.report.writing import Grid, Report, Section
from support.commands import PLAN, SPEC, TINY, Run

COMMAND = f"'{sys.executable}' -m capture_planner"


def shell(words: str) -> subprocess.CompletedProcess[str]:
    """Run words of a command in a shell, with its output in a pipe."""
    return subprocess.run(f"{COMMAND} {words}", shell=True, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_while_modules_are_imported(number: signal.Signals, code: int) -> None:
    """One line and the exit code of the signal, from the program itself."""
    program = f"""
import builtins, signal
# A shell starts what runs in its background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
own = builtins.__import__
def stop(name, *others, **named):
    if name.startswith("capture_planner.cli"):
        signal.raise_signal({int(number)})
    return own(name, *others, **named)
builtins.__import__ = stop
import capture_planner_command
capture_planner_command.main()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", "interrupted\n")


# Outputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: (path.write_bytes(b""), path.chmod(0o444)), "read-only"),
    ],
)
@pytest.mark.parametrize("command", [("plan", SPEC), ("environment",)])
def test_output_that_cannot_be_written_is_one_line(run: Run, command: Any, prepare: Any, says: str) -> None:
    prepare(Path("out.yaml"))
    ran = run(*command, "-o", "out.yaml")
    assert ran.code == 1
    assert says in ran.err or "is a folder" in ran.err
    assert not list(Path().glob(".*"))


def test_name_that_is_too_long_is_not_blamed_on_standard_output(run: Run) -> None:
    ran = run("plan", SPEC, "-o", "x" * 300)
    assert ran.code == 1
    assert "File name too long" in ran.err
    assert "standard output" not in ran.err


def test_output_to_a_pipe_is_written(folder: Path) -> None:
    """The whole plan, and the summary after it."""
    ran = shell(f"plan {TINY} -e cpu -o /dev/stdout")
    assert ran.returncode == 0
    assert ran.stdout.startswith(shell(f"plan {TINY} -e cpu").stdout)


def test_closed_standard_output_is_an_error(folder: Path) -> None:
    """Nothing was shown, so nothing went well."""
    ran = shell(f"plan {TINY} >&-")
    assert (ran.returncode, ran.stderr) == (
        1,
        "error: standard output is closed; redirect it to /dev/null to discard it\n",
    )


# Text of files -----------------------------------------------------------------------------------


CONTROL = "\x1b]0;owned\x07\x9b2J\u202e"


@pytest.mark.parametrize(
    "words",
    [
        ("show", "evil.yaml"),
        ("diff", PLAN, "evil.yaml"),
        ("check", "evil.yaml"),
        ("explain", "evil.yaml", "--num-reqs", "2", "--query-len", "4"),
        ("show", "evil.yaml", "--format", "json"),
        ("plan", "evil.yaml"),
    ],
)
def test_no_control_character_of_a_file_reaches_a_terminal_or_a_pipe(run: Run, words: Any) -> None:
    """Decisions, versions, keys and what errors repeat of them."""
    data = codec.to_data(codec.load_plan(PLAN))
    for role in data["roles"]:
        for part, keys in (("groups", ("version",)), ("decisions", ("says", "before", "after"))):
            for each in role[part]:
                each |= dict.fromkeys(keys, CONTROL)
    data |= {CONTROL: 1} if words[0] == "check" else {}
    Path("evil.yaml").write_text(json.dumps(data), "utf-8")
    ran = run(*words)
    assert "owned" in ran.out + ran.err or words[0] in ("explain", "plan")
    assert all(line.isprintable() for line in (ran.out + ran.err).split("\n"))


def test_narrow_terminal_breaks_no_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A table is 80 columns or wider; the terminal wraps its lines."""
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    words = ("FULL_AND_PIECEWISE", "flash_attention", "uncovered")
    section = Section(name="table", parts=(Grid.of(("one", "two", "three"), [words]),))
    show_text(Report(kind="test", title="A table", sections=(section,)))
    assert all(word in capsys.readouterr().out for word in words[:1])
