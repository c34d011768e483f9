"""Shipped environments: found by name, found by file, and what is said where neither is there."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from capture_planner import codec
from capture_planner.codec import shipped as catalog
from capture_planner.errors import CapturePlannerError, InvalidDocument

SHIPPED = ("a100", "b200", "cpu", "h100", "h200", "l40s", "t4")


def test_the_environments_that_ship() -> None:
    assert tuple(catalog.shipped_environments()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_environment_has_the_name_of_its_file(name: str) -> None:
    assert catalog.find_environment(name).name == name


def test_the_package_has_what_the_repository_has() -> None:
    repository = Path(__file__).parent.parent.parent / "plans" / "environments"
    for name, path in catalog.shipped_environments().items():
        assert path.read_bytes() == (repository / f"{name}.yaml").read_bytes()


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="only tox installs the wheel")
def test_what_is_tested_is_the_installed_wheel() -> None:
    assert Path(catalog.__file__).is_relative_to(sysconfig.get_path("purelib"))


def test_an_environment_may_be_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    shutil.copy(catalog.shipped_environments()["t4"], mine)
    assert catalog.find_environment(str(mine)) == catalog.find_environment("t4")


def test_a_file_without_suffix_is_found_too(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text(codec.dumps(catalog.find_environment("cpu")), "utf-8")
    assert catalog.find_environment(str(mine)).name == "cpu"


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(CapturePlannerError, match=r"no environment is named 'h10'.*did you mean h100\?"):
        catalog.find_environment("h10")


def test_a_far_name_lists_what_ships() -> None:
    with pytest.raises(CapturePlannerError, match="a100, b200, cpu, h100, h200, l40s, t4"):
        catalog.find_environment("zebra")


def test_a_missing_file_is_said_to_be_missing() -> None:
    with pytest.raises(InvalidDocument, match=r"nowhere\.yaml: cannot be read"):
        catalog.find_environment("nowhere.yaml")


@pytest.mark.parametrize(
    ("output", "environment"),
    [
        (None, None),
        ("plans/locked/qwen3-8b.h100.yaml", "h100"),
        ("llama-3.1-8b.l40s.json", "l40s"),
        ("llama-3.1-8b.yaml", None),
        ("model.zebra.yaml", None),
        ("h100.yaml", None),
        ("model", None),
    ],
)
def test_an_output_file_may_state_its_environment(output: str | None, environment: str | None) -> None:
    assert catalog.environment_of_output(output) == environment
