"""What a mutant is, and how it is found: by the same suite and lint that users run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import attrs
import torch

from capture_planner.analysis.lint import Severity, lint
from capture_planner.analysis.lint.core import BugClass
from capture_planner.plugins.backend import Backend, Metadata
from capture_planner.records.plan import Plan
from capture_planner_conformance import DEFAULT, Failure, SearchProfile, SuiteOptions, conform, under_test
from support.runner_conformance import RunnerCheck, runner_under_test


@attrs.frozen(kw_only=True)
class Mutant:
    """One public bug, planted: in a backend, in the runner, its LoRA or sampling, in a plan, or in how ranks agree.

    Exactly one of ``backend``, ``patch``, ``plan``, ``agreement``, ``adapters`` and ``sampling`` is given. Everything
    else of it is healthy.
    """

    name: str
    """Lower-case words with hyphens."""
    threads: tuple[str, ...]
    """Public threads of the bug; none where only a backend's list of what it leaves unchecked names it, or a paper."""
    bug_class: BugClass
    says: str
    """What it does wrong, in a sentence."""
    backend: Callable[[], Backend] | None = None
    """Makes a backend that has the bug."""
    patch: Callable[[], AbstractContextManager[Any]] | None = None
    """While this is entered, the runner (or the planner, or the dispatcher) has the bug."""
    base: Callable[[], Backend] | None = None
    """The healthy backend that a patched runner runs; None: the reference."""
    plan: Callable[[], Plan] | None = None
    """Makes a plan that has the bug."""
    agreement: Callable[[int], str | None] | None = None
    """Has the agreement of ranks checked, with the bug in it, from a seed; returns what was found."""
    law: RunnerCheck = RunnerCheck.AGREED
    """What ``agreement`` checks."""
    adapters: Callable[[int], str | None] | None = None
    """Has LoRA of the runner checked, with the bug in it, from a seed; returns what was found."""
    sampling: Callable[[int], str | None] | None = None
    """Has sampling of the runner checked, with the bug in it, from a seed; returns what was found."""

    @property
    def kind(self) -> str:
        """Where it is planted."""
        kinds = {
            "adapters": self.adapters,
            "backend": self.backend,
            "runner": self.patch,
            "plan": self.plan,
            "ranks": self.agreement,
            "sampling": self.sampling,
        }
        return next(kind for kind, given in kinds.items() if given is not None)


LATE = {
    "accepted-upside-down",
    "adapter-map-stale",
    "adapters-in-order-of-states",
    "buffer-of-the-targets-rows",
    "captured-beyond-the-limits",
    "cleared-by-the-second-graph",
    "constants-of-the-first-capture",
    "each-block-writes",
    "eager-steps-not-counted",
    "eager-without-a-reason",
    "error-stays-on-its-rank",
    "fixed-workspace",
    "fresh-lengths",
    "full-key-of-real-requests",
    "grid-of-batch",
    "grows-workspace",
    "halved-after-a-while",
    "keeps-mask",
    "large-small-large",
    "late-split-lost",
    "layout-of-batch",
    "list-of-first-batch",
    "longest-of-batch",
    "merge-by-request",
    "merge-sized-by-the-first-capture",
    "merges-unwritten-partials",
    "null-adapter-left-out",
    "offsets-by-token",
    "one-rank-skips-capture",
    "one-tile-of-many-requests",
    "one-tile-of-requests",
    "own-adapters-count",
    "own-key-of-short-queries-lost",
    "padded-blocks-run",
    "padded-rows-unwritten",
    "padding-capped-at-twice",
    "padding-has-an-adapter",
    "page-offsets-wrap-around",
    "pages-in-eight-bits",
    "pages-side-by-side",
    "plan-kept-for-a-shape",
    "planned-once-a-chain",
    "prefix-of-the-first-two",
    "probabilities-not-drafted-from",
    "prompt-taken-for-a-decode",
    "queries-scaled-together",
    "query-starts-fall-back",
    "requests-by-the-targets-query",
    "residual-not-normalised",
    "ring-wraps",
    "scale-of-the-head-dimension",
    "scoring-of-first-layer",
    "second-split-lost",
    "shares-staging",
    "sinks-copied-at-capture",
    "sized-by-the-limits",
    "skip-clamped-to-zero",
    "slot-mapping-stale",
    "softcap-not-captured",
    "split-of-first-batch",
    "stale-page-indices",
    "stale-tile-counts",
    "starts-of-the-largest-decode",
    "table-kept-by-extents",
    "varying-taken-for-uniform",
    "weights-replaced",
    "window-of-the-last-query",
    "workspace-born-in-a-capture",
    "zero-filled-offsets",
}
"""Mutants that take the suite most of the time of all: ``tox -e thorough`` and ``tox -e gallery`` search them."""


@attrs.frozen(kw_only=True)
class Detection:
    """How a mutant was found."""

    mutant: Mutant
    by: str
    """The check of the suite, or the code of the lint rule."""
    says: str
    case: str = ""
    """The smallest case, as it is printed; empty for what the lint found."""
    finding: Failure | None = None


def detect(
    mutant: Mutant, *, seed: int = 0, profile: SearchProfile = DEFAULT, minimize: bool = True
) -> Detection | None:
    """Let the suite, or the lint, look for the mutant; None where nothing is found.

    Backends are searched as their authors search them; the runner, with its own checks too.

    ``minimize``: minimize the failing case, and say which garbage it needs.
    """
    if mutant.plan is not None:
        wrong = [found for found in lint(mutant.plan()) if found.rule.severity is not Severity.NOTE]
        return Detection(mutant=mutant, by=wrong[0].rule.code, says=str(wrong[0])) if wrong else None
    if mutant.agreement is not None:
        says = mutant.agreement(seed)
        return Detection(mutant=mutant, by=mutant.law.value, says=says) if says else None
    if mutant.adapters is not None:
        says = mutant.adapters(seed)
        return Detection(mutant=mutant, by="adapters", says=says) if says else None
    if mutant.sampling is not None:
        says = mutant.sampling(seed)
        return Detection(mutant=mutant, by="sampling", says=says) if says else None
    patch = mutant.patch() if mutant.patch is not None else nullcontext()
    with patch:
        brought = mutant.backend or mutant.base
        tested = "reference" if brought is None else brought()
        outcome = conform(
            under_test(tested) if mutant.backend is not None else runner_under_test(tested),
            SuiteOptions(profile=profile, seed=seed, shrink=minimize, blame=minimize, audits=False),
        )
    if outcome.passed:
        return None
    found = outcome.failures[0]
    return Detection(mutant=mutant, by=found.check.value, says=str(found), case=found.case, finding=found)


def with_field(metadata: Metadata, name: str, tensor: torch.Tensor) -> Metadata:
    """Return the metadata with another tensor for one field."""
    return attrs.evolve(metadata, fields={**metadata.fields, name: tensor})


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put ``make(original)`` in the place of an attribute for a while."""
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        yield
