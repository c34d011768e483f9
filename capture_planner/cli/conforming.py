"""What ``conformance`` does: the suite, or one printed case, behind bars of progress."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import attrs
import click
import torch
from hypothesis.configuration import set_hypothesis_home_dir

from capture_planner.cli.common import progress_bars
from capture_planner.codec import shipped as catalog
from capture_planner.conformance import (
    DEFAULT,
    THOROUGH,
    Log,
    Profile,
    Shape,
    Subject,
    SuiteOptions,
    SuiteResult,
    conform,
    loads,
    replay,
    under_test,
    usable_shapes,
    with_causes,
)
from capture_planner.conformance.audit import Attack, AuditResult, attack_case
from capture_planner.conformance.failure import Failure
from capture_planner.conformance.shapes import CANDIDATES
from capture_planner.conformance.suite import DRAFTS
from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.environment import DeviceKind
from capture_planner.report.conformance import Conformance
from capture_planner.runtime.host import differences, facts

SHAPES = {
    "dtype": "dtype",
    "heads": "heads",
    "head_dim": "head_dim",
    "page_size": "page_size",
    "max_model_len": "longest",
    "window": "windowed",
}
"""Options that name shapes, by what they set."""


def report(backend: str, environment: str | None, given: dict[str, Any], case: str | None) -> Conformance:
    """Run the suite, or a case, and put what it was asked beside what came of it."""
    on = _tested(backend, environment)
    choices = _choices(given)
    interrupted = False
    left_out: tuple[int, ...] = ()
    if case is None:
        outcome, interrupted = _search(on, choices, given)
    else:
        outcome, left_out = _again(on, case, given["attack"])
    found = on.registry[on.backend]
    options = [] if environment is None else ["-e", environment]
    options += [] if given["threads"] == 1 else ["--threads", str(given["threads"])]
    return Conformance(
        backend=found.name,
        distribution=found.distribution,
        version=found.version,
        environment=on.environment,
        differences=() if environment is None else differences(on.environment),
        host=facts(),
        seed=given["seed"],
        profile=choices.profile if case is None else None,
        drafts=choices.drafts if case is None else (),
        base=("capture-planner", "conformance", backend, *options),
        named=tuple(_named(given)),
        outcome=outcome,
        interrupted=interrupted,
        attack=given["attack"] or "",
        left_out=left_out,
    )


def _tested(backend: str, environment: str | None) -> Subject:
    planned = None if environment is None else catalog.find_environment(environment)
    if planned is not None and planned.device.kind is DeviceKind.CUDA and not torch.cuda.is_available():
        raise RunError(
            f"{planned.name} is {planned.device.name}, and this machine has no CUDA device; "
            "leave --environment out, or run it there"
        )
    return under_test(backend, environment=planned)


def _choices(given: dict[str, Any]) -> SuiteOptions:
    return SuiteOptions(
        profile=_profile(given),
        seed=given["seed"],
        drafts=DRAFTS if given["drafts"] is None else given["drafts"],
        shrink=given["shrink"],
        audits=given["audits"],
    )


def _profile(given: dict[str, Any]) -> Profile:
    named = THOROUGH if given["thorough"] or given["profile"] == "thorough" else DEFAULT
    if given["examples"] is None and given["steps"] is None:
        return named
    return Profile(
        name="own", examples=given["examples"] or named.examples, steps=given["steps"] or named.steps
    )


def _named(given: dict[str, Any]) -> Iterator[str]:
    """Yield the options that name shapes, as words."""
    for name in SHAPES:
        option, value = name.replace("_", "-"), given[name]
        if name == "window":
            yield from [] if value is None else [f"--{option}" if value else f"--no-{option}"]
        else:
            for each in value:
                yield from (f"--{option}", ":".join(map(str, each)) if name == "heads" else str(each))


def shapes_named(candidates: tuple[Shape, ...], given: dict[str, Any]) -> tuple[Shape, ...]:
    """Return the candidates with all that was named in the place of theirs; what is the same then, once."""
    changes: list[list[dict[str, Any]]] = []
    for name, sets in SHAPES.items():
        value = given[name]
        if name == "heads":
            changes.append([{"heads": query, "kv_heads": kv} for query, kv in value])
        elif name == "window":
            changes.append([] if value is None else [{sets: value}])
        else:
            changes.append([{sets: each} for each in value])
    products = itertools.product(*(each or [{}] for each in changes))
    combined = [{name: each for part in parts for name, each in part.items()} for parts in products]
    return tuple(dict.fromkeys(replace(shape, **each) for shape in candidates for each in combined))


def _search(on: Subject, choices: SuiteOptions, given: dict[str, Any]) -> tuple[SuiteResult, bool]:
    """Run the suite; returns what came of it, and whether somebody stopped it."""
    sets: list[tuple[Shape, ...]] = [()]
    if any(_named(given)):
        sets = list(dict.fromkeys(shapes_named(candidates, given) for candidates in CANDIDATES))
    started = perf_counter()
    with _nothing_left_behind(), _Bars(given["progress"], choices.profile.examples) as bars:
        for number, shapes in enumerate(sets, 1):
            try:
                wanted = attrs.evolve(choices, shapes=shapes)
                return conform(on, wanted, bars.scene, bars.attack), False
            except RunError:
                # It runs none of these here; the last ones say why.
                if number == len(sets):
                    raise
            except KeyboardInterrupt:
                if bars.log is None:
                    raise
                violation = bars.log.violation
                return SuiteResult(
                    shapes=bars.log.shapes,
                    refused=(),
                    log=bars.log,
                    failures=() if violation is None else (violation.failure,),
                    audited=(),
                    seconds=perf_counter() - started,
                ), True
    raise AssertionError("the last set of shapes returns or raises")


@contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Hypothesis keeps a cache in the working folder, where nobody looks for one."""
    with tempfile.TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


class _Bars:
    """A bar of scenes, and after it one of attacks."""

    def __init__(self, wanted: bool | None, scenes: int) -> None:
        self._task, self._scenes = progress_bars(wanted), scenes
        self._shown = ExitStack()
        self._advance: Callable[[str], None] | None = None
        self._attacking = False
        self.log: Log | None = None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.close()

    def scene(self, log: Log) -> None:
        """Note one more scene."""
        self.log = log
        if self._advance is None:
            self._advance = self._shown.enter_context(self._task("scenes", self._scenes))
        self._advance("making the failing case small" if log.violation else "")

    def attack(self, name: str, total: int) -> None:
        """Note one more attack."""
        if not self._attacking:
            self._attacking = True
            self._shown.close()
            self._advance = self._shown.enter_context(self._task("attacks", total))
        assert self._advance is not None, "a bar is shown"
        self._advance(name)


def _again(on: Subject, text: str, attack: str | None) -> tuple[SuiteResult, tuple[int, ...]]:
    """Do one printed case again, with an attack where one is named; returns the steps left out too."""
    case, started = loads(text), perf_counter()
    shapes, _ = usable_shapes(on, (case.scene.shape,))
    findings: tuple[Failure, ...] = ()
    audited: tuple[AuditResult, ...] = ()
    log = Log(examples=1)
    left_out: tuple[int, ...] = ()
    if attack is not None:
        audited = _attacked(on, text, attack)
    else:
        done = replay(on, text)
        log, left_out = done.log, done.skipped
        findings = () if done.failure is None else (with_causes(on, done.failure),)
    outcome = SuiteResult(
        shapes=shapes,
        refused=(),
        log=log,
        failures=findings,
        audited=audited,
        seconds=perf_counter() - started,
    )
    return outcome, left_out


def _attacked(on: Subject, text: str, named: str) -> tuple[AuditResult, ...]:
    role, _, rest = named.partition(" ")
    field, _, attack = rest.partition(" ")
    try:
        wanted = Role(role), field, Attack(attack)
    except ValueError:
        raise click.UsageError(
            f"--attack {named!r}: give a role ({', '.join(Role)}), a field and an attack "
            f"({', '.join(each.value for each in Attack)}), as in 'target seq_lens stale tail'."
        ) from None
    found = attack_case(on, loads(text), *wanted)
    return () if found is None else (found,)
