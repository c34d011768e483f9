"""Rules about what a person wrote: a schedule that says less or more than it seems to, and rules that are ignored."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator

from capture_planner.analysis.coverage import Coverage
from capture_planner.analysis.lint.core import RULES, Diagnostic, Severity, note
from capture_planner.modes import Role
from capture_planner.records.text import spans


@note(
    "CP017",
    "vllm#32374",
    "give these batch sizes a range of their own, or let the range before end after them",
    at="speculative.schedule",
)
def schedule_gap(coverage: Coverage) -> Iterator[Diagnostic]:
    """A schedule has no range for some batch sizes, which draft as many tokens as the range before them says.

    vLLM 0.33 fills gaps and the batches after the last range in the same way (`build_dynamic_sd_schedule_lookup`).
    """
    most = coverage.plan.limits.max_num_reqs
    ranges = coverage.plan.speculative.ranges if coverage.plan.speculative else ()
    for index, (before, after) in enumerate(itertools.pairwise((*ranges, (most + 1, most + 1, 0)))):
        if before[1] + 1 < after[0] and before[1] < most:
            gap = spans([(before[1] + 1, min(after[0] - 1, most))], "request")
            message = f"no range of the schedule has {gap}, which draft {before[2]} as the range before them"
            yield Diagnostic(message, Role.TARGET, ("speculative", "schedule", index))


@note(
    "CP018",
    "vllm#32374",
    "end the range at max_num_reqs, or raise limits.max_num_reqs if such batches should run",
    at="speculative.schedule",
)
def schedule_beyond_max_num_reqs(coverage: Coverage) -> Iterator[Diagnostic]:
    """A range of a schedule has batch sizes that the limits do not admit."""
    most = coverage.plan.limits.max_num_reqs
    for index, (first, last, _) in enumerate(coverage.plan.speculative.ranges if coverage.plan.speculative else ()):
        if last > most:
            beyond = spans([(max(first, most + 1), last)], "request")
            message = f"the schedule has {beyond}, but max_num_reqs is {most}"
            yield Diagnostic(message, Role.TARGET, ("speculative", "schedule", index))


@note("CP053", "", "remove the code", at="ignore")
def unused_ignore(coverage: Coverage) -> Iterator[Diagnostic]:
    """`ignore` has a code that leaves out nothing: its rule finds nothing, is an error, or does not exist."""
    for index, code in enumerate(coverage.plan.ignore):
        rule = RULES.get(code)
        if rule is None:
            near = difflib.get_close_matches(code, RULES, n=1)
            message = f"no rule is called {code}" + (f"; did you mean {near[0]}?" if near else "")
        elif rule.severity is Severity.ERROR:
            message = f"{code} ({rule.name}) is an error, and errors are not ignored"
        elif rule.check is unused_ignore or any(rule.check(coverage)):
            continue
        else:
            message = f"{code} ({rule.name}) is ignored, and finds nothing"
        yield Diagnostic(message, path=("ignore", index))
