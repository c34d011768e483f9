"""The suite: put one backend through everything, and say what was found.

The same seed does the same: examples are Hypothesis's, drawn from a seed, and nothing is kept between
two runs. Everything here runs without pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import attrs
import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from capture_planner.conformance.audit import Audited, audit
from capture_planner.conformance.declared import check_declared
from capture_planner.conformance.drawing import drawn
from capture_planner.conformance.finding import Finding, Violation
from capture_planner.conformance.machine import ConformanceMachine, Log, Played, play, played
from capture_planner.conformance.scene import Case, Shape, loads
from capture_planner.conformance.shapes import Refused, usable_shapes
from capture_planner.conformance.smaller import PLAYS, smaller
from capture_planner.conformance.stage import Stage, Tested
from capture_planner.errors import RunError
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class Profile:
    """How much is tried."""

    name: str
    examples: int
    """Scenes, each with a runner and graphs of its own."""
    steps: int
    """Most steps of a scene."""


DEFAULT = Profile(name="default", examples=150, steps=15)
THOROUGH = Profile(name="thorough", examples=2000, steps=15)

FRESH = 10
"""Scenes that are drawn afresh before a new search is begun."""

DRAFTS = (0, 1, 2, 3, 5)
"""K of the scenes."""


@attrs.frozen(kw_only=True)
class Choices:
    """What somebody may choose about a run of the suite; the defaults suit most."""

    profile: Profile = DEFAULT
    seed: int = 0
    shapes: tuple[Shape, ...] = ()
    """What kernels are asked for; empty: those of ``shapes.CANDIDATES`` that the backend runs."""
    drafts: tuple[int, ...] = DRAFTS
    shrink: bool = True
    """Make a failing case small. It takes longer than finding it does."""
    blame: bool = True
    """Say which garbage a failing case needs."""
    audits: bool = True
    """Attack the declared fields of a backend that passed everything else."""


@attrs.frozen(kw_only=True)
class Outcome:
    """What a run of the suite did and found."""

    shapes: tuple[Shape, ...]
    refused: tuple[Refused, ...]
    """Shapes that the backend does not run, each with its reason."""
    log: Log
    findings: tuple[Finding, ...]
    audited: tuple[Audited, ...]
    """What came of the attacks on declared fields; empty where something was found before."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def conform(
    tested: Tested,
    choices: Choices | None = None,
    progress: Callable[[Log], None] = lambda log: None,
    attacking: Callable[[str, int], None] = lambda field, total: None,
) -> Outcome:
    """Put a backend through the suite: declarations, any scene and any order of steps, audits.

    ``progress`` is called at each scene, ``attacking`` before each attack of an audit.
    Raises ``RunError`` where the backend runs none of the shapes here, or no forward ran: there is nothing
    to say then.
    """
    choices, started, log = choices or Choices(), perf_counter(), Log(told=progress)
    findings: list[Finding] = []
    shapes, refused = usable_shapes(tested, choices.shapes)
    log.shapes = shapes
    findings += check_declared(tested, shapes)
    if not findings and (violation := search(tested, shapes, choices, log)) is not None:
        finding = violation.finding
        findings.append(blamed(tested, finding) if choices.blame else finding)
    audited: tuple[Audited, ...] = ()
    if choices.audits and not findings:
        audited = audit(tested, shapes, seed=choices.seed, progress=attacking)
    return Outcome(
        shapes=shapes,
        refused=refused,
        log=log,
        findings=tuple(findings),
        audited=audited,
        seconds=perf_counter() - started,
    )


def search(
    tested: Tested,
    shapes: Sequence[Shape],
    choices: Choices,
    log: Log,
) -> Violation | None:
    """Run the state machine; returns the violation of the smallest case that was found, or None.

    Hypothesis only finds it: its shrinking may end by its clock, and so elsewhere on another machine.
    Raises ``RunError`` where no forward ran in any scene: there is nothing to say then.
    """
    machine = type(
        "Conformance",
        (ConformanceMachine,),
        {
            "tested": tested,
            "shapes": shapes,
            "drafts": choices.drafts,
            "log": log,
        },
    )
    try:
        for number, examples in enumerate(_portions(choices.profile.examples)):
            run_state_machine_as_test(
                hypothesis.seed(f"{choices.seed}/{number}")(machine),
                settings=drawn(examples, steps=choices.profile.steps, shrink=False),
            )
    except Violation:
        comes_again = True
    except hypothesis.errors.FlakyFailure:
        comes_again = False
    else:
        if not log.forwards.total():
            raise RunError(
                f"no forward ran in {counted(log.examples, 'scene')} of up to "
                f"{counted(choices.profile.steps, 'step')}, so that nothing was tried; "
                "ask for more scenes or steps, or another seed"
            )
        return None
    return _small(tested, shapes, choices, log, comes_again)


def _small(
    tested: Tested, shapes: Sequence[Shape], choices: Choices, log: Log, comes_again: bool
) -> Violation:
    """Make the last failing case small, as far as it is asked for, and say so where it comes and goes."""
    assert log.violation is not None, "something failed"
    plays = PLAYS if choices.shrink else 1
    made = []
    for violation in smaller(log.violation, partial(play, tested), shapes, choices.drafts, plays):
        made.append(violation)
        log.violation = violation or log.violation
        log.told(log)
    if not comes_again or made[0] is None or made[-1] is None:
        finding = log.violation.finding
        log.violation = Violation(attrs.evolve(finding, says=f"(not at every run) {finding.says}"))
    return log.violation


def _portions(examples: int) -> list[int]:
    """Return how many scenes are drawn afresh together, so often.

    After its tenth example Hypothesis draws mostly what it drew before with a part exchanged: of 150 scenes
    70 were different ones.
    """
    whole, rest = divmod(examples, FRESH)
    return [FRESH] * whole + [rest] * (rest > 0)


def blamed(tested: Tested, finding: Finding) -> Finding:
    """Return the finding with the garbage without which it is not seen: one source at a time is spared.

    Where that is a field, the finding names it with its axis.
    """
    if not finding.case:
        return finding
    case = loads(finding.case)
    causes, field, axis = [], finding.field, finding.axis
    for source, along in _sources(tested, case):
        if play(tested, case, spared=(source,)) is None:
            causes.append(source)
            if along and not field:
                field, axis = source, along
    return attrs.evolve(finding, causes=tuple(causes), field=field, axis=axis)


def _sources(tested: Tested, case: Case) -> list[tuple[str, str]]:
    """Return what is spoilt in a scene, and for fields along which axis they are."""
    try:
        with Stage(tested, case.scene) as stage:
            axes = {
                buffer.key: buffer.field.axis.value
                for role in stage.runner.parts.roles.values()
                for buffer in role.fields
            }
            return [(source, axes.get(source, "")) for source in stage.watch.sources()]
    except Exception:  # A scene that cannot be set up has nothing that is spoilt.
        return []


def again(tested: Tested, text: str) -> Played:
    """Do a printed case again. Raises ``RunError`` for no case, and for one whose steps run nothing."""
    case = loads(text)
    found = played(tested, case)
    if found.violation is None and case.steps and not found.log.forwards:
        raise RunError(
            f"nothing of this case runs: none of its {counted(len(case.steps), 'step')} applies; "
            "give one as it was printed, with a request that arrives and a forward of it"
        )
    return found
