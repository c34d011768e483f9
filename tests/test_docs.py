"""The pages: generated parts are current, examples run, and every documented choice is documented."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import examples
import generate
import gpu_bench_tables
import pytest
import results
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from capture_planner import codec
from capture_planner.analysis import lint
from capture_planner.cli import cli
from capture_planner.modes import Reason
from capture_planner.planning.planner import plan
from capture_planner.plugins.registry import load_backends
from capture_planner.records.backend import Fill
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.observation import Observation
from capture_planner.records.spec import Policy, Spec
from capture_planner.report.findings import DRIFT_CODE
from capture_planner_runner.bench.record import TargetVerdict
from support.measured import decodes, profile

ROOT = Path(__file__).parent.parent
EXECUTABLE = [
    path for path in generate.PAGES if re.search(r"^```(?:console|python)|^<!-- gen", path.read_text("utf-8"), re.M)
]
OUTSIDE_THE_SITE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize("path", EXECUTABLE, ids=lambda path: path.stem)
def test_page_is_current_and_its_examples_run(path: Path) -> None:
    assert path.read_text("utf-8") == generate.render(path), "run: tox -e write-docs"


def _api_examples() -> Iterator[tuple[str, str]]:
    """Yield each public module of the reference whose docstring has Python in it, with that."""
    for page in sorted((ROOT / "docs" / "reference" / "api").glob("*.md")):
        for name in re.findall(r"automodule:: (\S+)", page.read_text("utf-8")):
            text = importlib.import_module(name).__doc__ or ""
            for block in re.findall(r"::\n\n((?: {4}.*\n|\n)+)", text):
                if " import " in block:
                    yield name, textwrap.dedent(block)


@pytest.mark.parametrize(("name", "block"), list(_api_examples()))
def test_example_of_an_api_page_runs(name: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a spec; names that an example leaves to its reader are of classes to write."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "plans" / "specs" / "qwen3-8b-eagle3.yaml", "spec.yaml")
    exec(block, {})


def _write_result(folder: Path, script: str, content: dict[str, Any], date: str, name: str) -> None:
    file = folder / f"{script}-{name}.json"
    file.write_text(json.dumps({"provenance": {"date": date}, **content}), "utf-8")


@given(order=st.permutations(range(4)))
def test_newest_result_counts_whatever_its_file_name(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("results")
    for day, name in enumerate(order):
        date = f"2026-11-2{day}T07:00:00+00:00"
        _write_result(folder, "gpu_bench", {"results": {}}, date, f"{name}")
        campaign = {"results": [{"backend": f"b{day % 2}", "steps": day}, {"backend": "c", "skipped": ""}]}
        _write_result(folder, "gpu_equality", campaign, date, f"{name}")
    assert results.bench(folder)["provenance"]["date"].startswith("2026-11-23")
    assert {name: seen["steps"] for name, seen in results.campaigns(folder).items()} == {"b0": 2, "b1": 3}


@given(
    reached=st.floats(0.1, 100),
    wanted=st.floats(0.1, 100),
    at_most=st.booleans(),
    absent=st.sampled_from(["plan", "figure", "nothing"]),
)
def test_target_table_shows_met_missed_and_not_measured(
    reached: float, wanted: float, at_most: bool, absent: str
) -> None:
    verdict = TargetVerdict(figure="decode", what="a step", wanted=wanted, reached=reached, at_most=at_most)
    shown = {name: getattr(verdict, name) for name in ("holds", "missed_by", *attrs.asdict(verdict))}
    reports: dict[str, Any] = {"one, K=0": {"decode": [{}], "targets": [shown]}, "two, K=5": {}}
    if absent != "plan":
        reports["two, K=0"] = {"decode": [] if absent == "figure" else [{}], "targets": []}
    with mock.patch.object(results, "bench", return_value={"results": reports}):
        table = gpu_bench_tables.targets()
    (row,) = (line for line in table.splitlines() if "a step" in line)
    assert ("missed by" in row) is not verdict.holds
    assert row.endswith("| - |" if absent == "nothing" else "| not measured |")
    assert ("- two, K=0: not in this run." in table) == (absent == "plan")


def _yaml_blocks() -> Iterator[Any]:
    for path in generate.PAGES:
        for number, block in enumerate(examples.blocks(path.read_text("utf-8"), "yaml")):
            yield pytest.param(block, id=f"{path.stem}-{number}")


@pytest.mark.parametrize("block", list(_yaml_blocks()))
def test_yaml_example_can_be_read_and_planned(block: str) -> None:
    """A whole file is read as it is; a part of a spec is merged into a complete one."""
    yaml = YAML(typ="safe", pure=True)
    data = yaml.load(block)
    if "engine" in data:
        assert codec.loads(block, Observation).roles
    elif "device" in data:
        assert codec.loads(block, Environment).device
    else:
        if "version" not in data:
            base = (ROOT / "plans" / "specs" / "llama-3.1-8b.yaml").read_text("utf-8")
            block = codec.dumps_json({**yaml.load(base), **data})
        environment = codec.load_environment(ROOT / "plans" / "environments" / "h100.yaml")
        spec = codec.loads(block, Spec)
        measured = spec.sizes.policy is Policy.MEASURED
        measurements = Measurements(profile=profile(), traffic=decodes({1: 9, 100: 9}, 1)) if measured else None
        assert plan(spec, environment, load_backends(), measurements).roles


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", OUTSIDE_THE_SITE, ids=lambda path: path.name)
def test_every_link_outside_the_site_resolves(path: Path) -> None:
    """Sphinx checks the links of the pages in docs."""
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target.read_text("utf-8")), link


def test_no_text_installs_from_an_index() -> None:
    """No package index has these distributions; somebody else could take the name there."""
    suffixes = {".md", ".py", ".toml", ".j2", ".yml"}
    folders = ("backends", "engines", "runner", "conformance", "tuner", "capture_planner", "docs", ".github")
    for top in (ROOT, *(ROOT / name for name in folders)):
        for path in top.glob("*") if top == ROOT else top.rglob("*"):
            if path.suffix in suffixes:
                assert not re.search(r"pip install[^\n]* ['\"]?capture-planner\b", path.read_text("utf-8")), path


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.parametrize("fill", Fill)
def test_every_fill_is_explained(fill: Fill) -> None:
    assert f"| `{fill.value}` |" in page("extending/backend-contract")


@pytest.mark.parametrize("code", [*lint.RULES, DRIFT_CODE])
def test_every_lint_code_is_documented(code: str) -> None:
    section = page("reference/lint").partition(f"### {code}\n")[2].partition("\n### ")[0]
    assert "Fix: " in section


@pytest.mark.parametrize("kind", lint.BugClass)
def test_every_bug_class_has_its_invariant(kind: lint.BugClass) -> None:
    assert f"| {kind.name}, {kind.value} |" in page("reference/lint")


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_has_an_example(command: str) -> None:
    assert any(
        line.startswith((f"$ capture-planner {command} ", f"$ capture-planner {command}\n"))
        or f"| capture-planner {command} " in line
        for path in generate.PAGES
        for block in examples.blocks(path.read_text("utf-8"), "console")
        for line in block.splitlines(keepends=True)
    )


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_is_in_the_table_of_commands(command: str) -> None:
    assert f"`{command}`" in page("index")


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_is_explained(policy: Policy) -> None:
    assert f"| `{policy.value}` |" in page("concepts/sizes")
    assert f"**`{policy.value}`**" in page("concepts/sizes")


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained(reason: Reason) -> None:
    assert f"| `{reason.value}` |" in page("concepts/index")


RUN = "capture-planner run plan.yaml"


@pytest.mark.parametrize(
    ("command", "shown", "now", "is_kept"),
    [
        (RUN, "  3 graphs  1.2 ms\n", "  3 graphs  881.0 us\n", True),
        (RUN, "  3 graphs in 2 KiB\n", "  4 graphs in 2 KiB\n", False),
        (RUN, "  padding 1.2%\n", "  padding 1.3%\n", False),
        (RUN, "...\nb\n", "a\na\nb\n", True),
        (RUN, "a\n...\n", "a\nb\n", True),
        (RUN, "", "a\n", False),
        ("capture-planner show plan.yaml", "takes 1.2 ms\n", "takes 1.3 ms\n", False),
    ],
)
def test_output_is_kept_while_it_matches(command: str, shown: str, now: str, is_kept: bool) -> None:
    """Measurements may differ, and a line of dots stands for any lines; nothing else may differ."""
    assert examples.updated(command, shown, now) == (shown if is_kept else now)


@pytest.mark.parametrize(
    ("shown", "now", "expected"),
    [
        ("a\n...\nc\n", "a\nb\nd\n", "a\n...\nd\n"),
        ("...\nc\n", "b\nc\nd\n", "...\nd\n"),
        ("...\ntwo cats\n...\n", "one dog\ntwo old cats\nthree\n", "...\ntwo old cats\n...\n"),
        ("...\nx\n", "", "...\n"),
    ],
)
def test_shortened_output_is_updated_part_by_part(shown: str, now: str, expected: str) -> None:
    assert examples.updated(RUN, shown, now) == expected


def test_every_tox_environment_is_explained() -> None:
    listed = re.findall(r"^\[testenv:([\w-]+)\]", (ROOT / "tox.ini").read_text("utf-8"), re.M)
    for name in listed:
        assert f"| `{name}` |" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
