"""The distributions fit together: plugins pin the core, and each tool has one version everywhere."""

import re
import tomllib
from pathlib import Path

import pytest

import capture_planner

ROOT = Path(__file__).parent.parent
PLUGINS = sorted([*ROOT.glob("backends/*/pyproject.toml"), *ROOT.glob("engines/*/pyproject.toml")])


def project(path: Path) -> dict:
    return tomllib.loads(path.read_text("utf-8"))["project"]


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.parent.name)
def test_plugin_pins_the_minor_version_of_the_core(path: Path) -> None:
    minor = ".".join(capture_planner.__version__.split(".")[:2])
    assert f"capture-planner=={minor}.*" in project(path)["dependencies"]


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.parent.name)
def test_plugin_has_an_entry_point(path: Path) -> None:
    assert project(path)["entry-points"]["capture_planner"]


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
