"""Why a batch gets its entry, and why it does not get a nearer one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.modes import GraphMode, Reason
from capture_planner.records._base import grouped
from capture_planner.records.batch import Batch, Entry, Rejection
from capture_planner.records.batch_space import draft_steps
from capture_planner.records.model import Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted

_WHY_NOT: dict[Rejection, Callable[[Entry, Batch], str]] = {
    Rejection.TOKENS: lambda e, b: f"has room for {counted(e.num_tokens, 'token')}, the batch has {b.num_tokens}",
    Rejection.REQUESTS: lambda e, b: f"has room for {counted(e.num_reqs or 0, 'request')}, the batch has {b.num_reqs}",
    Rejection.QUERY_LEN: lambda e, b: f"is for {_decodes(e)}, the batch decodes {b.decode_query_len}",
    Rejection.NOT_UNIFORM: lambda e, b: (
        f"is for {_decodes(e)} each, the batch is mixed"
        if b.decode_query_len is None
        else f"is for {_decodes(e)} each, the requests of the batch differ"
    ),
    Rejection.NOT_DECODE: lambda e, b: (
        f"is for {_decodes(e)} each, and how many the longest request of the batch has is not known"
    ),
    Rejection.PROMPT: lambda e, b: "is for decodes, but a request still has prompt tokens",
    Rejection.LORAS: lambda e, b: f"serves up to {e.active_loras} active LoRA, the batch has {b.active_loras}",
    Rejection.DRAFT_STEPS: lambda e, b: (
        f"runs a chain of {counted(e.draft_steps or 0, 'draft step')}, this batch drafts another number"
    ),
}


def _decodes(entry: Entry) -> str:
    """Return what a decode graph is for: ``decodes of 4 tokens``, ``decodes of up to 4 tokens``."""
    return f"decodes of {'' if entry.max_query_len is None else 'up to '}{counted(entry.tokens_each or 0, 'token')}"


WHY_NONE = {
    Reason.MODE: "the mode of the role has no graph for it",
    Reason.SIZES: "no size that is planned for it is large enough",
    Reason.BACKEND_CAP: "the backend cannot capture that many requests",
    Reason.BUDGET: "its graph was dropped to meet the budget",
    Reason.MEMORY: "its graph ran out of memory when it was captured",
    Reason.LAZY: "its graph is captured on first use, and is not there yet",
    Reason.RANK: "a data-parallel rank has no graph for it, so none uses one",
    Reason.IDLE: "no rank has work",
    Reason.NOT_ADMISSIBLE: "the limits or the schedule do not admit such a batch",
    Reason.SHADOWED: "a captured graph could serve it, but the engine's dispatcher does not find it",
    Reason.UNCOVERED: "it has neither a graph nor a waiver: run check",
    Reason.UNKNOWN: "the engine was not asked about such a batch",
}
"""Each reason in words; "it" is the batch."""


@attrs.frozen(kw_only=True)
class NearMiss:
    """A nearby entry that cannot serve the batch, and why."""

    entry: Entry
    rejection: Rejection
    message: str


@attrs.frozen(kw_only=True)
class Explanation:
    """The answer for a batch, and nearby entries that cannot serve it."""

    batch: Batch
    answer: Dispatch
    message: str
    near_misses: tuple[NearMiss, ...]

    def __str__(self) -> str:
        lines = [f"{self.batch.role}: {self.answer.entry or 'no graph'}: {self.message}"]
        return "\n".join(lines + [f"  not {miss.entry}: it {miss.message}" for miss in self.near_misses])

    def _repr_html_(self) -> str:
        """Return the text as a notebook shows it."""
        from html import escape  # every start would import a table of all entities

        return f"<pre>{escape(str(self))}</pre>"


def explain(plan: Plan | Dispatcher, batch: Batch) -> Explanation:
    """Explain which entry serves a batch, or why none does, and what the nearest other entries lack.

    :param plan: the plan, or its dispatcher where many batches are explained: it keeps its tables.
    :raises DispatchError: the plan does not have the batch's role.
    """
    dispatcher = Dispatcher(plan) if isinstance(plan, Plan) else plan
    answer, role = dispatcher.dispatch(batch), dispatcher.plan.role(batch.role)
    explained = explanation(batch, answer, role.entries, dispatcher.plan.speculative)
    if answer.entry not in role.lazy:
        return explained
    # Until then the cheapest graph captured at start serves it; drafters have no adapters.
    asked = attrs.evolve(batch, active_loras=0) if batch.role.is_drafter else batch
    steps = draft_steps(batch.role, batch.num_reqs, dispatcher.plan.speculative)
    able = (entry for entry in role.at_start if entry.rejection(asked, steps) is None)
    until = min(able, key=lambda entry: entry.cost, default=None)
    before = "the batch runs eager" if until is None else f"the batch runs on {until}"
    return attrs.evolve(explained, message=f"{explained.message}; captured on first use, before that {before}")


def explanation(
    batch: Batch, answer: Dispatch, entries: Iterable[Entry], speculative: Speculative | None
) -> Explanation:
    """Explain an answer, of any dispatcher, with the graphs of the batch's role."""
    steps = draft_steps(batch.role, batch.num_reqs, speculative)
    return Explanation(
        batch=batch,
        answer=answer,
        message=_message(batch, answer, steps or 1),
        near_misses=tuple(_nearer(entries, batch, answer, steps)),
    )


def _message(batch: Batch, answer: Dispatch, steps: int) -> str:
    entry = answer.entry
    if entry is None:
        assert answer.reason is not None
        detail = f" ({answer.waiver.message})" if answer.waiver is not None else ""
        return f"runs eager, unpadded: {WHY_NONE[answer.reason]}{detail}"
    if entry.mode is GraphMode.PIECEWISE:
        kind = "the nearest piecewise graph; attention runs outside it on the real requests"
    elif entry.tokens_each is not None:
        kind = f"the nearest full graph for {_decodes(entry)}" + (" each" if entry.max_query_len is not None else "")
        if steps > 1:
            chain = "holds all" if entry.draft_steps is not None else "is replayed for each of"
            kind += f", which {chain} {steps} draft steps"
    else:
        kind = "the nearest full graph for any batch"
    if not (answer.padded_tokens or answer.padded_reqs):
        return f"{kind}, an exact fit"
    requests = f" and {counted(answer.padded_reqs, 'request')}" if entry.num_reqs is not None else ""
    return f"{kind}, padded by {counted(answer.padded_tokens, 'token')}{requests}"


def _nearer(entries: Iterable[Entry], batch: Batch, answer: Dispatch, steps: int | None) -> list[NearMiss]:
    """Return nearby entries that reject the batch, nearest first.

    For each kind of graph (mode, query length or the most, chain): the largest that is too small, the smallest that
    is not, and all up to the size of the answer.
    """
    # Drafters take no adapters, so those of the requests reject no graph.
    if batch.role.is_drafter:
        batch = attrs.evolve(batch, active_loras=0)
    ascending = sorted(entries, key=lambda e: (e.num_tokens, e.active_loras))
    kinds = grouped(ascending, lambda e: (e.mode, e.query_len, e.max_query_len, e.draft_steps))
    near: list[Entry] = []
    for alike in kinds.values():
        smaller = [e for e in alike if e.num_tokens < batch.num_tokens][-1:]
        larger = [e for e in alike if e.num_tokens >= batch.num_tokens]
        # Each graph that would pad less than the answer needs a reason why it is not taken.
        limit = answer.entry.num_tokens if answer.entry is not None else 0
        near += [*smaller, *larger[:1], *(e for e in larger if e.num_tokens <= limit)]
    misses = []
    for entry in dict.fromkeys(near):
        rejection = entry.rejection(batch, steps)
        if rejection is not None:
            misses.append(NearMiss(entry=entry, rejection=rejection, message=_WHY_NOT[rejection](entry, batch)))
    return sorted(misses, key=lambda r: abs(r.entry.num_tokens - batch.num_tokens))[:12]
