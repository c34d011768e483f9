"""Run the examples of a page.

- A ``console`` block has commands (``$ ...``), each followed by its output. They run in order, in a fresh
  folder per page that has the repository's ``plans``. A line ``...`` in an output stands for any lines. The
  output of ``capture-planner run`` and ``pytest`` is compared without times, rates and sizes.
- A block after ``<!-- file: NAME -->`` is written to that file.
- A ``python`` block is executed in the folder; the blocks of a page share their names.

``capture-planner`` runs in this process, so that torch is imported once for all pages.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from capture_planner import cli

ROOT = Path(__file__).parent.parent.parent

BLOCK = re.compile(r"(?P<file><!-- file: (?P<name>\S+) -->\n+)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.M | re.S)
_PIPELINE = re.compile(
    # No character that a shell gives a meaning: such a command goes to a shell.
    r"(?:(?P<source>[^|]+)\| *)?capture-planner (?P<arguments>[^|<>;&$`]*)"
    r"(?:\|(?P<filter>.+)|> (?P<target>\S+))?"
)
_DOTS = re.compile(r"^\.\.\.\n", re.M)
_MEASURED = re.compile(r"[ ]*\b[\d.,]*\d ?(?:us|ms|s|tokens/s|bytes|B|KiB|MiB|GiB)\b")


def blocks(text: str, kind: str) -> Iterator[str]:
    """Yield the blocks of one kind of a page."""
    return (match["body"] for match in BLOCK.finditer(text) if match["kind"] == kind)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a console block, each with the output that the page shows."""
    # What stands before the first command is no output.
    for part in re.split(r"^(?=\$ )", block, flags=re.M)[1:]:
        command, _, shown = part.removeprefix("$ ").partition("\n")
        yield command, shown


def updated(command: str, shown: str, output: str) -> str:
    """Return the output to show: the page's own while it still matches, else the new one.

    An output with lines of dots stays short: each of its parts becomes the part of the new output that is most like it.
    """
    # Only these measure. A number in the output of another command has to be right.
    mask = _masked if re.search(r"capture-planner (?:run|bench) |pytest ", command) else str
    parts = [re.escape(part) for part in _DOTS.split(mask(shown))]
    if re.fullmatch("(?:.*\n)*?".join(parts), mask(output)):
        return shown
    return _shortened(_DOTS.split(shown), output) if len(parts) > 1 else output


def _shortened(parts: list[str], output: str) -> str:
    """Return an output with dots in place of what is between the lines most like each part."""
    lines, shown, start = output.splitlines(keepends=True), [], 0
    for number, part in enumerate(parts):
        size = min(part.count("\n"), len(lines) - start)
        first = start if number == 0 else max(start, len(lines) - size)
        if 0 < number < len(parts) - 1:
            # It keeps what it knows of ``b``: windows are set as ``a``. ``autojunk`` would ignore frequent characters.
            likeness = difflib.SequenceMatcher(b=part, autojunk=False)
            scores = []
            for index in range(start, len(lines) - size + 1):
                likeness.set_seq1("".join(lines[index : index + size]))
                # Of windows that are equally alike, the first.
                scores.append((likeness.quick_ratio(), -index))
            first = -max(scores)[1]
        shown.append("".join(lines[first : first + size]))
        start = first + size
    return "...\n".join(shown)


def _masked(output: str) -> str:
    """Return an output without measurements, and without the column widths that depend on them."""
    return re.sub(r" +", " ", _MEASURED.sub(" measured", output))


class Workspace:
    """The folder in which the examples of one page run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exit_code = 0
        self.names: dict[str, object] = {"__name__": "example"}
        self.plugins = folder / ".plugins"
        self.plugin_path: list[str] = []
        ignored = shutil.ignore_patterns("*.py", "__pycache__")
        shutil.copytree(ROOT / "plans", folder / "plans", ignore=ignored)

    def render(self, match: re.Match[str], page: Path) -> str:
        """Write, run or execute one block of a page; returns the block with its current output."""
        if match["name"]:
            path = self.folder / match["name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(match["body"], "utf-8")
        elif match["kind"] == "console":
            outputs = (
                f"$ {command}\n{updated(command, shown, self.run(command))}"
                for command, shown in commands(match["body"])
            )
            return f"```console\n{''.join(outputs)}```"
        elif match["kind"] == "python":
            printed = self.execute(match["body"], str(page))
            assert not printed, f"{page}: a python block prints; use assert instead"
        return match[0]

    def run(self, command: str) -> str:
        """Run one command as a shell would, and return what it prints."""
        # No shell lives from one command to the next.
        if command == "echo $?":
            return f"{self.exit_code}\n"
        if editable := re.fullmatch(r"pip install .*--editable (\S+)", command):
            return self._install(self.folder / editable[1])
        pipeline = _PIPELINE.fullmatch(command)
        if pipeline is None:
            return self._shell(command)
        stdin = self._shell(pipeline["source"]) if pipeline["source"] else ""
        arguments = shlex.split(pipeline["arguments"])
        # Written through, as its bytes are read from the buffer below it.
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        if not pipeline["filter"] and not pipeline["target"]:
            self._call(arguments, stdin, out, out)
            return _text(out)
        # Only standard output goes down the pipe; a terminal shows the other before it.
        err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        self._call(arguments, stdin, out, err)
        if pipeline["target"]:
            (self.folder / pipeline["target"]).write_text(_text(out), "utf-8")
            return _text(err)
        return _text(err) + self._shell(pipeline["filter"], _text(out))

    def _call(self, arguments: list[str], stdin: str, out: io.TextIOWrapper, err: io.TextIOWrapper) -> None:
        """Run capture-planner in this process."""
        source = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(sys, "argv", ["capture-planner", *arguments]),
            mock.patch.object(sys, "stdin", source),
            mock.patch.object(sys, "path", [*self.plugin_path, *sys.path]),
            mock.patch.dict(os.environ, _environment()),
        ):
            try:
                cli.main()
            except SystemExit as end:
                self.exit_code = int(end.code or 0)
            finally:
                self._forget_plugins()

    def _forget_plugins(self) -> None:
        """Drop the page's own modules, so that the next command sees what the page changed in them."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(self.folder)):
                del sys.modules[name]
        # A finder knows a folder by its time of change, which files written soon after may leave as it was.
        importlib.invalidate_caches()

    def _shell(self, command: str, stdin: str = "") -> str:
        # Some programs print more where CI is set; a page is the same everywhere.
        variables = {name: value for name, value in os.environ.items() if name not in ("CI", "GITHUB_ACTIONS")}
        # An empty part of PYTHONPATH would be the current folder.
        python_path = os.pathsep.join([*self.plugin_path, variables.get("PYTHONPATH", "")]).strip(os.pathsep)
        process = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**variables, **_environment(), **({"PYTHONPATH": python_path} if python_path else {})},
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )
        self.exit_code = process.returncode
        return process.stdout

    def _install(self, source: Path) -> str:
        """Install a plugin of the page in place, where only this page sees it."""
        from hatchling.build import build_editable

        self.plugins.mkdir(exist_ok=True)
        with contextlib.chdir(source), contextlib.redirect_stdout(io.StringIO()):
            wheel = build_editable(str(self.plugins))
        with zipfile.ZipFile(self.plugins / wheel) as archive:
            archive.extractall(self.plugins)
        paths = [path.read_text("utf-8").split() for path in self.plugins.glob("*.pth")]
        self.plugin_path = [str(self.plugins), *(line for lines in paths for line in lines)]
        self.exit_code = 0
        return ""

    def execute(self, source: str, where: str) -> str:
        """Run Python, and return what it prints."""
        out = io.StringIO()
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            mock.patch.object(sys, "path", list(sys.path)),
        ):
            exec(compile(source, where, "exec"), self.names)
        self._forget_plugins()
        return out.getvalue()


def _text(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8")


def _environment() -> dict[str, str]:
    scripts = sysconfig.get_path("scripts")
    # Width and colours of a page are the same in every terminal.
    return {"PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")]), "COLUMNS": "100", "TERM": "dumb"}
