"""The conformance suite in pytest: one empty subclass runs all of it.

    from capture_planner.conformance.pytest_plugin import ConformanceTests

    class TestAcme(ConformanceTests):
        backend = "acme"

What is tried is chosen by ``CONFORMANCE_PROFILE``, ``CONFORMANCE_SEED`` and ``CONFORMANCE_EXAMPLES``, or by the
options of the same names where pytest loads this module as a plugin: ``-p capture_planner.conformance.pytest_plugin``.
No entry point loads it, so that nobody who has capture-planner pays for it in other test runs.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs
import pytest

from capture_planner._extras import refuse_missing
from capture_planner.errors import CapturePlannerError, RunError
from capture_planner.records.backend import Backend

# torch comes with the suite: only tests that run need it, not their collection.
if TYPE_CHECKING:
    from capture_planner.conformance import Choices, Finding, Shape, Tested, Violation

_OPTIONS = {
    "profile": "how much is tried: default (150 scenes) or thorough (2000)",
    "seed": "of all that is random: a whole number; 0 where it is left out",
    "examples": "scenes that are tried, in place of the profile's number",
    "case": "a case of a finding, to do that alone again",
}


PROFILES = ("default", "thorough")
"""Those of the suite, by name: it is not imported before a test runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--conformance-profile`` and its like."""
    group = parser.getgroup("conformance", "conformance suite of attention backends")
    for name, says in _OPTIONS.items():
        group.addoption(f"--conformance-{name}", help=f"{says} (or CONFORMANCE_{name.upper()})")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what is no choice before anything is collected; raises ``pytest.UsageError``."""
    _choices(config)
    if (case := _asked(config, "case")) is not None:
        try:
            refuse_missing()
            from capture_planner.conformance import loads

            loads(case)
        except CapturePlannerError as error:
            raise pytest.UsageError(f"{_source(config, 'case')}: {error}") from None


class ConformanceTests:
    """Subclass it, with ``backend``: the name of an installed one, or any object that is one.

    A subclass may have a fixture ``tested`` in place of this one, for another environment or device.
    """

    backend: ClassVar[str | Backend]

    @pytest.fixture(autouse=True)
    def _usage(self, request: pytest.FixtureRequest) -> None:
        """End the session where a choice is none: imported alone, this module has not configured pytest."""
        try:
            pytest_configure(request.config)
        except pytest.UsageError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)

    @pytest.fixture
    def tested(self) -> Iterator[Tested]:
        """Give the backend as it is tested on this machine."""
        tested = self._found()
        import torch

        # The operators are tiny: on many threads they wait for each other.
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield tested
        torch.set_num_threads(before)

    def _found(self) -> Tested:
        """Return what is tested; a class that names no backend fails in a sentence."""
        name = type(self).__name__
        if not hasattr(self, "backend"):
            pytest.fail(f"{name} needs `backend`: a name, or an object that is one", pytrace=False)
        # Its type is a promise that a test file need not keep.
        backend: object = self.backend
        if not isinstance(backend, str) and not isinstance(getattr(backend, "name", None), str):
            pytest.fail(
                f"{name}: `backend` is {backend!r}, which is neither a name nor a backend", pytrace=False
            )
        try:
            refuse_missing()
            from capture_planner import conformance

            return conformance.under_test(self.backend)
        except CapturePlannerError as error:
            says = str(error)
        # Not inside: pytest would print the error twice.
        pytest.fail(f"{name}: {says}", pytrace=False)

    @pytest.fixture
    def shapes(self, tested: Tested) -> tuple[Shape, ...]:
        """Give what the backend runs here; skips where it refuses everything, with its reasons."""
        from capture_planner import conformance

        try:
            return conformance.usable_shapes(tested)[0]
        except RunError as error:
            pytest.skip(str(error))

    def test_declarations_are_well_formed_and_pure(self, tested: Tested, shapes: tuple[Shape, ...]) -> None:
        """Whatever is declared, it is the same whenever it is asked for."""
        from capture_planner.conformance.declared import check_declared

        _refuse(check_declared(tested, shapes))

    def test_replays_are_what_attention_is_defined_as(
        self, tested: Tested, shapes: tuple[Shape, ...], request: pytest.FixtureRequest
    ) -> None:
        """Plans are captured, and any order of steps replays them, with garbage in all that is padding."""
        from capture_planner import conformance

        if (case := _asked(request.config, "case")) is not None:
            finding = conformance.again(tested, case).finding
        else:
            violation = _searched(tested, shapes, choices(request.config))
            finding = None if violation is None else violation.finding
        if finding is not None:
            finding = conformance.blamed(tested, finding)
            _refuse([attrs.evolve(finding, command=_command(request, finding))])

    def test_every_declared_field_matters(
        self, tested: Tested, shapes: tuple[Shape, ...], request: pytest.FixtureRequest
    ) -> None:
        """Each field is treated wrongly, alone; what the backend declared is seen to be needed."""
        fields = _declared(tested, shapes[0])
        if not fields:
            return
        from capture_planner.conformance import Verdict, audit, verdicts

        audited = audit(tested, shapes, seed=choices(request.config).seed, fields=fields)
        over = [
            f"  {role.value} {field}"
            for (role, field), verdict in verdicts(audited).items()
            if verdict is Verdict.OVER_DECLARED
        ]
        if over:
            listed = "\n".join(over)
            pytest.fail(
                f"declared, and nothing reads it: left stale, filled otherwise, cut or laid along another axis, "
                f"it changes no real row\n{listed}\nIt is copied at every step: take it out of padding().",
                pytrace=False,
            )


def choices(config: pytest.Config) -> Choices:
    """Return what was asked for, by an option or else by a variable of the environment.

    Raises ``pytest.UsageError`` for what is neither a profile nor a number.
    """
    from capture_planner.conformance import DEFAULT, THOROUGH, Choices

    name, seed, examples = _choices(config)
    profile = {profile.name: profile for profile in (DEFAULT, THOROUGH)}[name]
    if examples is not None:
        profile = attrs.evolve(profile, examples=examples)
    return Choices(profile=profile, seed=seed or 0)


def _choices(config: pytest.Config) -> tuple[str, int | None, int | None]:
    """Return profile, seed and examples as they were asked for."""
    profile = _asked(config, "profile") or PROFILES[0]
    if profile not in PROFILES:
        raise pytest.UsageError(
            f"{_source(config, 'profile')}: {profile!r} is unknown; there are {', '.join(PROFILES)}"
        )
    return profile, _number(config, "seed", least=0), _number(config, "examples", least=1)


def _asked(config: pytest.Config, name: str) -> str | None:
    told: str | None = config.getoption(f"conformance_{name}", None)
    return os.environ.get(f"CONFORMANCE_{name.upper()}") if told is None else told


def _source(config: pytest.Config, name: str) -> str:
    """Return where it was asked for."""
    option = config.getoption(f"conformance_{name}", None) is not None
    return f"--conformance-{name}" if option else f"CONFORMANCE_{name.upper()}"


def _number(config: pytest.Config, name: str, *, least: int) -> int | None:
    text = _asked(config, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise pytest.UsageError(
            f"{_source(config, name)}: expected a whole number from {least}, got {text!r}"
        )
    return int(text)


def _searched(tested: Tested, shapes: tuple[Shape, ...], asked: Choices) -> Violation | None:
    """Search, and fail in a sentence where nothing was tried."""
    from capture_planner import conformance

    try:
        return conformance.search(tested, shapes, asked, conformance.Log())
    except RunError as error:
        says = str(error)
    pytest.fail(says, pytrace=False)


def _declared(tested: Tested, shape: Shape) -> frozenset[str]:
    """Return the names of all fields that the backend declares, in any role."""
    from capture_planner.conformance.scene import Scene
    from capture_planner.planning.planner import plan

    scene = Scene(shape=shape, drafts=2, num_tokens=24, size_tokens=(24,))
    made = plan(scene.spec(tested.backend), tested.environment, tested.registry)
    groups = (group for role in made.roles for group in role.groups)
    return frozenset(field.name for group in groups for field in group.padding.fields)


def _command(request: pytest.FixtureRequest, finding: Finding) -> str:
    loaded = request.config.pluginmanager.has_plugin(__name__)
    words = ["pytest", *([] if loaded else ["-p", __name__]), request.node.nodeid]
    return shlex.join([*words, "--conformance-case", finding.case])


def _refuse(findings: Sequence[Finding]) -> None:
    if findings:
        pytest.fail("\n\n".join(in_lines(finding) for finding in findings), pytrace=False)


def in_lines(finding: Finding) -> str:
    """Write a finding for people: the law, what was seen, where, step by step, and how it is seen again."""
    field = finding.field + (f", along {finding.axis}" if finding.axis else "")
    told = {
        "seen": finding.says,
        "role": finding.role.value if finding.role else "",
        "graph": str(finding.entry or ""),
        "batch": finding.batch,
        "field": field,
        "only with garbage in": " and ".join(finding.causes),
    }
    lines = [f"{finding.check.value}: it does not hold that {finding.check.law}"]
    lines += [f"  {name}: {text}" for name, text in told.items() if text]
    if finding.case:
        from capture_planner.conformance.scene import loads
        from capture_planner.conformance.words import case_in_words

        lines += [f"  {number}. {step}" for number, step in enumerate(case_in_words(loads(finding.case)), 1)]
    return "\n".join([*lines, *(["do it again:", f"  {finding.command}"] if finding.command else [])])
