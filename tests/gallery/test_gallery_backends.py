"""The mutants that are backends, and the healthy ones that they are made of."""

import re
from collections.abc import Callable

import attrs
import pytest

import capture_planner_conformance as conformance
from capture_planner.analysis.lint.core import BugClass
from capture_planner.modes import GraphMode
from capture_planner.plugins.backend import Backend
from capture_planner_conformance import Case, Check, Scene, Shape
from capture_planner_conformance.scene import Arrive, CaptureAttack, DraftScheme, Reload, RunBatch, Serve, Step
from gallery.backends import MUTANTS
from gallery.core import Mutant, detect
from gallery.padding import CopiesTable, RenamedReference
from gallery.paged import PagedBackend
from gallery.scheduled import ScheduledReference
from support.mutants import searched

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


@searched(MUTANTS)
def test_each_mutant_is_caught(mutant: Mutant) -> None:
    """The default profile finds it."""
    caught = detect(mutant, minimize=False)
    assert caught is not None
    assert caught.case


LONG = conformance.Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=2, longest=140)
DRAFTED = RunBatch(rows=((0, 3, 0), (1, 3, 0)))
ONE, TWO = RunBatch(rows=((0, 1, 0),)), RunBatch(rows=((0, 1, 0), (1, 1, 0)))


def case(*steps: Step, requests: int = 1, past: int = 3, shape: Shape = LONG, **scene: object) -> Case:
    """Requests that are past their prompt, and what is done with them."""
    most = max(2, requests)
    known = {"shape": shape, "num_reqs": most, "num_tokens": 24, "size_reqs": (most,)}
    return Case(
        scene=Scene(**known | scene),  # type: ignore[arg-type]
        steps=(*(Arrive(prompt=past, computed=past),) * requests, *steps),
    )


CASES = {
    "merge-sized-by-the-first-capture": case(
        RunBatch(rows=((0, 2, 0),)),
        num_reqs=16,
        num_tokens=48,
        size_tokens=(48,),
        size_reqs=(16,),
        drafts=2,
        schedule=((1, 15, 1), (16, 16, 2)),
        fused=False,
        capture=CaptureAttack(order=1),
    ),
    "zero-filled-offsets": case(RunBatch(rows=((0, 2, 0),)), mode=GraphMode.FULL),
    "queries-scaled-together": case(ONE, mode=GraphMode.FULL, num_reqs=1, size_reqs=(1,), size_tokens=(2,)),
    "stale-page-indices": case(ONE, mode=GraphMode.FULL, past=1),
    "constants-of-the-first-capture": case(ONE),
    "longest-of-batch": case(ONE, past=12),
    # One token and three, in a graph of up to three each.
    "varying-taken-for-uniform": case(RunBatch(rows=((0, 1, 0), (1, 3, 0))), requests=2, drafts=2, varying=True),
    # More requests than the graph of decodes has.
    "starts-of-the-largest-decode": case(TWO, requests=2, size_reqs=(1,)),
    "sized-by-the-limits": case(TWO, requests=2, beyond=2),
    "one-tile-of-requests": case(RunBatch(rows=tuple((number, 1, 0) for number in range(17))), requests=17),
    "second-split-lost": case(ONE, past=100),
    "one-tile-of-many-requests": case(
        RunBatch(rows=tuple((number, 1, 0) for number in range(33))), requests=33, num_tokens=33
    ),
    "late-split-lost": case(ONE, past=258, shape=attrs.evolve(LONG, longest=264)),
    "pages-in-eight-bits": case(RunBatch(rows=tuple((n, 1, 0) for n in range(5))), requests=5, past=130),
    "ring-wraps": case(*(ONE,) * 50),
    "plan-kept-for-a-shape": case(*(ONE,) * 6),
    # One request of 105 new tokens.
    "halved-after-a-while": case(Serve(requests=((3, 105, 0),)), requests=0),
    "scoring-of-first-layer": case(ONE, layers=2, sinks=True),
    "softcap-not-captured": case(ONE, softcap=True),
    "sinks-copied-at-capture": case(Reload(seed=9), ONE, sinks=True),
    "scale-of-the-head-dimension": case(ONE, sharp=True),
    # Two decodes of two drafts, of four rows each in the draft prefill.
    "requests-by-the-targets-query": case(DRAFTED, requests=2, drafts=2, drafter=DraftScheme.DRAFT_MODEL),
    "buffer-of-the-targets-rows": case(DRAFTED, requests=2, drafts=2, drafter=DraftScheme.PARALLEL),
}
"""What large, long and rarely drawn scenes show: the smallest case of it."""

OTHER_CHECKS = {
    "constants-of-the-first-capture": Check.BORN,
    "stale-page-indices": Check.BOUNDED,
    "starts-of-the-largest-decode": Check.EAGER,
}
"""The law that a case breaks first, where it is not that of real rows."""


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.name in CASES], ids=lambda m: m.name)
def test_it_is_caught_in_its_case(mutant: Mutant) -> None:
    """The case is caught with the bug, and in order without."""
    assert mutant.backend is not None
    failure = conformance.play(conformance.under_test(mutant.backend()), CASES[mutant.name]).failure
    assert failure is not None
    assert (failure.entry is None) is (failure.check is Check.EAGER), failure
    assert failure.check is OTHER_CHECKS.get(mutant.name, Check.ROWS)
    assert conformance.play(conformance.under_test(RenamedReference()), CASES[mutant.name]).failure is None


def test_names_and_classes() -> None:
    """Names are unique, each class has two mutants at least, and threads are written alike."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)+", mutant.name) for mutant in MUTANTS)
    for bug_class in (BugClass.D, BugClass.E, BugClass.F):
        assert sum(mutant.bug_class is bug_class for mutant in MUTANTS) >= 2
    assert all(re.fullmatch(r"[\w-]+#\d+", thread) for mutant in MUTANTS for thread in mutant.threads)
    assert all(mutant.kind == "backend" for mutant in MUTANTS)
