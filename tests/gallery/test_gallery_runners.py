"""Mutants of the runner: each is caught, by a law that is not about it alone, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import inspect

import attrs
import pytest

pytest.importorskip("torch")

from capture_planner.modes import GraphMode
from capture_planner_conformance import Case, Check, SearchProfile, Shape, SuiteOptions, conform, play, under_test
from capture_planner_conformance.scene import Arrive, CaptureAttack, DraftScheme, RunBatch, Serve, Step
from gallery import patching
from gallery.core import Mutant, detect
from gallery.runner_state import Planning
from gallery.runners import MUTANTS
from support.mutants import searched
from support.runner_conformance import RunnerCheck, RunnerScene, runner_under_test

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)
PAST = Arrive(prompt=4, computed=4)


def case(*steps: Step, requests: int = 1, **scene: object) -> Case:
    """Requests that are past their prompt, and what is done with them."""
    made = RunnerScene(**{"shape": SHAPE} | scene)  # type: ignore[arg-type]
    return Case(scene=made, steps=(*(PAST,) * requests, *steps))


ALONE = RunBatch(rows=((0, 4, 0),))
ONE, TWO = RunBatch(rows=((0, 1, 0),)), RunBatch(rows=((0, 2, 0),))
FULL: dict[str, object] = {"mode": GraphMode.FULL, "num_reqs": 2, "num_tokens": 2, "size_tokens": (), "size_reqs": ()}
CASES = {
    # One request of two tokens in a graph for two requests.
    "idx-mapping-padded-with-zero": case(TWO, **FULL),
    "requests-not-padded": case(TWO, **FULL),
    "last-token-indices-stale": case(TWO, **FULL, drafts=1, fused=False),
    "first-draft-unverified": case(Serve(requests=((1, 2, 0),)), requests=0, **FULL, drafts=1, fused=False),
    # The last position that the model has.
    "drafts-past-the-model": case(Arrive(prompt=1, computed=23), ONE, requests=0),
    "slots-side-by-side": case(ONE, distant=True),
    "outputs-made-anew": case(requests=0),
    # Draft decodes of two requests, for which the schedule lowers K from 3 to 2.
    "targets-formula-for-the-drafter": case(
        RunBatch(rows=((0, 3, 0), (1, 3, 0))), requests=2, num_reqs=2, drafts=3, schedule=((1, 1, 3), (2, 2, 2))
    ),
    # 4 tokens fit 2 requests of 4, and 3 requests of 2 are nearer.
    "tiers-shadow-each-other": case(ALONE, num_reqs=3, size_reqs=(2, 3), drafts=3, schedule=((1, 2, 3), (3, 3, 1))),
    # A PIECEWISE graph of 5 tokens is nearer than the FULL one of 12.
    "full-shadowed-by-piecewise": case(ALONE, num_reqs=3, num_tokens=16, size_reqs=(3,), size_tokens=(5, 16), drafts=3),
    # A prompt of one token, without drafts.
    "prompt-taken-for-a-decode": case(Serve(requests=((1, 3, 0),)), requests=0),
    # The second one's prompt begins when the first one decodes.
    "prompts-behind-a-decode": case(Serve(requests=((4, 6, 0), (5, 3, 1))), requests=0),
    # One decode is cut short by the model's end.
    "requests-from-rounded-tokens": case(Serve(requests=((16, 8, 0), (5, 12, 0))), requests=0, drafts=2),
    # A decode of one token and a prompt of three.
    "query-length-of-the-mean": case(Serve(requests=((3, 6, 0), (3, 3, 1))), requests=0),
    # The first one has no draft left at the model's end, and the second has two.
    "longest-of-the-first-request": case(Serve(requests=((16, 8, 0), (5, 12, 0))), requests=0, drafts=2, varying=True),
    "adapters-not-in-the-key": case(RunBatch(rows=((0, 1, 0),), loras=1), loras=1),
    # Two draft decodes of one request, one after the other, in graphs for three.
    "padded-rows-moved-on": case(ALONE, drafts=3, fused=False),
    "draft-decode-piecewise": case(ALONE, ALONE, ALONE, drafts=3, fused=False),
    "chain-one-step-too-long": case(ALONE, drafts=3),
    "drafts-over-the-targets-output": case(ALONE, drafts=3),
    "drafts-move-the-targets-fields": case(ALONE, drafts=3),
    "exact-sizes-looked-up-by-number": case(ALONE, num_reqs=1, size_reqs=(1,), drafts=3),
    # One attention call of two graphs or more breaks.
    "capture-errors-swallowed": case(requests=0, capture=CaptureAttack(breaks=1)),
    "graphs-of-a-broken-session": case(requests=0, capture=CaptureAttack(breaks=4)),
    "splits-after-an-error": case(
        ALONE, mode=GraphMode.PIECEWISE, drafts=3, capture=CaptureAttack(breaks=2, stays_eager=True)
    ),
    "replayed-inside-the-session": case(requests=0),
    # The longest request of two takes all pages, and decodes in a graph for two.
    "dummy-request-on-demand": case(
        Serve(requests=((20, 4, 0),)), requests=0, num_reqs=2, full_cache=True, size_reqs=(2,)
    ),
    # One request is served where three have room, and its drafts are verified on the device.
    "padded-rows-verified": case(Serve(requests=((5, 4, 0),)), requests=0, drafts=1, ahead=True),
    # A request at its first token, in a row of the pool that held another's state.
    "first-state-lost": case(Arrive(prompt=4), ONE, requests=0, recurrent=True),
    "state-not-reset": case(Arrive(prompt=4), ONE, requests=0, recurrent=True),
    # The draft is rejected.
    "state-not-rolled-back": case(RunBatch(rows=((0, 2, 0),)), drafts=1, recurrent=True),
    # Three requests, and then one in the same graph.
    "state-indices-stale": case(RunBatch(rows=((0, 1, 0), (1, 1, 0), (2, 1, 0))), ONE, ONE, requests=3, recurrent=True),
    "padded-state-clamped": case(ONE, RunBatch(rows=((1, 1, 0),)), requests=3, recurrent=True),
    "states-without-padding": case(ONE, requests=3, recurrent=True),
    # The first request ends, and the third takes its row in the pool, behind the second in the batch.
    "state-rows-of-the-last-batch": case(
        Serve(requests=((3, 2, 0), (3, 6, 0), (3, 4, 0))), requests=0, num_reqs=2, size_reqs=(2,), recurrent=True
    ),
    # One decode of two drafts, by modules and by a drafter of two layers.
    "modules-from-the-targets-states": case(RunBatch(rows=((0, 3, 0),)), drafts=2, drafter=DraftScheme.MODULES),
    "fields-moved-on-by-each-layer": case(RunBatch(rows=((0, 3, 0),)), drafts=2, drafter=DraftScheme.LAYERS),
    # A prompt of more tokens than a step has.
    "full-step-not-admitted": case(Serve(requests=((20, 2, 0),)), requests=0),
    "padding-in-the-longest-query": case(TWO, mode=GraphMode.PIECEWISE),
    # The windows of one group have the limit.
    "cap-of-the-first-group": case(requests=0, shape=attrs.evolve(SHAPE, windowed=True), capped=1),
    # Random drafts, which are rejected.
    "draft-decodes-behind-rejected": case(Serve(requests=((5, 6, 0),)), requests=0, drafts=2),
    "draft-decodes-left-as-filled": case(
        Serve(requests=((5, 6, 0),)), requests=0, mode=GraphMode.FULL, drafts=2, ahead=True
    ),
    # One request has two drafts, where several would have three.
    "steps-of-the-longest-tier": case(
        Serve(requests=((5, 6, 0),)), requests=0, num_reqs=2, drafts=3, schedule=((1, 1, 2), (2, 2, 3)), fused=False
    ),
    "accepted-counts-the-last-token": case(Serve(requests=((5, 6, 0),)), requests=0, drafts=1),
    # One request in a graph for three.
    "padding-in-the-scale": case(ONE, coupled=True),
    "padding-in-the-load": case(ONE, coupled=True),
}
"""What random scenes come to late, or what a few steps show: the smallest case of it."""

CHECKS = {
    "full-step-not-admitted": RunnerCheck.CLASSIFIED,
    "padding-in-the-longest-query": RunnerCheck.DESCRIBED,
    "accepted-counts-the-last-token": RunnerCheck.COUNTED,
    "draft-decodes-behind-rejected": RunnerCheck.VERIFIED,
    "draft-decodes-left-as-filled": RunnerCheck.VERIFIED,
    "steps-of-the-longest-tier": RunnerCheck.VERIFIED,
    "modules-from-the-targets-states": Check.EAGER,
    "fields-moved-on-by-each-layer": Check.UNTOUCHED,
    "outputs-made-anew": Check.BORN,
    "draft-decode-piecewise": Check.BOUNDED,
    "drafts-past-the-model": Check.BOUNDED,
    "states-without-padding": Check.BOUNDED,
    "prompt-taken-for-a-decode": RunnerCheck.CLASSIFIED,
    "prompts-behind-a-decode": RunnerCheck.CLASSIFIED,
    "query-length-of-the-mean": RunnerCheck.CLASSIFIED,
    "longest-of-the-first-request": RunnerCheck.CLASSIFIED,
    "requests-from-rounded-tokens": RunnerCheck.CLASSIFIED,
    "adapters-not-in-the-key": RunnerCheck.DISPATCHED,
    "dummy-request-on-demand": RunnerCheck.DISPATCHED,
    "full-shadowed-by-piecewise": RunnerCheck.DISPATCHED,
    "targets-formula-for-the-drafter": RunnerCheck.DISPATCHED,
    "tiers-shadow-each-other": RunnerCheck.DISPATCHED,
    "slots-side-by-side": Check.EAGER,
    "state-not-reset": Check.EAGER,
    "idx-mapping-padded-with-zero": Check.FILLED,
    "last-token-indices-stale": Check.FILLED,
    "padded-rows-moved-on": Check.FILLED,
    "padded-rows-verified": Check.FILLED,
    "requests-not-padded": Check.FILLED,
    "state-indices-stale": Check.FILLED,
    "state-rows-of-the-last-batch": RunnerCheck.PLACED,
    "splits-after-an-error": Check.RAN,
    "capture-errors-swallowed": Check.RECOVERED,
    "graphs-of-a-broken-session": Check.RECOVERED,
    "exact-sizes-looked-up-by-number": RunnerCheck.REPLAYED,
    "replayed-inside-the-session": RunnerCheck.REPLAYED,
    "padding-in-the-load": Check.ROWS,
    "padding-in-the-scale": Check.ROWS,
    "first-state-lost": Check.STORED,
    "state-not-rolled-back": Check.STORED,
    "first-draft-unverified": Check.TOKENS,
    "cap-of-the-first-group": Check.PLANNED,
    "drafts-move-the-targets-fields": Check.UNSPOILED,
    "drafts-over-the-targets-output": Check.UNSPOILED,
    "chain-one-step-too-long": Check.UNTOUCHED,
    "padded-state-clamped": Check.UNTOUCHED,
}
"""The law that each case breaks first."""


def name_of(mutant: Mutant) -> str:
    """Name a test by its mutant."""
    return mutant.name


@searched(mutant for mutant in MUTANTS if mutant.name not in CASES)
def test_it_is_caught(mutant: Mutant) -> None:
    """The suite, which knows nothing of mutants, finds it with its default profile."""
    assert detect(mutant, minimize=False) is not None


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name in CASES], ids=name_of)
def test_it_is_caught_in_its_case(mutant: Mutant) -> None:
    """The case is caught with the bug, and it is in order without."""
    assert mutant.patch is not None
    there = runner_under_test()
    with mutant.patch():
        failure = play(there, CASES[mutant.name]).failure
    assert failure is not None
    assert failure.check is CHECKS[mutant.name]
    assert play(there, CASES[mutant.name]).failure is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_it_leaves_nothing_behind(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is there something is replaced, and afterwards every original is back, after an error too."""
    seen: list[tuple[object, str, object]] = []
    replaced = patching.replaced

    def noted(owner: object, name: str, make: object) -> object:
        seen.append((owner, name, inspect.getattr_static(owner, name)))
        return replaced(owner, name, make)  # type: ignore[arg-type]

    monkeypatch.setattr(patching, "replaced", noted)
    assert mutant.patch is not None
    with contextlib.suppress(KeyboardInterrupt), mutant.patch():
        assert all(inspect.getattr_static(owner, name) is not was for owner, name, was in seen)
        raise KeyboardInterrupt
    assert seen
    assert all(inspect.getattr_static(owner, name) is was for owner, name, was in seen)


def test_names_are_unique_and_each_says_what_it_does() -> None:
    """A name is what a table and a command line know it by; a bug has a sentence, and most a public thread."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.says and mutant.kind == "runner" for mutant in MUTANTS)


def test_the_base_that_plans_on_the_host_is_healthy() -> None:
    """Nothing is found in it, and its draft decodes are single steps: what is caught above is the runner's."""
    outcome = conform(
        under_test(Planning()), SuiteOptions(profile=SearchProfile(name="x", examples=3, steps=12), audits=False)
    )
    assert outcome.passed
    assert {mode.value for mode in (GraphMode.FULL, GraphMode.PIECEWISE)} <= {
        key.split()[1] for key in outcome.log.forwards
    }
