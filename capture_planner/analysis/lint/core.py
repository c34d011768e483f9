"""What a rule is, what it finds, and how rules are run."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import attrs

from capture_planner.analysis.coverage import Coverage, coverage
from capture_planner.modes import Role
from capture_planner.records.plan import Plan

REPOSITORIES = {
    "vllm": "vllm-project/vllm",
    "vllm-ascend": "vllm-project/vllm-ascend",
    "sglang": "sgl-project/sglang",
    "mini-sglang": "sgl-project/mini-sglang",
    "TRT-LLM": "NVIDIA/TensorRT-LLM",
    "flashinfer": "flashinfer-ai/flashinfer",
    "lmdeploy": "InternLM/lmdeploy",
    "tokenspeed": "lightseekorg/tokenspeed",
}
"""Where the threads are, by the name that stands before their number."""


def link(thread: str) -> str:
    """Return the address of a thread such as ``vllm#54933``, or ``owner/repository#1``.

    Raises ``KeyError`` for a project that is neither known nor written whole.
    """
    project, number = thread.split("#")
    return f"https://github.com/{project if '/' in project else REPOSITORIES[project]}/issues/{number}"


class Severity(enum.Enum):
    """How bad a finding is. Errors and warnings are findings in the sense of exit code 2."""

    ERROR = "error"
    """The plan would compute wrongly, or does not hold what it message."""
    WARNING = "warning"
    """Batches run eager, or memory and time go to waste."""
    NOTE = "note"
    """Worth knowing."""


class BugClass(enum.Enum):
    """The class of public bug that a rule comes from."""

    A = "coverage"
    B = "shape algebra"
    C = "dispatch"
    D = "padding"
    E = "capacity"
    F = "baked state"
    G = "mode resolution"
    H = "rank agreement"
    I = "resources"  # noqa: E741
    J = "observability"


@attrs.frozen(kw_only=True)
class Diagnostic:
    """What a rule message about one place of a plan."""

    message: str
    role: Role | None = None
    path: tuple[str | int, ...] = ()
    """Where in the plan."""


@attrs.frozen(kw_only=True)
class BaseRule:
    """What every lint rule has, whatever it looks at: a stable code, and the bugs it comes from."""

    code: str
    name: str
    severity: Severity
    bug_class: BugClass
    threads: tuple[str, ...]
    """Public threads in which the bug was seen."""
    check: Callable[..., Iterator[Any]]

    @property
    def explanation(self) -> str:
        """What the rule means, for people: the docstring of its check."""
        return inspect.cleandoc(self.check.__doc__ or "")


R = TypeVar("R", bound=BaseRule)
CheckT = TypeVar("CheckT", bound=Callable[..., Iterator[Any]])


def register_in(rules: dict[str, R], kind: type[R], code: str, **facts: Any) -> Callable[[CheckT], CheckT]:
    """Return a decorator that enters a check in ``rules`` under its code; its name is the function's."""

    def register(check: CheckT) -> CheckT:
        assert code not in rules, code
        rules[code] = kind(code=code, name=check.__name__.replace("_", "-"), check=check, **facts)
        return check

    return register


@attrs.frozen(kw_only=True)
class Rule(BaseRule):
    """A rule about plans."""

    remedy: str
    """What to do about it."""
    spec_path: tuple[str, ...]
    """Where in a spec to look when a plan made of it has this finding."""
    check: Callable[[Coverage], Iterator[Diagnostic]]


@attrs.frozen(kw_only=True)
class Finding:
    """A rule with what it found."""

    rule: Rule
    diagnostic: Diagnostic

    def __str__(self) -> str:
        return f"{self.rule.code} {self.rule.name}: {self.text}"

    @property
    def text(self) -> str:
        """What was found, and what to do about it."""
        return f"{self.diagnostic.message}; {self.rule.remedy}"


RULES: dict[str, Rule] = {}
"""All rules by code, in the order of their codes."""


def rule(
    code: str,
    severity: Severity,
    bug_class: BugClass,
    *threads: str,
    remedy: str,
    spec_path: tuple[str, ...] = (),
) -> Callable[[CheckT], CheckT]:
    """Register a check of plans under a stable code."""
    facts = {"severity": severity, "bug_class": bug_class, "threads": threads}
    return register_in(RULES, Rule, code, remedy=remedy, spec_path=spec_path, **facts)


def lint(plan: Plan) -> tuple[Finding, ...]:
    """Return every finding of every rule about ``plan``, by code."""
    walked = coverage(plan)
    return tuple(
        Finding(rule=RULES[code], diagnostic=diagnostic)
        for code in sorted(RULES)
        for diagnostic in RULES[code].check(walked)
    )
