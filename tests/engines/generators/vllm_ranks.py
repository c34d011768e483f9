"""How vLLM's data-parallel ranks agree on a shape, as a function of all ranks' batches.

The rules are those of ``vllm/v1/worker/gpu/dp_utils.py``, and for model runner V1 those of
``vllm/v1/worker/dp_utils.py``. Ranks that agree to skip drafts, and batches split into microbatches, are
not emulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch
from capture_planner_vllm.emulation.drafter import DraftDecode, DraftPrefill
from capture_planner_vllm.emulation.legacy import PaddedManager
from capture_planner_vllm.emulation.releases import has
from capture_planner_vllm.emulation.table import TableManager, answered

_MODES = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)
"""As the ranks of model runner V1 count them: the least wins."""


@attrs.frozen(kw_only=True)
class Agreement:
    """What one collective settled; the drafter uses it again without another."""

    num_tokens: tuple[int, ...]
    """Rows of each rank, padding included: all the same unless eager."""
    uniform: int | None
    """Tokens of every request on every rank, where all are the same uniform decode."""
    eager: bool
    """Whether some rank had no graph before they spoke. False does not say that there is one."""
    num_reqs: tuple[int, ...]
    """For each rank, the most requests on any, without padding; before 0.33 those that its FULL graph pads to."""


def idle(target: TableManager) -> Batch:
    """Return what a rank without work runs beside the others: one decode of the largest width."""
    return Batch.decode(Role.TARGET, 1, target.query_len, target.lora_cases[-1])


def agree(target: TableManager, batches: Sequence[Batch]) -> tuple[tuple[Dispatch, ...], Agreement | None]:
    """Return each rank's answer, and what they agreed on; None where no rank has a token.

    One batch is a single rank, which asks nobody. A rank without work takes part with ``idle``.
    """
    own = tuple(target.dispatch(batch) for batch in batches)
    if len(batches) == 1:
        return own, None
    if all(batch.num_tokens == 0 for batch in batches):
        return tuple(answered(None, batch, Reason.IDLE) for batch in batches), None
    queries = [target.query(batch) for batch in batches]
    uniform = queries[0].uniform
    if any(query.uniform != uniform for query in queries):
        uniform = None
    agreement = Agreement(
        num_tokens=tuple(query.num_tokens for query in queries),
        uniform=uniform,
        eager=any(answer.entry is None for answer in own),
        num_reqs=(max(query.num_reqs for query in queries),) * len(queries),
    )
    if agreement.eager:
        return tuple(
            answered(None, batch, answer.reason or Reason.RANK) for batch, answer in zip(batches, own, strict=True)
        ), agreement
    tokens = max(agreement.num_tokens)
    widest = [query.max_query_len for query in queries if query.max_query_len is not None]
    most = max(widest) if len(widest) == len(queries) else None
    answers, rows, reqs = [], [], []
    for batch, query in zip(batches, queries, strict=True):
        query = attrs.evolve(query, num_tokens=tokens, uniform=uniform, max_query_len=most)
        found = target.find(query)
        answers.append(answered(found, batch, None if found is not None else Reason.RANK, tokens=tokens))
        rows.append(tokens if found is None else found.entry.num_tokens)
        most_reqs = agreement.num_reqs[0]
        if found is not None and found.entry.mode is GraphMode.FULL and not has("ranks-agree-on-real-requests"):
            most_reqs = found.entry.num_reqs or most_reqs
        reqs.append(most_reqs)
    return tuple(answers), attrs.evolve(agreement, num_tokens=tuple(rows), num_reqs=tuple(reqs))


def draft(manager: DraftPrefill | DraftDecode, batches: Sequence[Batch], agreement: Agreement) -> tuple[Dispatch, ...]:
    """Return each rank's answer for a pass of the drafter, after the target's ``batches``."""
    if isinstance(manager, DraftDecode):
        return tuple(manager.at(batch, most) for batch, most in zip(batches, agreement.num_reqs, strict=True))
    if agreement.eager:
        return tuple(answered(None, batch, manager.dispatch(batch).reason or Reason.RANK) for batch in batches)
    return tuple(
        manager.at(batch, tokens, agreement.uniform)
        for batch, tokens in zip(batches, agreement.num_tokens, strict=True)
    )


def legacy_idle(manager: PaddedManager) -> Batch:
    """Return what a rank of model runner V1 without work runs: a decode, without adapters, in every pass."""
    width = manager.query_len
    return Batch(role=manager.role, num_reqs=1, num_tokens=width, query_len=width)


def legacy(manager: PaddedManager, batches: Sequence[Batch]) -> tuple[Dispatch, ...]:
    """Return each rank's answer under model runner V1, whose every pass is agreed upon by itself.

    Ranks take the least of their modes. Where that is a graph, all are padded to the largest; else each
    keeps the padding of the graph that it had found.
    """
    own = [manager.dispatch(batch) for batch in batches]
    if len(batches) == 1:
        return tuple(own)
    rows = [batch.num_tokens + answer.padded_tokens for batch, answer in zip(batches, own, strict=True)]
    found = [GraphMode.NONE if answer.entry is None else answer.entry.mode for answer in own]
    mode = min(found, key=_MODES.index)
    if mode is GraphMode.NONE:
        return tuple(
            answered(None, batch, answer.reason or Reason.RANK, tokens=tokens)
            for batch, answer, tokens in zip(batches, own, rows, strict=True)
        )
    return tuple(manager.padded(batch, max(rows), (mode,)) for batch in batches)
