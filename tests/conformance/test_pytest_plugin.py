"""The pytest plugin: one empty subclass finds what the suite finds, and says so in words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

import capture_planner_conformance as conformance
from capture_planner.errors import BackendError
from capture_planner.modes import GraphSupport, Role
from capture_planner.records.backend import Axis, Fill, MetadataField, PaddingContract, Support, Workspace
from capture_planner_conformance import DEFAULT, THOROUGH, Failure, Shape, audits
from capture_planner_conformance import pytest_plugin as plugin
from capture_planner_conformance.failure import Check
from capture_planner_conformance.pytest_plugin import ConformanceTests, report, suite_options
from capture_planner_conformance.scene import Arrive, RunBatch, describe_case
from capture_planner_reference import Reference
from capture_planner_reference.executor import ReferenceExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)


class TestReference(ConformanceTests):
    """The healthy one passes; its number of examples is that of the environment, or few."""

    backend = "reference"

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Leave more to those who ask for more."""
        if "CONFORMANCE_EXAMPLES" not in os.environ:
            monkeypatch.setenv("CONFORMANCE_EXAMPLES", "2")


class FaultyReference(Reference):
    """The reference backend with one fault."""

    name = "broken"

    def __init__(self, **faults: Any) -> None:
        for name, fault in faults.items():
            setattr(self, name, fault)


CASE = conformance.dumps(
    conformance.Case(
        scene=conformance.Scene(shape=SHAPE),
        steps=(Arrive(prompt=3), Arrive(prompt=2, computed=2), RunBatch(rows=((1, 1, 0), (0, 3, 0)))),
    )
)


def asked(**options: str) -> Any:
    """Return a request of pytest's with these options, as far as the tests look at it."""
    given = {f"conformance_{name}": value for name, value in options.items()}
    manager = SimpleNamespace(has_plugin=lambda name: False)
    config = SimpleNamespace(getoption=lambda name, default: given.get(name, default), pluginmanager=manager)
    return SimpleNamespace(config=config, node=SimpleNamespace(nodeid="test_mine.py::TestMine::test_it"))


def failed(test: Callable[[], None]) -> str:
    """Return the text of a test that fails."""
    with pytest.raises(pytest.fail.Exception) as found:
        test()
    assert found.value.pytrace is False
    return str(found.value)


class StaleMask(ReferenceExecutor):
    """Attends, and counts what stands behind a sequence too: a mask that is left out."""

    def _visible(self, keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return super()._visible(keys, positions + 1, lengths + 1)


def test_a_finding_says_the_law_the_place_and_a_command_that_shows_it_again() -> None:
    """The command's case shows the same alone; with the fault mended it shows nothing."""
    broken = FaultyReference(reserve=StaleMask)
    text = failed(
        lambda: ConformanceTests().test_replays_compute_attention(
            conformance.under_test(broken), (SHAPE,), asked(examples="20")
        )
    )
    check = next(check for check in Check if text.startswith(f"{check.value}: "))
    assert f"violated: {check.law}" in text
    assert "  role: target" in text
    last = text.splitlines()[-1]
    assert "pytest -p capture_planner_conformance.pytest_plugin test_mine.py::TestMine::test_it" in last
    case = last.partition(" --conformance-case ")[2].strip("'")
    again = asked(case=case)
    same = failed(
        lambda: ConformanceTests().test_replays_compute_attention(conformance.under_test(broken), (SHAPE,), again)
    )
    assert same == text
    ConformanceTests().test_replays_compute_attention(conformance.under_test("reference"), (SHAPE,), again)


def test_an_impure_declaration_is_found_alone() -> None:
    """It has a test of its own, and needs no run."""
    answers = iter(range(1 << 20))
    broken = FaultyReference(workspace=lambda *asked: Workspace(device=next(answers)))
    text = failed(
        lambda: ConformanceTests().test_declarations_are_well_formed_and_pure(conformance.under_test(broken), (SHAPE,))
    )
    assert "workspace is not pure" in text


def test_a_declaration_of_which_no_plan_is_made_is_found_alone() -> None:
    """With the planner's own words; the other tests of the class need a plan."""
    broken = FaultyReference(padding=lambda *asked: ("seq_lens",))
    text = failed(
        lambda: ConformanceTests().test_declarations_are_well_formed_and_pure(conformance.under_test(broken), (SHAPE,))
    )
    assert "returned ('seq_lens',), not a PaddingContract" in text


@pytest.mark.parametrize("read", [True, False])
def test_a_declared_field_that_nothing_reads_is_named(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that no attack makes matter; what an attack does is the audit's own business."""
    record = conformance.AuditResult(
        role=Role.TARGET,
        group="",
        field="splits",
        axis="request",
        declared_by="broken",
        attack=conformance.Attack.STALE_TAIL,
        matters=read,
    )
    others = [attrs.evolve(record, field="seq_lens", declared_by="runner", matters=False)]

    def audit_of(tested: object, shapes: object, *, seed: int, fields: frozenset[str]) -> tuple[Any, ...]:
        assert fields == {"splits"}
        return (record, *others)

    monkeypatch.setattr(audits, "audit", audit_of)
    splits = MetadataField(name="splits", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0)
    broken = FaultyReference(padding=lambda *asked: PaddingContract(fields=(splits,)))

    def audit() -> None:
        ConformanceTests().test_every_declared_field_matters(conformance.under_test(broken), (SHAPE,), asked())

    if read:
        audit()
    else:
        text = failed(audit)
        assert "target splits" in text
        assert "seq_lens" not in text


NOWHERE = Support(level=GraphSupport.NEVER, reason="Broken's kernels need a GPU.")


def shapes_of(broken: FaultyReference) -> tuple[Shape, ...]:
    """Return what the fixture gives for a backend."""
    fixture = ConformanceTests.shapes
    return fixture.__wrapped__(ConformanceTests(), conformance.under_test(broken))  # type: ignore[attr-defined, no-any-return]


def test_a_backend_that_says_it_runs_nowhere_here_is_skipped_with_its_reason() -> None:
    """In its own words."""
    with pytest.raises(pytest.skip.Exception, match="Broken's kernels need a GPU"):
        shapes_of(FaultyReference(support=lambda *asked: NOWHERE))


def test_a_backend_that_refuses_what_it_is_reserved_for_is_skipped_with_its_reason() -> None:
    """Such as one whose library is missing."""

    def reserve(reservation: object) -> None:
        raise BackendError("broken: its library is not installed")

    with pytest.raises(pytest.skip.Exception, match="its library is not installed"):
        shapes_of(FaultyReference(reserve=reserve))


def test_a_backend_that_breaks_is_not_skipped() -> None:
    """A crash is no reason: with a skip, a broken backend would be green."""

    def reserve(reservation: object) -> None:
        raise TypeError("a slip")

    broken = FaultyReference(reserve=reserve)
    text = failed(
        lambda: ConformanceTests().test_replays_compute_attention(
            conformance.under_test(broken), shapes_of(broken), asked(examples="2")
        )
    )
    assert "TypeError: a slip" in text


@given(
    profile=st.sampled_from([None, "default", "thorough"]),
    seed=st.none() | st.integers(0, 1 << 40),
    examples=st.none() | st.integers(1, 1 << 20),
    by_option=st.booleans(),
)
def test_options_and_variables_say_the_same(
    profile: str | None, seed: int | None, examples: int | None, by_option: bool
) -> None:
    """What is left out is the default profile with seed 0; an option is stronger than a variable."""
    told = {"profile": profile, "seed": seed, "examples": examples}
    named = {name: str(value) for name, value in told.items() if value is not None}
    with pytest.MonkeyPatch.context() as patch:
        for name in told:
            patch.delenv(f"CONFORMANCE_{name.upper()}", raising=False)
        for name, text in named.items():
            patch.setenv(f"CONFORMANCE_{name.upper()}", "nonsense" if by_option else text)
        found = suite_options(asked(**(named if by_option else {})).config)
    expected = THOROUGH if profile == "thorough" else DEFAULT
    if examples is not None:
        expected = attrs.evolve(expected, examples=examples)
    assert (found.profile, found.seed) == (expected, seed or 0)


@pytest.mark.parametrize(
    ("name", "text"), [("profile", "quick"), ("seed", "-1"), ("seed", "x"), ("examples", "0"), ("seed", "²")]
)
def test_what_is_no_choice_is_refused(name: str, text: str) -> None:
    """With what there is."""
    with pytest.raises(pytest.UsageError, match=r"expected one of default, thorough|expected a whole number"):
        suite_options(asked(**{name: text}).config)


WRONG = [
    ("profile", "nope"),
    ("seed", "-1"),
    ("examples", "0"),
    ("examples", "x"),
    ("case", "x"),
    ("case", '{"scene":{},"steps":[]}'),
]


@pytest.mark.parametrize(("name", "text"), WRONG)
@pytest.mark.parametrize("by_option", [True, False])
def test_what_is_no_choice_is_refused_before_anything_is_collected(
    name: str, text: str, by_option: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the option's name or the variable's, in a line: no backend is at fault."""
    for option in ("profile", "seed", "examples", "case"):
        monkeypatch.delenv(f"CONFORMANCE_{option.upper()}", raising=False)
    if not by_option:
        monkeypatch.setenv(f"CONFORMANCE_{name.upper()}", text)
    with pytest.raises(pytest.UsageError) as found:
        plugin.pytest_configure(asked(**({name: text} if by_option else {})).config)
    said = str(found.value)
    assert said.startswith(f"--conformance-{name}: " if by_option else f"CONFORMANCE_{name.upper()}: ")
    assert "\n" not in said


def test_profiles_are_those_of_the_suite() -> None:
    """They are named where torch need not be there."""
    assert set(plugin.PROFILES) == {DEFAULT.name, THOROUGH.name}


@given(case=st.none() | st.just(CASE))
def test_what_is_right_is_not_refused(case: str | None) -> None:
    """A case as it is printed, or none."""
    plugin.pytest_configure(asked(**({} if case is None else {"case": case})).config)


@given(
    finding=st.builds(
        Failure,
        check=st.sampled_from(Check),
        message=st.text(min_size=1),
        batch=st.text(),
        field=st.text(),
        axis=st.text(),
        causes=st.tuples(st.text(min_size=1)),
        case=st.sampled_from(["", CASE]),
        command=st.text(),
    )
)
def test_nothing_that_a_finding_has_is_lost(finding: Failure) -> None:
    """Every part is in the text."""
    text = report(finding)
    for part in (finding.message, finding.batch, finding.field, *finding.causes, finding.command):
        assert part in text
    assert not finding.field or finding.axis in text
    if finding.case:
        for number, step in enumerate(describe_case(conformance.loads(finding.case)), 1):
            assert f"\n  {number}. {step}\n" in f"{text}\n"


MINE = """\
import os
from capture_planner_conformance.pytest_plugin import ConformanceTests

class TestMine(ConformanceTests):
    backend = "reference"

    def test_threads_are_put_back(self):
        import torch
        assert torch.get_num_threads() == int(os.environ["THREADS"])
"""


def _pytest(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, with warnings as errors, and without the coverage of this one."""
    core = Path(plugin.__file__).parent.parent
    paths = os.pathsep.join([str(core), *(path for path in sys.path if path)])
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "SLIPCOVER_ENABLED": "", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


PLUGGED = ("-p", "capture_planner_conformance.pytest_plugin")
NO_BACKENDS = """\
from capture_planner_conformance.pytest_plugin import ConformanceTests

class TestNone(ConformanceTests):
    pass

class TestNumber(ConformanceTests):
    backend = 3

class TestUnknown(ConformanceTests):
    backend = "nosuch"
"""


@pytest.mark.thorough
def test_one_empty_subclass_runs_everything_and_one_without_a_backend_fails_with_a_sentence(tmp_path: Path) -> None:
    """With all options accepted; the text names the author's class and no module of ours, and no warning comes."""
    (tmp_path / "test_mine.py").write_text(MINE, "utf-8")
    (tmp_path / "test_none.py").write_text(NO_BACKENDS, "utf-8")
    options = ["--conformance-profile=thorough", "--conformance-seed=1", "--conformance-examples=1"]
    done = _pytest(tmp_path, *PLUGGED, *options, THREADS="2", OMP_NUM_THREADS="2")
    assert done.returncode == 1
    assert re.search(r"\b4 passed", done.stdout), done.stdout
    assert "warning" not in done.stdout
    assert "TestNone needs `backend`: a name or a backend object" in done.stdout
    assert "TestNumber: `backend` is 3, expected a name or a backend object" in done.stdout
    assert "TestUnknown: no backend named 'nosuch' is installed" in done.stdout
    assert "plugin.py" not in done.stdout
    assert "subject.py" not in done.stdout
    assert "During handling" not in done.stdout


def test_a_wrong_option_is_a_usage_error_without_the_plugin(tmp_path: Path) -> None:
    """Exit code 4, a line, and no test, if pytest only imports the module; with ``-p`` pytest configures it."""
    (tmp_path / "test_mine.py").write_text(MINE, "utf-8")
    done = _pytest(tmp_path, CONFORMANCE_EXAMPLES="abc", THREADS="1", OMP_NUM_THREADS="1")
    output = done.stdout + done.stderr
    assert done.returncode == 4, output
    assert "expected a whole number from 1, got " in output
    assert "FAILED" not in output
    assert "Traceback" not in output


def test_the_suite_needs_no_pytest() -> None:
    """Only this plugin does."""
    script = "import sys; sys.modules['pytest'] = None\nfrom capture_planner_conformance import conform\n"
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, check=True)
