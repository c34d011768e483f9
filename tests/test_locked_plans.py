"""The committed plans are what their specs give, to the byte, and are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from capture_planner import codec
from capture_planner.analysis.coverage import coverage
from capture_planner.analysis.lint import Severity, lint
from capture_planner.codec import shipped as catalog
from capture_planner.planning.planner import plan
from capture_planner.plugins import registry

PLANS = Path(__file__).parent.parent / "plans"
LOCKED = sorted((PLANS / "locked").glob("*.yaml"))


def split(path: Path) -> tuple[str, str]:
    """Return the names of the spec and of the environment of a locked plan."""
    name, _, environment = path.stem.rpartition(".")
    return name, environment


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_a_locked_plan_is_what_its_spec_gives_to_the_byte(path: Path) -> None:
    name, environment = split(path)
    spec = codec.load_spec(PLANS / "specs" / f"{name}.yaml")
    made = plan(spec, catalog.find_environment(environment), registry.load_backends())
    assert codec.dumps(made).encode() == path.read_bytes(), "run: tox -e locked"


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_a_locked_plan_has_no_error_and_no_warning(path: Path) -> None:
    found = lint(codec.load_plan(path))
    assert [str(finding) for finding in found if finding.rule.severity is not Severity.NOTE] == []


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_every_entry_of_a_locked_plan_is_reached_and_every_batch_covered(path: Path) -> None:
    locked = codec.load_plan(path)
    walked = coverage(locked)
    assert not walked.uncovered
    for role in locked.roles:
        assert set(role.entries) == set(walked.reached(role.role))


def test_every_spec_is_locked() -> None:
    assert {split(path)[0] for path in LOCKED} == {path.stem for path in (PLANS / "specs").glob("*.yaml")}


def test_every_locked_plan_is_of_a_machine_that_ships() -> None:
    """Machines that no locked plan is for are planned for by the oracles and by strategies."""
    assert {split(path)[1] for path in LOCKED} <= set(catalog.shipped_environments())


def test_the_ladder_steps_down_on_a_gpu_that_is_too_old() -> None:
    old = codec.load_plan(PLANS / "locked" / "llama-3.2-3b-eagle-t4.t4.yaml")
    steps = [(d.rule, d.before, d.after) for d in old.role("target").decisions if d.backend is not None]
    assert steps == [("decode-full-unsupported", "FULL_AND_PIECEWISE", "PIECEWISE")]
