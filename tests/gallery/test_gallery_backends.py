"""The mutants that are backends, and the healthy ones that they are made of."""

import re
from collections.abc import Callable

import pytest

from capture_planner import conformance
from capture_planner.analysis.lint.core import BugClass
from capture_planner.records.backend import Backend
from gallery.backends import MUTANTS
from gallery.core import LATE, Mutant, detect
from gallery.padding import CopiesTable, RenamedReference
from gallery.paged import PagedBackend
from gallery.scheduled import ScheduledReference

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = conformance.SearchProfile(name="few", examples=4, steps=12)


@pytest.mark.parametrize(
    "brought",
    [
        PagedBackend,
        *(
            pytest.param(other, marks=pytest.mark.thorough)
            for other in (ScheduledReference, RenamedReference, CopiesTable)
        ),
    ],
)
def test_the_healthy_backends_pass(brought: Callable[[], Backend]) -> None:
    """What a mutant does wrong is its own: without its one change nothing is found."""
    outcome = conformance.conform(
        conformance.under_test(brought()),
        conformance.SuiteOptions(profile=FEW, shrink=False, blame=False, audits=False),
    )
    assert outcome.passed, outcome.failures
    assert outcome.log.forwards["target FULL"], "nothing was replayed"


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=[pytest.mark.thorough] if mutant.name in LATE else [])
        for mutant in MUTANTS
    ],
)
def test_each_mutant_is_caught(mutant: Mutant) -> None:
    """The default profile finds it."""
    caught = detect(mutant, minimize=False)
    assert caught is not None
    assert caught.case


def test_names_and_classes() -> None:
    """Names are unique, each class has two mutants at least, and threads are written alike."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)+", mutant.name) for mutant in MUTANTS)
    for bug_class in (BugClass.D, BugClass.E, BugClass.F):
        assert sum(mutant.bug_class is bug_class for mutant in MUTANTS) >= 2
    assert all(re.fullmatch(r"[\w-]+#\d+", thread) for mutant in MUTANTS for thread in mutant.threads)
    assert all(mutant.kind == "backend" for mutant in MUTANTS)
