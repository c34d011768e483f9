"""The suite: test one backend, and report what does not hold.

The same seed does the same: Hypothesis draws the examples from it, and nothing is kept between two runs.
Nothing here needs pytest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from capture_planner.errors import CapturePlannerError, RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records.backend import Attention
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_conformance.audits import AuditResult, audit
from capture_planner_conformance.deployments import DRAFTERS, LARGEST_REQS
from capture_planner_conformance.failure import Check, Failure, Violation
from capture_planner_conformance.machine import ConformanceMachine, Log, PlayResult, play
from capture_planner_conformance.minimize import PLAYS, minimize, with_causes
from capture_planner_conformance.processes import Each, workers
from capture_planner_conformance.scene import VARYING, WINDOW, DraftScheme, Scene, Shape
from capture_planner_conformance.shapes import RefusedShape, usable_features, usable_shapes
from capture_planner_conformance.stage import Subject


@attrs.frozen(kw_only=True)
class SearchProfile:
    """The effort of a search."""

    name: str
    examples: int
    """Scenes, each with a runner and graphs of its own."""
    steps: int
    """Most steps of a scene."""
    long_steps: int = 0
    """Most steps of the scenes that are long: 3 of 43; 0: none are."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the scenes and the steps of each Hypothesis run."""
        left, number = self.examples, 0
        while left > 0:
            number += 1
            is_long = self.long_steps > 0 and number % LONG_RUN == 0
            scenes = min(left, LONG_SCENES if is_long else BATCH)
            yield scenes, self.long_steps if is_long else self.steps
            left -= scenes


DEFAULT = SearchProfile(name="default", examples=150, steps=15, long_steps=60)
THOROUGH = SearchProfile(name="thorough", examples=2000, steps=15, long_steps=120)

BATCH = 10
"""Scenes of one Hypothesis run. After its tenth example, Hypothesis draws mostly variations of earlier ones: in
150 examples of one run, 70 scenes were different."""

LONG_RUN, LONG_SCENES = 5, 3
"""Each fifth run is of three long scenes: of what goes wrong after a while, or when a shape comes back."""

REPEATS = 5
"""Runs of a minimized case, to see whether it fails at each."""

DRAFTS = (0, 1, 2, 3, 5)
"""K of the scenes."""


@attrs.frozen(kw_only=True)
class SuiteOptions:
    """What one run of the suite tries, and what it does with a failing case."""

    profile: SearchProfile = DEFAULT
    seed: int = 0
    shapes: tuple[Shape, ...] = ()
    """Shapes to test; empty: all of ``shapes.CANDIDATES`` that the backend runs."""
    drafts: tuple[int, ...] = DRAFTS
    max_reqs: int = LARGEST_REQS
    """Most requests of a scene."""
    features: tuple[str, ...] | None = None
    """Names of the ``features`` that scenes may have; None: all."""
    shrink: bool = True
    """Minimize a failing case. It takes longer than finding it."""
    blame: bool = True
    """Find out which garbage a failing case needs."""
    audits: bool = True
    """Attack the declared fields of a backend that passed everything else."""
    jobs: int = 1
    """Processes that share the scenes and the attacks. The outcome is that of one; ``Subject`` must be picklable."""


@attrs.frozen(kw_only=True)
class SuiteResult:
    """The outcome of a run of the suite."""

    shapes: tuple[Shape, ...]
    refused: tuple[RefusedShape, ...] = ()
    untried: tuple[str, ...] = ()
    """What the run says nothing about, in sentences."""
    log: Log
    failures: tuple[Failure, ...] = ()
    audited: tuple[AuditResult, ...] = ()
    """Results of the attacks on declared fields; empty after a failure."""
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.failures


def conform(
    subject: Subject,
    options: SuiteOptions | None = None,
    progress: Callable[[Log], None] = lambda log: None,
    on_attack: Callable[[str, int], None] = lambda attack, total: None,
) -> SuiteResult:
    """Test a backend: declarations, random scenes with any order of steps, audits.

    ``progress`` is called at each scene, ``on_attack`` before each attack of an audit, with its name and the
    number of all. Raises ``RunError`` if the backend runs no shape here, or no forward ran: nothing was tested.
    """
    options, started = options or SuiteOptions(), perf_counter()
    shapes, refused = usable_shapes(subject, options.shapes)
    log = Log(shapes=shapes, on_change=progress)
    failures = check_declared(subject, shapes)
    audited: tuple[AuditResult, ...] = ()
    with workers(options.jobs) as each:
        # Wrong declarations make every scene wrong, so nothing else is searched.
        if not failures and (failure := search(subject, shapes, options, log, each)) is not None:
            failures.append(with_causes(subject, failure) if options.blame else failure)
        if options.audits and not failures:
            audited = audit(subject, shapes, seed=options.seed, progress=on_attack, each=each)
    return SuiteResult(
        shapes=shapes,
        refused=refused,
        untried=tuple(untried(subject.stage.scene_type, log, options.drafts)),
        log=log,
        failures=tuple(failures),
        audited=audited,
        seconds=perf_counter() - started,
    )


def search(
    subject: Subject, shapes: Sequence[Shape], options: SuiteOptions, log: Log, each: Each = map
) -> Failure | None:
    """Run the state machine; return the failure of the minimized case, or None.

    :param each: ``map``, or one that works in other processes: then each run has a log of its own.
    :raises RunError: no forward ran in any scene, so nothing was tested.
    """
    features, refused = usable_features(subject, shapes[0], options.features)
    log.refuse({feature.name: feature.reason for feature in refused})
    found = partial(_run, subject, shapes, options, features, log if each is map else None)
    for part in each(found, enumerate(options.profile.runs())):
        if part is not log:
            log.merge(part)
        # The first run that fails, also where a later one was over before.
        if log.violation is not None:
            break
    if log.violation is not None:
        return _minimized(subject, shapes, options, log)
    if not log.forwards.total():
        raise RunError(
            f"no forward ran in {counted(log.examples, 'scene')} of up to "
            f"{counted(options.profile.steps, 'step')}, so nothing was tested; "
            "ask for more scenes or steps, or another seed"
        )
    return None


def _run(
    subject: Subject,
    shapes: Sequence[Shape],
    options: SuiteOptions,
    features: Collection[str],
    shared: Log | None,
    run: tuple[int, tuple[int, int]],
) -> Log:
    """Search one Hypothesis run, by its number; return its log, which has a violation if something failed."""
    number, (scenes, steps) = run
    log = Log(shapes=tuple(shapes)) if shared is None else shared
    # The first value is drawn most often: of each run another one.
    first = number % len(DRAFTERS)
    attributes: dict[str, object] = {
        "subject": subject,
        "shapes": shapes,
        "drafts": options.drafts,
        "largest": options.max_reqs,
        "features": features,
        "drafters": DRAFTERS[first:] + DRAFTERS[:first],
        "log": log,
    }
    machine = type("Conformance", (ConformanceMachine,), attributes)
    try:
        # Hypothesis only finds the case; ``minimize`` says why it does not shrink it.
        with without_local_constants():
            run_state_machine_as_test(
                hypothesis.seed(f"{options.seed}/{number}")(machine),
                settings=search_settings(scenes, steps=steps, shrink=False),
            )
    # Flaky: the same draws did not fail again, and the log still has the case that did.
    except (Violation, hypothesis.errors.Flaky) as error:
        if log.violation is None:
            raise RunError(f"one seed drew two different scenes; run the suite again ({error})") from error
    return log


def _minimized(subject: Subject, shapes: Sequence[Shape], options: SuiteOptions, log: Log) -> Failure:
    """Minimize the last failing case, if asked for; a case that does not fail at every run says how often it does."""
    assert log.violation is not None, "something failed"
    failure, results = log.violation.failure, []
    plays = PLAYS if options.shrink else 1
    found = subject.loads(failure.case)
    for result in minimize(failure, found, lambda case: play(subject, case).failure, shapes, options.drafts, plays):
        results.append(result)
        failure = result or failure
        log.fail(Violation(failure))
        log.on_change(log)
    # The last play was of the minimized case.
    again = [results[-1] is not None]
    if options.shrink or not again[0]:
        # Not for a case that is as it was found and fails: that costs REPEATS scenes, and is no smaller case.
        again += [play(subject, subject.loads(failure.case)).failure is not None for _ in range(1, REPEATS)]
    if not all(again):
        failure = attrs.evolve(failure, failed=(sum(again), len(again)))
        log.fail(Violation(failure))
    return failure


def replay(subject: Subject, text: str) -> PlayResult:
    """Run a printed case. Raises ``RunError`` for text that is no case, and for a case that runs nothing."""
    case = subject.loads(text)
    result = play(subject, case)
    # A case without steps is a capture alone, which is tested by being made.
    if result.failure is None and case.steps and not result.log.forwards:
        raise RunError(
            f"nothing of this case runs: none of its {counted(len(case.steps), 'step')} applies; "
            "give one as it was printed, with a request that arrives and a forward of it"
        )
    return result


def search_settings(examples: int, *, steps: int = 50, shrink: bool = True) -> settings:
    """Return Hypothesis settings of a search: random from a seed alone, silent, and without a database.

    :param steps: the most steps of a state machine.
    """
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        # Scenes are large and slow, which Hypothesis's health checks would refuse.
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        stateful_step_count=steps,
    )


@contextmanager
def without_local_constants() -> Iterator[None]:
    """Let a seed draw the same in every process: Hypothesis also draws constants of the local modules that are loaded.

    Hypothesis 6.131 and newer read them from the source; nothing public turns that off.
    """
    providers: Any = importlib.import_module("hypothesis.internal.conjecture.providers")
    if not hasattr(providers, "_get_local_constants"):
        yield
        return
    constants = providers.Constants()
    # The cache holds which constants fit, and knows nothing of the change.
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        with mock.patch.object(providers, "_get_local_constants", lambda: constants):
            yield
    finally:
        providers.CONSTANTS_CACHE.cache.clear()


# Declarations, which need no torch: the answers must not depend on when they are asked for.


def check_declared(subject: Subject, shapes: Sequence[Shape]) -> list[Failure]:
    """Return the failures of declarations for these shapes."""
    return [
        Failure(check=Check.DECLARED, message=message, role=role)
        for shape in shapes
        for role, message in _wrong(subject, shape)
    ]


def declared_plan(subject: Subject, shape: Shape) -> Plan:
    """Return a plan with every role; raises ``PlanningError`` for declarations that are not well formed."""
    scene = Scene(shape=shape, drafts=2, num_tokens=24, size_tokens=(24,))
    return make_plan(scene.spec(subject.backend), subject.environment, subject.registry)


def _wrong(subject: Subject, shape: Shape) -> Iterator[tuple[Role, str]]:
    backend, environment = subject.registry[subject.backend], subject.environment
    try:
        plan = declared_plan(subject, shape)
        for role in plan.roles:
            asked = role.role, Attention.of(plan, role.role, layers=1, window=None), environment
            calls: dict[str, Callable[[], object]] = {
                "workspace": partial(backend.workspace, *asked, role.entries, plan.limits),
                "refresh": partial(backend.refresh, *asked),
                "padding": partial(backend.padding, *asked),
                "support": partial(backend.support, *asked),
            }
            # All before any second call: an answer may depend on what another question left behind.
            once = {name: call() for name, call in calls.items()}
            for name, call in calls.items():
                if call() != once[name]:
                    yield role.role, f"{name} is not pure: a second call returns another value"
    except CapturePlannerError as error:
        yield Role.TARGET, str(error)


# What a run says nothing about.

NEVER = (
    "latent attention (MLA)",
    "KV caches in NVFP4, and scales of KV caches: the runner has none",
    "multimodal positions and embeddings as inputs",
    "more than one device: ranks are those of the plan, and one of them runs",
    "layers of several backends in one role, or of another kind than attention",
)
"""Beyond the suite, whatever the options."""


def untried(kind: type[Scene], log: Log, drafts: Sequence[int]) -> Iterator[str]:
    """Yield in sentences what was refused, what no scene had, what no batch reached, and what is never tried.

    A pass says nothing about it.
    """
    yield from (f"{name}: {reason}" for name, reason in log.refused.items())
    names = [*(feature.name for feature in kind.features.values()), WINDOW]
    names += [VARYING, *map(str, DraftScheme)] if any(drafts) else []
    # With few scenes some features are never drawn, and a pass says nothing about them.
    absent = [name for name in names if not log.features[name] and name not in log.refused]
    yield from (f"{name}: no scene had it" for name in absent)
    for role in Role:
        if role is not Role.TARGET and not any(drafts):
            continue
        modes = [
            mode.value
            for mode in (GraphMode.PIECEWISE, GraphMode.FULL)
            if not log.forwards[f"{role.value} {mode.value}"]
            and not (role is Role.DRAFT_DECODE and mode is GraphMode.PIECEWISE)
        ]
        if modes:
            yield f"{role.value} in {' and '.join(modes)} graphs"
    reqs, tokens = log.largest
    yield f"batches of more than {counted(reqs, 'request')} or {counted(tokens, 'token')}"
    yield f"sequences of more than {counted(log.longest, 'key')}, and pages above number {log.pages}"
    yield f"scenes of more than {counted(log.most_steps, 'step')}"
    yield from NEVER
