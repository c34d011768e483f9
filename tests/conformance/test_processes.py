"""Several processes find, count and report what one does."""

import signal

import attrs
import pytest
import torch
from hypothesis import settings

from capture_planner.errors import RunError
from capture_planner_conformance import SearchProfile, SuiteOptions, conform, under_test
from capture_planner_conformance.audits import audit
from capture_planner_conformance.processes import workers
from capture_planner_conformance.shapes import CANDIDATES
from gallery import named

# On a GPU, float64 is refused.
SHAPES = CANDIDATES[1 if torch.cuda.is_available() else 0][:1]
OPTIONS = SuiteOptions(
    profile=SearchProfile(name="own", examples=11, steps=3), shapes=SHAPES, drafts=(0,), shrink=False, audits=False
)

BACKENDS = ("longest-of-batch", "reference") if settings.default.max_examples >= 100 else ("longest-of-batch",)


def outcomes(backend):
    """Run the suite in one process and in two; return each outcome with its log as it was seen scene by scene."""
    for jobs in (1, 2):
        seen = []
        options = attrs.evolve(OPTIONS, jobs=jobs)
        found = conform(under_test(backend), options, lambda log, seen=seen: seen.append(log.examples))
        yield found.failures, attrs.evolve(found.log, on_change=print, violation=None), seen


def test_outcome_is_that_of_one_process() -> None:
    """With the same seed, whatever process is done first: what was run, and the failure of the first run with one."""
    for backend in BACKENDS:
        one, several = outcomes(backend if backend == "reference" else named(backend).backend())
        assert one == several
        assert bool(one[0]) is (backend != "reference")


@pytest.mark.thorough
def test_attacks_are_those_of_one_process() -> None:
    """Each result, in the order of the fields."""
    subject, fields = under_test("reference"), ("seq_lens",)
    with workers(2) as each:
        found = audit(subject, SHAPES, fields=fields, each=each)
    assert found == audit(subject, SHAPES, fields=fields)
    assert any(result.matters for result in found)


def test_a_killed_process_ends_the_run_with_a_way_on():
    """As the kernel does where memory ends."""
    with pytest.raises(RunError, match=r"a process of the suite was killed.*fewer jobs"), workers(2) as each:
        list(each(signal.raise_signal, [signal.SIGKILL]))
