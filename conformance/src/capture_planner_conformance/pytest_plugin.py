"""The conformance suite in pytest: an empty subclass runs all of it.

    from capture_planner_conformance import ConformanceTests

    class TestAcme(ConformanceTests):
        backend = "acme"

``CONFORMANCE_PROFILE``, ``CONFORMANCE_SEED`` and ``CONFORMANCE_EXAMPLES`` set the effort, as do options of the same
names if pytest loads this module as a plugin: ``-p capture_planner_conformance.pytest_plugin``. It has no entry
point, so that it costs other test runs nothing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs
import pytest

from capture_planner.errors import CapturePlannerError, RunError
from capture_planner.plugins.backend import Backend
from capture_planner_conformance._extras import refuse_missing_packages

# torch comes with the suite: only tests that run need it, not their collection.
if TYPE_CHECKING:
    from capture_planner_conformance.failure import Failure
    from capture_planner_conformance.scene import Shape
    from capture_planner_conformance.stage import Subject
    from capture_planner_conformance.suite import SuiteOptions

_OPTIONS = {
    "profile": "effort of the search: default (150 scenes) or thorough (2000)",
    "seed": "random seed (default 0)",
    "examples": "number of scenes, instead of the profile's",
    "case": "run only this case, as a failure printed it",
}

PROFILES = ("default", "thorough")
"""Names of the suite's profiles: the suite is not imported before a test runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--conformance-profile`` and its like."""
    group = parser.getgroup("conformance", "conformance suite of attention backends")
    for name, text in _OPTIONS.items():
        group.addoption(f"--conformance-{name}", help=f"{text} (or CONFORMANCE_{name.upper()})")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse invalid options before anything is collected; raises ``pytest.UsageError``."""
    _search_options(config)
    case, source = _option(config, "case")
    if case is not None:
        try:
            refuse_missing_packages()
            from capture_planner_conformance.scene import loads

            loads(case)
        except CapturePlannerError as error:
            raise pytest.UsageError(f"{source}: {error}") from None


class ConformanceTests:
    """Subclass it with ``backend``: the name of an installed backend, or a backend object.

    A subclass may override the fixture ``subject``, for another environment or device.
    """

    backend: ClassVar[str | Backend]

    @pytest.fixture(autouse=True)
    def _usage(self, request: pytest.FixtureRequest) -> None:
        """End the session on invalid options, if this module is only imported and did not configure pytest."""
        try:
            pytest_configure(request.config)
        except pytest.UsageError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)

    @pytest.fixture
    def subject(self) -> Iterator[Subject]:
        """Give the backend as it is tested on this machine."""
        name = type(self).__name__
        if not hasattr(self, "backend"):
            pytest.fail(f"{name} needs `backend`: a name or a backend object", pytrace=False)
        # A test file need not be type-checked.
        backend: object = self.backend
        if not isinstance(backend, str) and not isinstance(getattr(backend, "name", None), str):
            pytest.fail(f"{name}: `backend` is {backend!r}, expected a name or a backend object", pytrace=False)
        with _failing(f"{name}: "):
            refuse_missing_packages()
            from capture_planner_conformance.stage import under_test

            subject = under_test(self.backend)
        import torch

        # The operators are tiny: on many threads they wait for each other.
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield subject
        torch.set_num_threads(before)

    @pytest.fixture
    def shapes(self, subject: Subject) -> tuple[Shape, ...]:
        """Give the shapes that the backend runs; skips with its reasons if it refuses all."""
        from capture_planner_conformance.shapes import usable_shapes

        try:
            return usable_shapes(subject)[0]
        except RunError as error:
            pytest.skip(str(error))

    def test_declarations_are_well_formed_and_pure(self, subject: Subject, shapes: tuple[Shape, ...]) -> None:
        """Every declaration is the same each time."""
        from capture_planner_conformance.suite import check_declared

        _fail(check_declared(subject, shapes))

    def test_replays_compute_attention(
        self, subject: Subject, shapes: tuple[Shape, ...], request: pytest.FixtureRequest
    ) -> None:
        """Plans are captured and replayed in any order of steps, with garbage in the padding."""
        from capture_planner_conformance import machine, minimize, suite

        case, _ = _option(request.config, "case")
        if case is not None:
            failure = suite.replay(subject, case).failure
        else:
            with _failing():
                failure = suite.search(subject, shapes, suite_options(request.config), machine.Log())
        if failure is not None:
            failure = minimize.with_causes(subject, failure)
            _fail([attrs.evolve(failure, command=_command(request, failure))])

    def test_every_declared_field_matters(
        self, subject: Subject, shapes: tuple[Shape, ...], request: pytest.FixtureRequest
    ) -> None:
        """Each field is treated wrongly, alone, and that must change some real row."""
        from capture_planner_conformance.audits import Verdict, audit, verdicts
        from capture_planner_conformance.suite import declared_plan

        groups = (group for role in declared_plan(subject, shapes[0]).roles for group in role.groups)
        fields = frozenset(field.name for group in groups for field in group.padding.fields)
        seed = suite_options(request.config).seed
        # An empty ``fields`` would attack the runner's fields too.
        audited = audit(subject, shapes, seed=seed, fields=fields) if fields else ()
        found = verdicts(audited).items()
        over = [f"  {role.value} {field}" for (role, field), each in found if each is Verdict.OVER_DECLARED]
        if over:
            listed = "\n".join(over)
            pytest.fail(
                "declared, and not read: left stale, filled otherwise, cut or laid along another axis, it changes "
                f"no real row\n{listed}\nIt is copied at every step: remove it from padding().",
                pytrace=False,
            )


def suite_options(config: pytest.Config) -> SuiteOptions:
    """Return the options of the search: command-line options, else environment variables.

    Raises ``pytest.UsageError`` for an unknown profile, and for text that is no number.
    """
    from capture_planner_conformance.suite import DEFAULT, THOROUGH, SuiteOptions

    name, seed, examples = _search_options(config)
    profile = DEFAULT if name == PROFILES[0] else THOROUGH
    if examples is not None:
        profile = attrs.evolve(profile, examples=examples)
    return SuiteOptions(profile=profile, seed=seed or 0)


def _search_options(config: pytest.Config) -> tuple[str, int | None, int | None]:
    profile, source = _option(config, "profile")
    if (profile or PROFILES[0]) not in PROFILES:
        raise pytest.UsageError(f"{source}: {profile!r} is not a profile; expected one of {', '.join(PROFILES)}")
    return profile or PROFILES[0], _number(config, "seed", least=0), _number(config, "examples", least=1)


def _option(config: pytest.Config, name: str) -> tuple[str | None, str]:
    """Return the value of an option, or else of its variable, and the name of that option or variable."""
    value: str | None = config.getoption(f"conformance_{name}", None)
    if value is not None:
        return value, f"--conformance-{name}"
    variable = f"CONFORMANCE_{name.upper()}"
    return os.environ.get(variable), variable


def _number(config: pytest.Config, name: str, *, least: int) -> int | None:
    text, source = _option(config, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise pytest.UsageError(f"{source}: expected a whole number from {least}, got {text!r}")
    return int(text)


@contextlib.contextmanager
def _failing(prefix: str = "") -> Iterator[None]:
    """Turn an error of ours into a failed test with one sentence."""
    try:
        yield
    except CapturePlannerError as error:
        raise pytest.fail.Exception(f"{prefix}{error}", pytrace=False) from None


def _command(request: pytest.FixtureRequest, failure: Failure) -> str:
    loaded = request.config.pluginmanager.has_plugin(__name__)
    words = ["pytest", *([] if loaded else ["-p", __name__]), request.node.nodeid]
    return shlex.join([*words, "--conformance-case", failure.case])


def _fail(failures: Sequence[Failure]) -> None:
    if failures:
        pytest.fail("\n\n".join(map(report, failures)), pytrace=False)


def report(failure: Failure) -> str:
    """Return a failure as text: the law, what happened, where, step by step, and the command to reproduce it."""
    field = failure.field + (f", along {failure.axis}" if failure.axis else "")
    parts = {
        "failure": failure.message,
        "role": failure.role.value if failure.role else "",
        "graph": str(failure.entry or ""),
        "batch": failure.batch,
        "field": field,
        "only with garbage in": " and ".join(failure.causes),
        "sizes": "; ".join(failure.notes),
        "comes and goes": failure.frequency,
    }
    lines = [f"{failure.check.value}: violated: {failure.check.law}"]
    lines += [f"  {name}: {text}" for name, text in parts.items() if text]
    if failure.case:
        from capture_planner_conformance.scene import describe_case, loads

        lines += [f"  {number}. {step}" for number, step in enumerate(describe_case(loads(failure.case)), 1)]
    return "\n".join([*lines, *(["reproduce:", f"  {failure.command}"] if failure.command else [])])
