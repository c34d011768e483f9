"""The work of ``conformance``: the suite, or one printed case, with progress bars."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import attrs
import click
import torch
from hypothesis.configuration import set_hypothesis_home_dir

import capture_planner_conformance as suite
from capture_planner.cli.common import progress_bars
from capture_planner.codec import shipped as catalog
from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.records.environment import DeviceKind
from capture_planner_conformance import conform
from capture_planner_conformance.audits import AuditResult, attack_case
from capture_planner_conformance.deployments import LARGEST_REQS
from capture_planner_conformance.report import Conformance
from capture_planner_conformance.shapes import CANDIDATES
from capture_planner_conformance.suite import DRAFTS
from capture_planner_conformance.tampering import Attack
from capture_planner_runner.host import differences, facts

MOST_JOBS = 16
"""Processes by default: each has its own context on a GPU."""

JOB_MEMORY = 13 << 30
"""Free bytes of a GPU for each process by default: pages that lie far apart take 12 GiB of them."""


def run_suite(
    backend: str,
    environment: str | None,
    values: dict[str, Any],
    case: str | None,
    words: tuple[str, ...],
    named: Callable[[tuple[suite.Shape, ...]], tuple[suite.Shape, ...]],
) -> Conformance:
    """Run the suite, or one printed case, and return what was asked with the outcome.

    ``values``: the other options of the command. ``words``: the options that name shapes; ``named`` puts
    their values into candidate shapes.
    """
    machine = None if environment is None else catalog.find_environment(environment)
    if machine is not None and machine.device.kind is DeviceKind.CUDA and not torch.cuda.is_available():
        raise RunError(
            f"{machine.name} is {machine.device.name}, and this machine has no CUDA device; "
            "omit --environment, or run it there"
        )
    tested = suite.under_test(backend, environment=machine)
    profile = suite.THOROUGH if values["thorough"] or values["profile"] == "thorough" else suite.DEFAULT
    examples, steps = values["examples"], values["steps"]
    if examples is not None or steps is not None:
        # Steps that were asked for are those of every scene.
        profile = suite.SearchProfile(
            name="own",
            examples=examples or profile.examples,
            steps=steps or profile.steps,
            long_steps=0 if steps else profile.long_steps,
        )
    choices = suite.SuiteOptions(
        profile=profile,
        seed=values["seed"],
        drafts=DRAFTS if values["drafts"] is None else values["drafts"],
        max_reqs=values["max_reqs"] or LARGEST_REQS,
        shrink=values["shrink"],
        audits=values["audits"],
        jobs=values["jobs"] or _jobs(profile, tested.device),
    )
    interrupted = False
    left_out: tuple[int, ...] = ()
    if case is None:
        sets: list[tuple[suite.Shape, ...]] = list(dict.fromkeys(map(named, CANDIDATES))) if words else [()]
        outcome, interrupted = _search(tested, choices, sets, values["progress"])
    else:
        outcome, left_out = _again(tested, case, values["attack"])
    registered = tested.registry[tested.backend]
    options = [] if environment is None else ["-e", environment]
    options += [] if values["threads"] == 1 else ["--threads", str(values["threads"])]
    return Conformance(
        backend=registered.name,
        distribution=registered.distribution,
        version=registered.version,
        environment=tested.environment,
        differences=() if environment is None else differences(tested.environment),
        host=facts(),
        seed=values["seed"],
        profile=choices.profile if case is None else None,
        drafts=choices.drafts if case is None else (),
        base=("capture-planner", "conformance", backend, *options),
        named=words,
        outcome=outcome,
        interrupted=interrupted,
        attack=values["attack"] or "",
        left_out=left_out,
    )


def _jobs(profile: suite.SearchProfile, device: torch.device) -> int:
    """Return a process for each core that may be used, but none for less than two runs: each imports torch anew."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    room = torch.cuda.mem_get_info(device)[0] // JOB_MEMORY if device.type == "cuda" else MOST_JOBS
    return max(1, min(usable, MOST_JOBS, room, len([*profile.runs()]) // 2))


def _search(
    tested: suite.Subject, choices: suite.SuiteOptions, sets: list[tuple[suite.Shape, ...]], progress: bool | None
) -> tuple[suite.SuiteResult, bool]:
    """Run the suite on the first set of shapes that the backend supports; returns whether it was stopped too."""
    started = perf_counter()
    with _temporary_home(), _Bars(progress, choices.profile.examples) as bars:
        for number, shapes in enumerate(sets, 1):
            try:
                narrowed = attrs.evolve(choices, shapes=shapes)
                return conform(tested, narrowed, bars.scene, bars.attack), False
            except RunError:
                # None of these shapes runs here; the last set says why.
                if number == len(sets):
                    raise
            except KeyboardInterrupt:
                log, seconds = bars.log, perf_counter() - started
                # Stopped before the first scene, so there is nothing to report.
                if log is None:
                    raise
                failures = () if log.violation is None else (log.violation.failure,)
                return suite.SuiteResult(shapes=log.shapes, log=log, failures=failures, seconds=seconds), True
    raise AssertionError("the last set of shapes returns or raises")


@contextmanager
def _temporary_home() -> Iterator[None]:
    """Keep Hypothesis from leaving its cache in the working folder."""
    with tempfile.TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


class _Bars(ExitStack):
    """A bar of scenes, and after it one of attacks."""

    def __init__(self, visible: bool | None, scenes: int) -> None:
        super().__init__()
        self._task, self._scenes, self._stage = progress_bars(visible), scenes, ""
        self.log: suite.Log | None = None

    def scene(self, log: suite.Log) -> None:
        """Note one more scene."""
        self.log = log
        self._note("scenes", self._scenes, "minimizing the failing case" if log.violation else "")

    def attack(self, name: str, total: int) -> None:
        """Note one more attack."""
        self._note("attacks", total, name)

    def _note(self, stage: str, total: int, now: str) -> None:
        if stage != self._stage:
            self.close()
            self._stage, self._advance = stage, self.enter_context(self._task(stage, total))
        self._advance(now)


def _again(tested: suite.Subject, text: str, attack: str | None) -> tuple[suite.SuiteResult, tuple[int, ...]]:
    """Rerun one printed case, with an attack where one is named; returns the steps that did not apply too."""
    case, started = suite.loads(text), perf_counter()
    # Raises with the backend's reason if it does not run the shape of the case.
    shapes, _ = suite.usable_shapes(tested, (case.scene.shape,))
    if attack is not None:
        log, audited = suite.Log(examples=1), _attacked(tested, text, attack)
        return suite.SuiteResult(shapes=shapes, log=log, audited=audited, seconds=perf_counter() - started), ()
    rerun = suite.replay(tested, text)
    failures = () if rerun.failure is None else (suite.with_causes(tested, rerun.failure),)
    seconds = perf_counter() - started
    return suite.SuiteResult(shapes=shapes, log=rerun.log, failures=failures, seconds=seconds), rerun.skipped


def _attacked(tested: suite.Subject, text: str, named: str) -> tuple[AuditResult, ...]:
    role, _, rest = named.partition(" ")
    field, _, attack = rest.partition(" ")
    try:
        tampering = Role(role), field, Attack(attack)
    except ValueError:
        raise click.UsageError(
            f"--attack {named!r}: give a role ({', '.join(Role)}), a field and an attack "
            f"({', '.join(each.value for each in Attack)}), as in 'target seq_lens stale tail'."
        ) from None
    failure = attack_case(tested, suite.loads(text), *tampering)
    return () if failure is None else (failure,)
