"""Schedulers that take a batch for what it is not: classes B and C, where engines make the mistake, before dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from capture_planner.analysis.lint.core import BugClass
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner_runner.serving import steps
from capture_planner_runner.serving.inputs import DraftRows
from capture_planner_runner.serving.scheduler import Scheduler
from capture_planner_runner.serving.states import AdmittedRequest, RequestStates, ScheduledBatch
from gallery.core import Mutant
from gallery.patching import patched

Rows = Sequence[tuple[AdmittedRequest, int, int]]
MakesBatch = Callable[[Role, ScheduledBatch, RequestStates, DraftRows | None], Batch]


def _by_shape(original: Callable[..., ScheduledBatch]) -> Callable[..., ScheduledBatch]:
    def scheduled(scheduler: Scheduler, rows: Rows, prompts: int) -> ScheduledBatch:
        lengths = {count for _, count, _ in rows}
        is_decode = lengths == {1 + scheduler._k(len(rows))}
        return original(scheduler, rows, 0 if is_decode else prompts)

    return scheduled


def _by_first_row(original: Callable[..., ScheduledBatch]) -> Callable[..., ScheduledBatch]:
    def scheduled(scheduler: Scheduler, rows: Rows, prompts: int) -> ScheduledBatch:
        first, _, _ = rows[0]
        index = first.state_index
        is_past = scheduler.states.computed[index] >= scheduler.states.prompt[index]
        return original(scheduler, rows, 0 if is_past else prompts)

    return scheduled


def _rounded(original: MakesBatch) -> MakesBatch:
    def batch(role: Role, scheduled: ScheduledBatch, states: RequestStates, draft: DraftRows | None) -> Batch:
        made, query_len = original(role, scheduled, states, draft), 1 + scheduled.draft_tokens
        is_draft = role is Role.DRAFT_DECODE  # of one token each: engines round verifications
        if is_draft or not made.past_prompt or -(-made.num_tokens // query_len) != made.num_reqs:
            return made
        return attrs.evolve(made, query_len=query_len, num_tokens=made.num_reqs * query_len)

    return batch


def _mean_length(original: MakesBatch) -> MakesBatch:
    def batch(role: Role, scheduled: ScheduledBatch, states: RequestStates, draft: DraftRows | None) -> Batch:
        made = original(role, scheduled, states, draft)
        length, rest = divmod(made.num_tokens, made.num_reqs)
        return made if rest else attrs.evolve(made, query_len=length)

    return batch


def _longest_of_the_first(original: MakesBatch) -> MakesBatch:
    def batch(role: Role, scheduled: ScheduledBatch, states: RequestStates, draft: DraftRows | None) -> Batch:
        made = original(role, scheduled, states, draft)
        first = int(scheduled.counts[0])
        return made if made.max_query_len is None else attrs.evolve(made, max_query_len=first)

    return batch


CLASSIFICATION_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="prompt-taken-for-a-decode",
        threads=("vllm#53051", "vllm#49918", "vllm#28207"),
        bug_class=BugClass.B,
        says="Prompts of exactly 1 + K tokens have the shape of a decode, and the scheduler's step says that they "
        "are one",
        patch=patched((Scheduler, "_scheduled", _by_shape)),
    ),
    Mutant(
        name="prompts-behind-a-decode",
        threads=("vllm#53051",),
        bug_class=BugClass.B,
        says="A batch counts as past its prompts if its first request is",
        patch=patched((Scheduler, "_scheduled", _by_first_row)),
    ),
    Mutant(
        name="requests-from-rounded-tokens",
        threads=("vllm#28207",),
        bug_class=BugClass.B,
        says="A batch whose last request is short is taken for a uniform decode, because its tokens, rounded "
        "up to a multiple of 1 + K, give its number of requests",
        patch=patched((steps, "batch_of", _rounded)),
    ),
    Mutant(
        name="query-length-of-the-mean",
        threads=("vllm#28207",),
        bug_class=BugClass.B,
        says="A batch is taken for uniform where its tokens divide by its requests",
        patch=patched((steps, "batch_of", _mean_length)),
    ),
    Mutant(
        name="longest-of-the-first-request",
        threads=("vllm#52988",),
        bug_class=BugClass.B,
        says="The tokens of the first request stand for those of the longest in a decode whose requests differ",
        patch=patched((steps, "batch_of", _longest_of_the_first)),
    ),
)
