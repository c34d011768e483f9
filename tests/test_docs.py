"""The pages: up to date, their examples run, and nothing that should be documented is left out."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from capture_planner import codec
from capture_planner.analysis import lint
from capture_planner.bench.record import Verdict
from capture_planner.cli import cli
from capture_planner.modes import Reason
from capture_planner.planning.planner import plan
from capture_planner.plugins import hookspecs
from capture_planner.plugins.registry import load_backends
from capture_planner.records import backend as contract
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Policy, Spec
from capture_planner.report.findings import DRIFT_CODE

ROOT = Path(__file__).parent.parent


def _generate() -> ModuleType:
    found = importlib.util.spec_from_file_location("docs_generate", ROOT / "tools" / "docs" / "generate.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    with mock.patch.object(sys, "path", [str(ROOT / "tools" / "docs"), *sys.path]):  # as for a script
        found.loader.exec_module(module)
    return module


generate = _generate()
PAGES: list[Path] = generate.PAGES
TEXTS = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_up_to_date_and_its_examples_run(path: Path) -> None:
    assert path.read_text("utf-8") == generate.render(path), "run: tox -e write-docs"


def _written(folder: Path, script: str, results: dict[str, Any], date: str, name: str) -> None:
    file = folder / f"{script}-{name}.json"
    file.write_text(json.dumps({"provenance": {"date": date}, **results}), "utf-8")


@given(order=st.permutations(range(4)))
def test_the_newest_result_counts_whatever_its_name(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    """A page shows the last measurement of each backend, and the last bench."""
    results, folder = importlib.import_module("gpu_results"), tmp_path_factory.mktemp("results")
    for day, name in enumerate(order):
        date = f"2026-11-2{day}T07:00:00+00:00"
        _written(folder, "gpu_bench", {"results": {}}, date, f"{name}")
        results_of = {"results": [{"backend": f"b{day % 2}", "steps": day}, {"backend": "c", "skipped": ""}]}
        _written(folder, "gpu_equality", results_of, date, f"{name}")
    assert results.bench(folder)["provenance"]["date"].startswith("2026-11-23")
    assert {name: seen["steps"] for name, seen in results.campaigns(folder).items()} == {"b0": 2, "b1": 3}


@given(
    reached=st.floats(0.1, 100),
    wanted=st.floats(0.1, 100),
    at_most=st.booleans(),
    absent=st.sampled_from(["plan", "figure", "nothing"]),
)
def test_a_target_is_shown_as_met_missed_or_not_measured(
    reached: float, wanted: float, at_most: bool, absent: str
) -> None:
    """The table and the list of what is missed follow the verdict; what is not there is never left out."""
    tables, results = (importlib.import_module(name) for name in ("gpu_bench_tables", "gpu_results"))
    verdict = Verdict(figure="decode", what="a step", wanted=wanted, reached=reached, at_most=at_most)
    shown = {name: getattr(verdict, name) for name in ("holds", "missed_by", *attrs.asdict(verdict))}
    made = {"one, K=0": {"decode": [{}], "targets": [shown]}, "two, K=5": {}}
    if absent != "plan":
        made["two, K=0"] = {"decode": [] if absent == "figure" else [{}], "targets": []}
    with mock.patch.object(results, "bench", return_value={"results": made}):
        table, missed = tables.targets(), tables.missed()
    (row,) = (line for line in table.splitlines() if "a step" in line)
    assert (", met |" in row, "missed by" in row) == (verdict.holds, not verdict.holds)
    assert ("one, a step: missed by" in missed) == (not verdict.holds)
    assert row.endswith("| - |" if absent == "nothing" else "| not measured |")
    assert ("- two, K=0: not in this run." in table) == (absent == "plan")


def _yaml_blocks() -> Iterator[Any]:
    for path in PAGES:
        for number, block in enumerate(generate.blocks(path.read_text("utf-8"), "yaml")):
            yield pytest.param(block, id=f"{path.stem}-{number}")


@pytest.mark.parametrize("block", list(_yaml_blocks()))
def test_a_yaml_example_can_be_read_and_planned(block: str) -> None:
    """A whole file is read as what it is; a part of a spec is put into a plain one."""
    yaml = YAML(typ="safe", pure=True)
    data = yaml.load(block)
    if "device" in data:
        assert codec.loads(block, Environment).device
    else:
        if "version" not in data:
            base = (ROOT / "plans" / "specs" / "llama-3.1-8b.yaml").read_text("utf-8")
            block = codec.dumps_json({**yaml.load(base), **data})
        environment = codec.load_environment(ROOT / "plans" / "environments" / "h100.yaml")
        assert plan(codec.loads(block, Spec), environment, load_backends()).roles


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target.read_text("utf-8")), link


def test_every_hook_is_documented() -> None:
    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")]
    assert hooks
    for name in hooks:
        assert f"### `{name}`" in page("backends")
        assert getattr(hookspecs, name).__doc__


def test_every_method_of_a_backend_is_documented() -> None:
    methods = [name for name in vars(contract.Backend) if not name.startswith("_")]
    assert set(methods) == {"name", "support", "padding", "refresh", "workspace"}
    for name in methods:
        assert f"### `Backend.{name}`" in page("backends")
        assert getattr(contract.Backend, name).__doc__


def test_every_method_of_an_executor_is_documented() -> None:
    """Beside the planner's side, where torch is installed."""
    runtime = pytest.importorskip("capture_planner.runtime.executor")
    methods = [name for name in vars(runtime.Executor) if not name.startswith("_")]
    assert set(methods) == {"prepare", "attend", "layout", "release"}
    for name in ("Runnable.reserve", *(f"Executor.{name}" for name in methods)):
        assert f"### `{name}`" in page("backends")
    for name in ("reserve", *methods):
        assert f"| `{name}` |" in page("backends")


@pytest.mark.parametrize("fill", contract.Fill)
def test_every_fill_is_explained(fill: contract.Fill) -> None:
    assert f"| `{fill.value}` |" in page("backends")


@pytest.mark.parametrize("code", [*lint.RULES, DRIFT_CODE])
def test_every_code_is_documented(code: str) -> None:
    section = page("lint").partition(f"### {code}\n")[2].partition("\n### ")[0]
    assert "What to do: " in section


def test_every_bug_class_has_its_invariant() -> None:
    for kind in lint.BugClass:
        assert f"| {kind.name}, {kind.value} |" in page("lint")


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_is_shown(command: str) -> None:
    assert f"\n## {command}\n" in page("cli")
    assert f"$ capture-planner {command} " in page("cli") + page("cli").replace("\n", " ")


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_is_explained(policy: Policy) -> None:
    assert f"| `{policy.value}` |" in page("sizes")
    assert f"**`{policy.value}`**" in page("sizes")


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained(reason: Reason) -> None:
    assert f"| `{reason.value}` |" in page("concepts")


RUN = "capture-planner run plan.yaml"


@pytest.mark.parametrize(
    ("command", "shown", "now", "is_kept"),
    [
        (RUN, "  3 graphs  1.2 ms\n", "  3 graphs  881.0 us\n", True),
        (RUN, "  3 graphs in 2 KiB\n", "  4 graphs in 2 KiB\n", False),
        (RUN, "  padding 1.2%\n", "  padding 1.3%\n", False),
        (RUN, "...\nb\n", "a\na\nb\n", True),
        (RUN, "a\n...\n", "a\nb\n", True),
        (RUN, "a\n...\nc\n", "a\nb\nd\n", False),
        (RUN, "...\nc\n", "b\nc\nd\n", False),
        (RUN, "", "a\n", False),
        ("capture-planner show plan.yaml", "takes 1.2 ms\n", "takes 1.3 ms\n", False),
    ],
)
def test_a_page_keeps_an_output_while_it_is_true(command: str, shown: str, now: str, is_kept: bool) -> None:
    """What was measured may differ, and a line of dots stands for any lines; nothing else may differ."""
    assert generate.kept(command, shown, now) == (shown if is_kept else now)


def test_every_environment_of_tox_is_explained() -> None:
    listed = re.findall(r"^\[testenv:([\w-]+)\]", (ROOT / "tox.ini").read_text("utf-8"), re.M)
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for name in listed:
        assert f"| `{name}` |" in contributing
