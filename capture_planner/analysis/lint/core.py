"""Lint rules: what they are, how they are registered, and how they run."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import attrs

from capture_planner.analysis.coverage import Cell, Coverage, coverage
from capture_planner.modes import Role
from capture_planner.records.plan import Plan, RolePlan

REPOSITORIES = {
    "vllm": "vllm-project/vllm",
    "vllm-ascend": "vllm-project/vllm-ascend",
    "vllm-omni": "vllm-project/vllm-omni",
    "sglang": "sgl-project/sglang",
    "mini-sglang": "sgl-project/mini-sglang",
    "TRT-LLM": "NVIDIA/TensorRT-LLM",
    "aiter": "ROCm/aiter",
    "flashinfer": "flashinfer-ai/flashinfer",
    "lmdeploy": "InternLM/lmdeploy",
    "tokenspeed": "lightseekorg/tokenspeed",
}
"""Repositories by the name before the # of a thread."""


def link(thread: str) -> str:
    """Return the address of ``vllm#54933`` or ``owner/name#1``; raises ``KeyError`` for unknown projects."""
    project, number = thread.split("#")
    return f"https://github.com/{project if '/' in project else REPOSITORIES[project]}/issues/{number}"


class Severity(enum.Enum):
    """How bad a finding is. Errors and warnings are findings in the sense of exit code 2."""

    ERROR = "error"
    """The plan would compute wrong results, or contradicts itself."""
    WARNING = "warning"
    """Batches run eager, or memory and start-up time are wasted."""
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
    K = "aliasing"
    L = "coupled rows"
    M = "shared pools"
    P = "capture sessions"
    Q = "padding resources"
    R = "graph keys"
    S = "sampling"


@attrs.frozen
class Diagnostic:
    """What a rule reports about one place of a plan."""

    message: str
    role: Role | None = None
    path: tuple[str | int, ...] = ()
    """Where in the plan."""


def of_role(coverage: Coverage, subject: RolePlan | Cell, message: str, *path: str | int) -> Diagnostic:
    """Return a diagnostic about the role of ``subject``; ``path`` leads on from that role in the plan."""
    role = subject.role
    return Diagnostic(f"{role}: {message}", role, ("roles", coverage.plan.planned.index(role), *path))


@attrs.frozen(kw_only=True)
class BaseRule:
    """What rules about plans and rules about engines share: a stable code, and the bugs behind it."""

    code: str
    name: str
    severity: Severity
    bug_class: BugClass
    threads: tuple[str, ...]
    """Public threads that report the bug."""
    remedy: str = ""
    """Remedy, as an imperative; empty where it depends on the finding."""
    check: Callable[..., Iterator[Any]]

    @property
    def explanation(self) -> str:
        """What the rule means: the docstring of its check."""
        return inspect.cleandoc(self.check.__doc__ or "")


R = TypeVar("R", bound=BaseRule)
CheckT = TypeVar("CheckT", bound=Callable[..., Iterator[Any]])


def register_in(rules: dict[str, R], kind: type[R], code: str, **facts: Any) -> Callable[[CheckT], CheckT]:
    """Return a decorator that adds a check to ``rules`` under its code, named like its function."""

    def register(check: CheckT) -> CheckT:
        assert code not in rules, code
        rules[code] = kind(code=code, name=check.__name__.replace("_", "-"), check=check, **facts)
        return check

    return register


@attrs.frozen(kw_only=True)
class Rule(BaseRule):
    """A rule about plans."""

    spec_path: tuple[str, ...]
    """The place in a spec to look at when its plan has this finding."""
    check: Callable[[Coverage], Iterator[Diagnostic]]


@attrs.frozen(kw_only=True)
class Finding:
    """A rule and what it reports."""

    rule: Rule
    diagnostic: Diagnostic

    def __str__(self) -> str:
        return f"{self.rule.code} {self.rule.name}: {self.text}"

    @property
    def severity(self) -> Severity:
        return self.rule.severity

    @property
    def text(self) -> str:
        """The message, and how to fix it."""
        return f"{self.diagnostic.message}; {self.rule.remedy}"


RULES: dict[str, Rule] = {}
"""All rules by code, in the order of their codes."""


_CLASSES = {"0": "A", "1": "B", "2": "C", "3": "G", "4": "I", "5": "J"}
"""The bug class of a rule by the second digit of its code."""


def rule(severity: Severity, code: str, threads: str, remedy: str, *, at: str = "") -> Callable[[CheckT], CheckT]:
    """Register a check of plans under a stable code, which gives its bug class.

    ``threads`` is their names, separated by spaces; ``at`` the ``spec_path``, as in ``speculative.schedule``. The other
    arguments are fields of ``Rule``.
    """
    bug_class = BugClass[_CLASSES[code[3]]]
    facts = {"severity": severity, "bug_class": bug_class, "threads": tuple(threads.split()), "remedy": remedy}
    return register_in(RULES, Rule, code, spec_path=tuple(at.split(".") if at else ()), **facts)


error, warning, note = (partial(rule, severity) for severity in Severity)


def lint(plan: Plan, ignore: Iterable[str] = ()) -> tuple[Finding, ...]:
    """Return the findings about ``plan``, by code; rules that it or ``ignore`` names are left out, errors never."""
    walked, codes = coverage(plan), {*plan.ignore, *ignore}
    # An error means wrong results or a contradiction, which no list may hide.
    rules = (each for each in RULES.values() if each.severity is Severity.ERROR or each.code not in codes)
    return tuple(Finding(rule=each, diagnostic=found) for each in rules for found in each.check(walked))
