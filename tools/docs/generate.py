"""Write what the pages can be told from the program: reference tables, and the output of examples.

``python docs/generate.py`` brings README.md and docs/*.md up to date; with ``--check`` it changes
nothing, shows what is out of date, and exits with 1. In a page:

- what stands between ``<!-- generated: NAME -->`` and ``<!-- end -->`` comes from ``PARTS``;
- a ``console`` block holds commands (``$ ...``), each followed by its output. They run in order, in
  a fresh folder per page that has the repository's ``plans``. In an output, a line ``...`` stands for
  any lines. Of ``capture-planner run``, times, rates and bytes differ from run to run: they are those
  of a real run, and are not compared;
- a block after ``<!-- file: NAME -->`` is a file of that folder;
- a ``python`` block runs in the folder; the blocks of a page share their names.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import attrs
import conformance_tables
import gallery_tables
import gpu_bench_tables
import gpu_equality_tables
import gpu_results

from capture_planner import cli, codec
from capture_planner.analysis import lint
from capture_planner.analysis.lint import core as lint_core
from capture_planner.codec import json_schema as schema
from capture_planner.codec.shipped import find_environment, shipped_environments
from capture_planner.engines.check import ENGINE_RULES
from capture_planner.planning.sizing.minimax import worst_ratio
from capture_planner.planning.sizing.policies import Context, decode_sizes
from capture_planner.plugins import hookspecs
from capture_planner.records import backend as contract
from capture_planner.records import spec
from capture_planner.records.batch_space import Domain
from capture_planner.records.environment import Environment
from capture_planner.records.model import Speculative
from capture_planner.records.plan import Plan
from capture_planner.report.findings import DRIFT_CODE

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# Parts -----------------------------------------------------------------------------------------


def _rules() -> str:
    """Every lint rule: a table of all, then a section for each."""
    table = ["| code | name | severity | class |", "| --- | --- | --- | --- |"]
    sections = []
    for code, rule in sorted(lint.RULES.items()):
        kind = f"{rule.bug_class.name} ({rule.bug_class.value})"
        table.append(f"| [{code}](#{code.lower()}) | {rule.name} | {rule.severity.value} | {kind} |")
        sections += [f"### {code}", "", f"**{rule.name}**: {rule.severity.value}, class {kind}.", ""]
        sections += [rule.explanation, ""]
        if rule.threads:
            sections += [f"Seen in {', '.join(_thread(thread) for thread in rule.threads)}.", ""]
        sections += [f"What to do: {rule.remedy}.", ""]
        if rule.spec_path:
            sections += [f"In a spec, look at `{'.'.join(rule.spec_path)}`.", ""]
    table.append(f"| [{DRIFT_CODE}](#{DRIFT_CODE.lower()}) | drift | error | J (observability) |")
    return "\n".join([*table, "", *sections]).rstrip()


def _thread(thread: str) -> str:
    return f"[{thread}]({lint_core.link(thread)})"


def _engine_rules() -> str:
    """Every rule about an engine's flags, with what it means and the flag that mends it."""
    sections = []
    for code, rule in sorted(ENGINE_RULES.items()):
        kind = f"{rule.bug_class.name} ({rule.bug_class.value})"
        sections += [f"### {code}", "", f"**{rule.name}**: {rule.severity.value}, class {kind}.", ""]
        sections += [rule.explanation, ""]
        sections += [f"Seen in {', '.join(_thread(thread) for thread in rule.threads)}.", ""]
        sections += [f"- {engine}: {mend}." for engine, mend in rule.spec_paths.items()]
        sections.append("")
    return "\n".join(sections).rstrip()


def _hooks() -> str:
    """Every hook, then every method of a backend, with its documentation."""
    lines = []
    for name, function in vars(hookspecs).items():
        if hasattr(function, f"{hookspecs.PROJECT}_spec"):
            lines += _documented(name, function)
    for name, method in vars(contract.Backend).items():
        if not name.startswith("_") and (callable(method) or isinstance(method, property)):
            lines += _documented(f"Backend.{name}", method)
    return "\n".join(lines).rstrip()


def _runtime() -> str:
    """The torch side of a backend: each method, then each record that they get."""
    from capture_planner.runtime import executor as runtime

    lines = _documented("Runnable.reserve", runtime.Runnable.reserve)
    for name, method in vars(runtime.Executor).items():
        if not name.startswith("_") and callable(method):
            lines += _documented(f"Executor.{name}", method)
    for record in (runtime.Reservation, runtime.Metadata, runtime.LayerCache, runtime.Scoring):
        lines += [f"### `{record.__name__}`", "", _prose(record.__doc__), ""]
        lines += ["| field | type | meaning |", "| --- | --- | --- |"]
        told = _attribute_docs(record)
        for attribute in attrs.fields(record):
            kind = _short(str(attribute.type)).replace("|", "\\|")
            lines.append(f"| `{attribute.name}` | `{kind}` | {told.get(attribute.name, '')} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _fields() -> str:
    """The fields that the runner owns."""
    groups = {
        "each role": contract.COMMON_FIELDS,
        "the target, with drafts": contract.SPECULATIVE_FIELDS,
        "the target, with multimodal rope": contract.MROPE_FIELDS,
    }
    lines = ["| field | of | one for each | padded with |", "| --- | --- | --- | --- |"]
    for role, fields in groups.items():
        for field in fields:
            fill = f"{field.value}" if field.fill is contract.Fill.CONSTANT else f"`{field.fill.value}`"
            axis = f"{field.axis.value} and {field.inner.value}" if field.inner else field.axis.value
            lines.append(f"| `{field.name}` | {role} | {axis} | {fill} |")
    return "\n".join(lines)


def _attribute_docs(record: type) -> dict[str, str]:
    """Return what stands under each attribute of a class, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        member.target.id: " ".join(_prose(text.value.value).split())
        for member, text in itertools.pairwise(body.body)
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def _documented(name: str, thing: object) -> list[str]:
    function = thing.fget if isinstance(thing, property) else thing
    assert callable(function)
    signature = _short(str(inspect.signature(function)))
    return [f"### `{name}`", "", f"`{name.rpartition('.')[2]}{signature}`", "", _prose(function.__doc__), ""]


def _short(annotation: str) -> str:
    """Return an annotation without quotes and modules."""
    return re.sub(r"'|(\w+\.)+(?=\w)", "", annotation)


def _prose(docstring: str | None) -> str:
    return re.sub(r"``(.*?)``", r"`\1`", inspect.cleandoc(docstring or ""))


def _policies() -> str:
    """Every size policy with what its source says of it."""
    source = ast.parse(textwrap.dedent(inspect.getsource(spec.Policy))).body[0]
    assert isinstance(source, ast.ClassDef)
    lines = ["| policy | sizes | its options |", "| --- | --- | --- |"]
    for member, text in zip(source.body[1::2], source.body[2::2], strict=True):
        assert isinstance(member, ast.Assign)
        assert isinstance(member.value, ast.Constant)
        assert isinstance(text, ast.Expr)
        assert isinstance(text.value, ast.Constant)
        policy = spec.Policy(member.value.value)
        options = [f"`{option}`" for option, takers in spec._OPTIONS.items() if policy in takers]
        meaning = str(text.value.value).replace("``", "`")
        lines.append(f"| `{policy.value}` | {meaning} | {', '.join(options) or 'none'} |")
    return "\n".join(lines)


def _figures() -> str:
    """What each policy makes of up to 256 requests on an H100, without speculation and with K = 3."""
    limits, machine = spec.Limits(max_num_reqs=256, max_num_tokens=8192), find_environment("h100")
    lines = [
        "| policy | graphs of 1 token | covers | worst | graphs of 4 tokens | covers | worst |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for name, sizes in (
        ("default", spec.Sizes()),
        ("minimax, 35", spec.Sizes(policy=spec.Policy.MINIMAX, graphs=35)),
        ("minimax, 18", spec.Sizes(policy=spec.Policy.MINIMAX, graphs=18)),
        *(
            (p.value, spec.Sizes(policy=p))
            for p in spec.Policy
            if p.value not in ("default", "minimax", "explicit")
        ),
    ):
        cells = [name]
        for tokens in (0, 3):
            speculative = (
                codec.loads(f"{{method: eagle3, num_tokens: {tokens}}}", Speculative) if tokens else None
            )
            context = Context(
                limits=limits, speculative=speculative, parallel=spec.Parallel(), environment=machine
            )
            choice = decode_sizes(sizes, Domain.upto(256), 1 + tokens, context)
            worst = float(worst_ratio(choice.domain, choice.sizes) - 1)
            cells += [str(len(choice.sizes)), f"1 to {choice.sizes[-1]}", f"{worst:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _environments() -> str:
    """The shipped environments."""
    lines = ["| name | device | compute capability | memory |", "| --- | --- | --- | --- |"]
    for name in shipped_environments():
        device = find_environment(name).device
        memory = f"{device.memory / (1 << 30):.0f} GiB"
        lines.append(f"| `{name}` | {device.name} | {device.capability or 'none'} | {memory} |")
    return "\n".join(lines)


def _reference(kind: type, *elsewhere: type) -> str:
    """The reference of a file kind, without the records that another kind's reference has."""
    told = {section for other in elsewhere for section in _sections(other)}
    return "\n\n".join(section for section in _sections(kind) if section not in told)


def _sections(kind: type) -> list[str]:
    text = re.sub(r"``(.+?)``", r"`\1`", schema.reference(kind)).replace("| `` |", "| empty |")
    return [section.strip() for section in re.split(r"^(?=### )", text, flags=re.M)[1:]]


def _laws() -> str:
    """The property tests of the laws, each with the first line of its file."""
    lines = ["| law | tested in |", "| --- | --- |"]
    found = (ROOT / "tests" / "property").glob("test_law*.py")
    for path in sorted(found, key=lambda path: int(re.sub(r"\D", "", path.name))):
        says = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()[0]
        lines.append(f"| {says} | [{path.name}](../{path.relative_to(ROOT).as_posix()}) |")
    return "\n".join(lines)


def _ranks() -> str:
    """The newest campaign over vectors of ranks."""
    result = gpu_results.files("ranks-*.json")[-1]
    counts, plans = result["counts"], result["plans"]
    vectors = result["vectors"]
    lines = [
        f"{vectors:,} vectors over {plans['all']} plans, {plans['shipped']} of them shipped; "
        f"{result['answers']:,} answers of single ranks; {len(result['violations'])} violations; "
        f"seed {result['seed']}, {result['provenance']['date'][:10]}.",
        "",
        "| vectors | number | share |",
        "| --- | --: | --: |",
    ]
    told = {
        "all ranks replay FULL": "FULL",
        "all ranks replay PIECEWISE": "PIECEWISE",
        "all run eager, as a rank lacks the graph": "NONE: rank",
        "all take the next graph, as a rank lost one": "took the next entry, one being lost",
        "all idle": "NONE: idle",
        "some idle": "with idle ranks",
        "K by each rank's own requests differs": "with ranks whose own K differs",
        "with active LoRA": "with LoRA",
        "gone apart, had each rank dispatched alone": "apart, if each rank dispatched alone",
    }
    lines += [f"| {what} | {counts[key]:,} | {counts[key] / vectors:.1%} |" for what, key in told.items()]
    return "\n".join(lines)


def _template(file: str) -> str:
    """One file of the template of a backend."""
    return f"```py\n{(ROOT / 'docs' / 'template' / file).read_text('utf-8')}```"


PARTS: dict[str, Callable[[], str]] = {
    "laws": _laws,
    "template-tests": lambda: _template("tests/test_conformance.py"),
    "template-backend": lambda: _template("src/capture_planner_my_attention/backend.py"),
    "template-executor": lambda: _template("src/capture_planner_my_attention/executor.py"),
    "rules": _rules,
    "engine-rules": _engine_rules,
    "hooks": _hooks,
    "runtime": _runtime,
    "fields": _fields,
    "policies": _policies,
    "figures": _figures,
    "environments": _environments,
    "ranks": _ranks,
    "spec": lambda: _reference(spec.Spec),
    "environment": lambda: _reference(Environment),
    "plan": lambda: _reference(Plan, spec.Spec, Environment),
    **conformance_tables.PARTS,
    **gpu_bench_tables.PARTS,
    **gpu_equality_tables.PARTS,
    **gallery_tables.PARTS,
}


# Examples --------------------------------------------------------------------------------------


class Workspace:
    """The folder in which the examples of one page run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = 0
        self.names: dict[str, object] = {"__name__": "example"}
        self.plugins = folder / ".plugins"
        shutil.copytree(
            ROOT / "plans", folder / "plans", ignore=shutil.ignore_patterns("*.py", "__pycache__")
        )

    def write(self, name: str, text: str) -> None:
        """Write a file of the page."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def run(self, command: str) -> str:
        """Run one command as a shell would, and return what it prints."""
        if command == "echo $?":
            return f"{self.code}\n"
        if command.startswith("pip install "):
            return self._install(shlex.split(command)[2:])
        words = shlex.split(command, comments=True)
        plain = words[0] == "capture-planner" and not set(command) & set("|<>;&$`")
        return self._call(words[1:]) if plain and not self.plugins.exists() else self._shell(command)

    def _call(self, arguments: list[str]) -> str:
        """Run capture-planner in this process."""
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            mock.patch.object(sys, "argv", ["capture-planner", *arguments]),
            mock.patch.dict(os.environ, _environment()),
        ):
            try:
                cli.main()
            except SystemExit as end:
                self.code = int(end.code or 0)
        buffer = out.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode("utf-8")

    def _shell(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            # Some programs say more where CI is set; a page is the same everywhere.
            env={
                **{name: value for name, value in os.environ.items() if name not in ("CI", "GITHUB_ACTIONS")},
                **_environment(),
                "PYTHONPATH": str(self.plugins),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=60,
        )
        self.code = done.returncode
        return done.stdout

    def _install(self, arguments: list[str]) -> str:
        """Install a plugin of the page where only this page sees it; the core is already there."""
        local = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(self.plugins)]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *local, *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        self.code = done.returncode
        return done.stdout + (done.stderr if done.returncode else "")

    def execute(self, source: str, where: str) -> str:
        """Run Python; what it prints is returned."""
        out = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out):
            exec(compile(source, where, "exec"), self.names)
        return out.getvalue()


def _environment() -> dict[str, str]:
    scripts = sysconfig.get_path("scripts")
    return {"PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")]), "COLUMNS": "100", "TERM": "dumb"}


_BLOCK = re.compile(
    r"(?P<file><!-- file: (?P<name>\S+) -->\n+)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.M | re.S
)
_PART = re.compile(r"(?P<open><!-- generated: (?P<name>[\w-]+) -->\n).*?(?P<close><!-- end -->)", re.S)


def blocks(text: str, kind: str) -> Iterator[str]:
    """Return the blocks of one kind of a page."""
    return (match["body"] for match in _BLOCK.finditer(text) if match["kind"] == kind)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Return the commands of a console block, each with the output that the page shows."""
    for part in re.split(r"^(?=\$ )", block, flags=re.M)[1:]:
        command, _, shown = part.removeprefix("$ ").partition("\n")
        yield command, shown


_MEASURED = re.compile(r"[ ]*\b[\d.,]*\d ?(?:us|ms|s|tokens/s|bytes|B|KiB|MiB|GiB)\b")


def kept(command: str, shown: str, now: str) -> str:
    """Return the output that a page goes on to show: what it has, where that is still true."""
    mask = _masked if re.search(r"capture-planner run |pytest ", command) else str
    parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", mask(shown), flags=re.M)]
    return shown if re.fullmatch("(?:.*\n)*?".join(parts), mask(now)) else now


def _masked(output: str) -> str:
    """Return an output without what was measured, and the columns' widths that follow it."""
    return re.sub(r" +", " ", _MEASURED.sub(" measured", output))


def render(page: Path) -> str:
    """Return a page as it should be."""
    text = _PART.sub(lambda m: f"{m['open']}\n{PARTS[m['name']]()}\n\n{m['close']}", page.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder).resolve())
        return _BLOCK.sub(lambda match: _rendered(match, workspace, page), text)


def _rendered(match: re.Match[str], workspace: Workspace, page: Path) -> str:
    if match["name"]:
        workspace.write(match["name"], match["body"])
    elif match["kind"] == "console":
        ran = (
            f"$ {command}\n{kept(command, shown, workspace.run(command))}"
            for command, shown in commands(match["body"])
        )
        return f"```console\n{''.join(ran)}```"
    elif match["kind"] == "python":
        shown = workspace.execute(match["body"], str(page))
        assert not shown, f"{page}: a python block prints; use assert instead"
    return match[0]


def main() -> None:
    """Write the pages, or with ``--check`` compare them."""
    check = sys.argv[1:] == ["--check"]
    stale = []
    for page in PAGES:
        before, after = page.read_text("utf-8"), render(page)
        if before == after:
            continue
        stale.append(page.relative_to(ROOT))
        if check:
            old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(old, new, str(page), "up to date", n=1))
        else:
            page.write_text(after, "utf-8")
    sys.stdout.write(f"{'out of date' if check else 'written'}: {', '.join(map(str, stale)) or 'none'}\n")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
