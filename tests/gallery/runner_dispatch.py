"""Runners that send batches to the wrong graph: shape algebra (B), dispatch (C), observability (J)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from capture_planner.analysis.lint.core import BugClass
from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.modes import Reason, Role
from capture_planner.planning.role import RoleInProgress
from capture_planner.records import batch_space
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import Deployment, draft_steps
from capture_planner_runner.execution.attention import RoleAttention
from capture_planner_runner.execution.fields import Extents
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import ForwardTimes, RoleRun
from capture_planner_runner.serving.launching import StepLauncher
from gallery.core import Mutant
from gallery.patching import Patch, patched

DispatchMethod = Callable[[Dispatcher, Batch], Dispatch]


def _other_batch(change: Callable[[Dispatcher, Batch], Batch]) -> Patch:
    """Return a patch with which dispatch answers for another batch than runs."""

    def make(original: DispatchMethod) -> DispatchMethod:
        return lambda dispatcher, batch: original(dispatcher, change(dispatcher, batch))

    return patched((Dispatcher, "dispatch", make))


def _other_answer(change: Callable[[Dispatcher, Batch, Dispatch], Dispatch]) -> Patch:
    """Return a patch with which dispatch gives another answer."""

    def make(original: DispatchMethod) -> DispatchMethod:
        return lambda dispatcher, batch: change(dispatcher, batch, original(dispatcher, batch))

    return patched((Dispatcher, "dispatch", make))


def _other_entry(choose: Callable[[Dispatcher, Batch, list[Entry]], Entry | None]) -> Patch:
    """Return a patch with which dispatch chooses another one of the entries that can serve the batch."""

    def change(dispatcher: Dispatcher, batch: Batch, answer: Dispatch) -> Dispatch:
        if answer.entry is None:
            return answer
        entry = choose(dispatcher, batch, list(_serving(dispatcher, batch)))
        if entry is None:
            return Dispatch(None, reason=Reason.SIZES)
        padded_reqs = max((entry.num_reqs or 0) - batch.num_reqs, 0)
        return Dispatch(entry, entry.num_tokens - batch.num_tokens, padded_reqs)

    return _other_answer(change)


def _entries(dispatcher: Dispatcher, batch: Batch) -> tuple[Entry, ...]:
    return dispatcher.plan.role(batch.role).entries


def _serving(dispatcher: Dispatcher, batch: Batch) -> Iterator[Entry]:
    steps = draft_steps(batch.role, batch.num_reqs, dispatcher.plan.speculative)
    return (entry for entry in _entries(dispatcher, batch) if entry.rejection(batch, steps) is None)


def _cheapest(entries: list[Entry]) -> Entry | None:
    return min(entries, key=lambda entry: entry.cost, default=None)


def _draft_tokens(dispatcher: Dispatcher, batch: Batch) -> int:
    """Return k, as the schedule has it for the batch."""
    speculative = dispatcher.plan.speculative
    return 0 if speculative is None else speculative.draft_tokens(batch.num_reqs)


# B: shape algebra.


def _by_the_targets_formula(dispatcher: Dispatcher, batch: Batch) -> Batch:
    speculative = dispatcher.plan.speculative
    if batch.role is not Role.DRAFT_DECODE or speculative is None:
        return batch
    query_len = 1 + (_draft_tokens(dispatcher, batch) - speculative.num_tokens)
    return attrs.evolve(batch, query_len=query_len)


def _one_step_more(original: Callable[..., None]) -> Callable[..., None]:
    def forward(run: RoleRun, extents: Extents, entry: Entry | None) -> None:
        if entry is not None and entry.draft_steps is not None:
            entry = attrs.evolve(entry, draft_steps=entry.draft_steps + 1)
        original(run, extents, entry)

    return forward


# C: dispatch.


def _nearest_of_any_mode(dispatcher: Dispatcher, batch: Batch, serving: list[Entry]) -> Entry | None:
    return min(serving, key=lambda entry: (entry.num_tokens, entry.cost), default=None)


def _nearest_of_any_tier(dispatcher: Dispatcher, batch: Batch, serving: list[Entry]) -> Entry | None:
    uniform = [e for e in _entries(dispatcher, batch) if e.query_len is not None and e.num_tokens >= batch.num_tokens]
    nearest = min(uniform, key=lambda entry: entry.num_tokens, default=None)
    if nearest is None or nearest in serving:
        return _cheapest(serving)
    return _cheapest([entry for entry in serving if entry.query_len is None])


def _within_twice(dispatcher: Dispatcher, batch: Batch, serving: list[Entry]) -> Entry | None:
    best = _cheapest(serving)
    return best if best is None or best.num_tokens <= 2 * batch.num_tokens else None


def _of_as_many_requests(dispatcher: Dispatcher, batch: Batch, serving: list[Entry]) -> Entry | None:
    return _cheapest([entry for entry in serving if entry.num_reqs in (None, batch.num_reqs)])


def _whatever_adapters(dispatcher: Dispatcher, batch: Batch) -> Batch:
    return attrs.evolve(batch, active_loras=0)


# A: coverage.


def _one_token_less(original: Callable[[Role, Deployment], int]) -> Callable[[Role, Deployment], int]:
    return lambda role, deployment: max(original(role, deployment) - 1, 1)


def _described_as_padded(original: Callable[..., None]) -> Callable[..., None]:
    def describe(attention: RoleAttention, step: ForwardStep) -> None:
        original(attention, step)
        if step.entry is None or step.is_full:
            return
        for name, metadata in attention.metadata.items():
            query = max(metadata.max_query_len, step.entry.num_tokens // metadata.num_reqs)
            attention.metadata[name] = attrs.evolve(metadata, max_query_len=query)

    return describe


# I: resources.


def _cap_of_the_first_group(original: object) -> property:
    return property(lambda role: role.groups[0].support.max_num_reqs)


# J: observability.


def _never_for_drafts(dispatcher: Dispatcher, batch: Batch, serving: list[Entry]) -> Entry | None:
    return None if batch.role.is_drafter else _cheapest(serving)


def _graphs_noted(original: Callable[..., None]) -> Callable[..., None]:
    def note(launcher: StepLauncher, batch: Batch, dispatch: Dispatch, times: ForwardTimes, repeats: int = 1) -> None:
        if dispatch.entry is not None:
            original(launcher, batch, dispatch, times, repeats)

    return note


def _without_reason(dispatcher: Dispatcher, batch: Batch, answer: Dispatch) -> Dispatch:
    return answer if answer.entry is not None else Dispatch(None)


DISPATCH_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="full-step-not-admitted",
        threads=(),
        bug_class=BugClass.A,
        says="Planning, lint and dispatch alike take a batch of max_num_tokens for one that the limits do not admit, "
        "and it runs eager",
        patch=patched((batch_space, "most_tokens", _one_token_less)),
    ),
    Mutant(
        name="padding-in-the-longest-query",
        threads=(),
        bug_class=BugClass.C,
        says="Attention around a PIECEWISE graph is told a longest query of padded tokens",
        patch=patched((RoleAttention, "_describe", _described_as_padded)),
    ),
    Mutant(
        name="targets-formula-for-the-drafter",
        threads=("vllm#48494", "vllm#48329"),
        bug_class=BugClass.B,
        says="The query length of a draft decode is worked out as the target's is, as 1 + (k - K), so that no "
        "graph fits where the schedule lowers k",
        patch=_other_batch(_by_the_targets_formula),
    ),
    Mutant(
        name="chain-one-step-too-long",
        threads=("vllm#48494",),
        bug_class=BugClass.B,
        says="A fused chain is captured with K draft decodes, though the first draft is the draft prefill's",
        patch=patched((RoleRun, "_forward", _one_step_more)),
    ),
    Mutant(
        name="full-shadowed-by-piecewise",
        threads=("vllm#53407",),
        bug_class=BugClass.C,
        says="The captured size that is nearest decides, so that a PIECEWISE graph hides a compatible FULL "
        "graph which is a little larger",
        patch=_other_entry(_nearest_of_any_mode),
    ),
    Mutant(
        name="tiers-shadow-each-other",
        threads=("vllm#56136",),
        bug_class=BugClass.C,
        says="With dynamic K the nearest uniform size decides, and where it belongs to another query length "
        "the batch falls back to what is not uniform",
        patch=_other_entry(_nearest_of_any_tier),
    ),
    Mutant(
        name="padding-capped-at-twice",
        threads=("sglang#31487", "sglang#40253"),
        bug_class=BugClass.C,
        says="A graph of more than twice the batch's tokens is refused, also where it is small and cheap",
        patch=_other_entry(_within_twice),
    ),
    Mutant(
        name="full-key-of-real-requests",
        threads=("vllm#36165",),
        bug_class=BugClass.C,
        says="The key of a FULL graph has padded requests at capture and real ones at dispatch, so that only "
        "batches without padding find it",
        patch=_other_entry(_of_as_many_requests),
    ),
    Mutant(
        name="adapters-not-in-the-key",
        threads=("vllm#32005",),
        bug_class=BugClass.C,
        says="Dispatch does not look at adapters, and replays a graph without them for a batch that has some",
        patch=_other_batch(_whatever_adapters),
    ),
    Mutant(
        name="cap-of-the-first-group",
        threads=("vllm-ascend#8585",),
        bug_class=BugClass.I,
        says="Of several attention groups the first one decides how many requests a graph may have",
        patch=patched((RoleInProgress, "cap", _cap_of_the_first_group)),
    ),
    Mutant(
        name="draft-graphs-never-dispatched",
        threads=("vllm#47460",),
        bug_class=BugClass.J,
        says="The drafter's graphs are captured, and every batch of it runs eager",
        patch=_other_entry(_never_for_drafts),
    ),
    Mutant(
        name="eager-without-a-reason",
        threads=("vllm#47460", "vllm#36165"),
        bug_class=BugClass.J,
        says="A batch for which there is no graph runs eager, and nothing says why",
        patch=_other_answer(_without_reason),
    ),
    Mutant(
        name="eager-steps-not-counted",
        threads=("vllm#47460",),
        bug_class=BugClass.J,
        says="Steps that run from a graph are written down, and those that run eager are not",
        patch=patched((StepLauncher, "_note", _graphs_noted)),
    ),
)
