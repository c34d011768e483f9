"""The distributions fit together: plugins pin the core, and each tool has one version everywhere."""

import re
import tomllib
from pathlib import Path

import pytest

import capture_planner

ROOT = Path(__file__).parent.parent
COMMANDS = {ROOT / name / "pyproject.toml" for name in ("runner", "conformance", "tuner")}
"""Distributions that bring commands."""
PLUGINS = sorted([*ROOT.glob("backends/*/pyproject.toml"), *ROOT.glob("engines/*/pyproject.toml"), *COMMANDS])


def project(path: Path) -> dict:
    return tomllib.loads(path.read_text("utf-8"))["project"]


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.parent.name)
def test_plugin_pins_the_minor_version_of_the_core(path: Path) -> None:
    minor = ".".join(capture_planner.__version__.split(".")[:2])
    of = project(path)
    needed = [*of["dependencies"], *(each for extra in of.get("optional-dependencies", {}).values() for each in extra)]
    pins = dict(re.sub(r"\[.*\]", "", each).split("==") for each in needed if each.startswith("capture-planner"))
    assert "capture-planner" in pins
    assert set(pins.values()) == {f"{minor}.*"}


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.parent.name)
def test_plugin_has_an_entry_point(path: Path) -> None:
    group = "capture_planner.commands" if path in COMMANDS else "capture_planner"
    assert project(path)["entry-points"][group]


@pytest.mark.parametrize("path", sorted(set(PLUGINS) - COMMANDS), ids=lambda path: path.parent.name)
def test_plugin_does_not_depend_on_what_brings_commands(path: Path) -> None:
    """To plan or to serve nothing of them is needed; a template's tests need the conformance suite."""
    of = project(path)
    needed = [
        *of["dependencies"],
        *(each for name, extra in of.get("optional-dependencies", {}).items() if name != "test" for each in extra),
    ]
    assert [each for each in needed if re.search("runner|conformance|tuner", each)] == []


def test_core_does_not_depend_on_torch() -> None:
    """Nor on what executes a plan, in any extra but that for contributors."""
    of = project(ROOT / "pyproject.toml")
    needed = [
        *of["dependencies"],
        *(each for name, extra in of["optional-dependencies"].items() if name != "dev" for each in extra),
    ]
    assert [each for each in needed if re.match("torch|triton|transformers|safetensors|numpy", each)] == []


@pytest.mark.parametrize("tool", ["mypy", "ruff"])
def test_checker_has_one_version(tool: str) -> None:
    """In the extra ``dev``, in tox and in pre-commit, so that all three report the same."""
    (dev,) = (
        line for line in project(ROOT / "pyproject.toml")["optional-dependencies"]["dev"] if line.startswith(tool)
    )
    version = dev.partition("==")[2]
    assert re.findall(rf"\b{tool}==([\d.]+)", (ROOT / "tox.ini").read_text("utf-8")) == [version]
    pinned = re.findall(rf"{tool}-pre-commit\n +rev: v([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert pinned in ([version], [])
