"""Check law 8, ranks agree, of any function that decides for data-parallel ranks.

The checks know the law and not the function: they call it as each rank would, and compare its answers with a
scan over all entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import attrs
import hypothesis
from hypothesis import strategies as st

from capture_planner.analysis.data_parallel import Agreement, Vector
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.planning import planner
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Lora, Spec
from capture_planner.testing.strategies.machines import FakeBackend
from capture_planner_conformance.failure import Violation
from capture_planner_conformance.suite import search_settings
from support.reference import dispatch as cheapest
from support.reference import longest_of
from support.runner_conformance.laws import RunnerCheck
from support.strategies.ranks import vectors as any_vectors

Agree = Callable[[Dispatcher, Vector], Agreement]
"""A function that decides for all ranks, such as ``analysis.data_parallel.agree``."""

MOST_REQS, MOST_TOKENS = 12, 64
"""Limits of a rank in the plans of the check."""


def check_agreement(agree: Agree, seed: int, vectors: int = 300) -> str | None:
    """Check ``agree`` with so many random vectors; return what is wrong with the smallest that fails.

    The same seed draws the same vectors.
    """

    @hypothesis.seed(seed)
    @search_settings(vectors)
    @hypothesis.given(st.data())
    def hold(data: st.DataObject) -> None:
        plan = data.draw(st.sampled_from(plans()))
        vector = data.draw(any_vectors(plan))
        order = data.draw(st.permutations(range(len(vector.ranks))))
        for message in disagreements(agree, plan, vector, tuple(order)):
            raise RunnerCheck.AGREED.violation(f"{message} ({shown(vector)})")

    try:
        hold()
    except Violation as violation:
        return violation.failure.message
    return None


@cache
def plans() -> tuple[Plan, ...]:
    """Return plans with and without drafts, of one K and of two, with and without adapters."""
    support = dict.fromkeys(Role, Support(level=GraphSupport.ALWAYS, reason="always"))
    backend = FakeBackend(name="b", supports=support, refreshes=Refresh.IN_GRAPH)
    registry = Registry([RegisteredBackend(backend=backend, distribution="b", version="1")])
    machine = Environment(name="cpu", device=Device(kind=DeviceKind.CPU, name="cpu", memory=1 << 34))
    plain = Spec(
        model=Model(name="m", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=512),
        limits=Limits(max_num_reqs=MOST_REQS, max_num_tokens=MOST_TOKENS),
        backend="b",
    )
    drafted = Speculative(method=Method.EAGLE3, num_tokens=3)
    scheduled = replace(drafted, schedule=((1, 4, 3), (5, MOST_REQS, 2)))
    varying = replace(drafted, varying_decodes=(Role.TARGET, Role.DRAFT_PREFILL))
    return tuple(
        planner.plan(replace(plain, mode=mode, speculative=speculative, lora=lora), machine, registry)
        for speculative, lora, mode in itertools.product(
            (None, drafted, scheduled, varying),
            (None, Lora(max_active=4, specialize=True)),
            (GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL_DECODE_ONLY),
        )
    )


def shown(vector: Vector) -> str:
    ranks = []
    for submitted in vector.ranks:
        batch = submitted.batch
        text = "idle"
        if batch is not None:
            each = batch.uniform_query_len
            text = f"{batch.num_reqs} x {each}" if each else f"{batch.num_reqs} requests, {batch.num_tokens} tokens"
            text += f" of up to {batch.max_query_len}" if batch.max_query_len else ""
            text += f", {batch.active_loras} LoRA" if batch.active_loras else ""
        if not submitted.captured:
            text += ", no graphs"
        elif submitted.missing:
            text += f", {len(submitted.missing)} graphs lost"
        ranks.append(text)
    return f"{vector.role}: {' | '.join(ranks)}"


def disagreements(agree: Agree, plan: Plan, vector: Vector, order: tuple[int, ...]) -> Iterator[str]:
    """Yield each way in which a vector breaks law 8; ``order`` is a permutation of its ranks."""
    agreement = agree(Dispatcher(plan), vector)
    if agree(Dispatcher(plan), vector) != agreement:
        yield "a rank that decides alone finds another answer"
    answers = agreement.answers
    entries = {answer.dispatch.entry for answer in answers}
    if len(entries) > 1:
        yield f"ranks diverge: {' and '.join(sorted(map(str, entries)))}"
    if len({answer.dispatch.reason for answer in answers}) > 1:
        yield "ranks have different reasons"
    working = [submitted.batch for submitted in vector.ranks if submitted.batch is not None]
    for rank, (submitted, answer) in enumerate(zip(vector.ranks, answers, strict=True)):
        entry, batch = answer.dispatch.entry, answer.batch
        if (batch is None) != (not working):
            yield f"rank {rank} runs {'nothing while others work' if working else 'though none has work'}"
        elif submitted.batch is not None and batch != submitted.batch:
            yield f"rank {rank} runs another batch than its own"
        elif batch is not None and entry is not None and not _holds(entry, batch):
            yield f"rank {rank}: {entry} has no room for {batch.num_reqs} requests, {batch.num_tokens} tokens"
        if entry is not None and any(other.lacks(entry) for other in vector.ranks):
            yield f"rank {rank} replays {entry}, which another rank has not captured"
    if working:
        best = _best(plan, vector, working)
        if entries != {best}:
            yield f"every rank can run {best}, and the choice is {answers[0].dispatch.entry}"
    permuted = attrs.evolve(vector, ranks=tuple(vector.ranks[rank] for rank in order))
    if agree(Dispatcher(plan), permuted).answers != tuple(answers[rank] for rank in order):
        yield "in another order, ranks have other answers"


def _holds(entry: Entry, batch: Batch) -> bool:
    """Say whether an entry has room on both axes, and the batch the length that a uniform one needs."""
    return (
        batch.num_tokens <= entry.num_tokens
        and (entry.num_reqs is None or batch.num_reqs <= entry.num_reqs)
        and entry.query_len in (None, batch.uniform_query_len)
        and (entry.max_query_len is None or 0 < longest_of(batch) <= entry.max_query_len)
    )


def _best(plan: Plan, vector: Vector, working: list[Batch]) -> Entry | None:
    """Return the cheapest entry that every rank has captured and that has room for each, by a scan."""
    lengths = {batch.uniform_query_len for batch in working}
    longest = [longest_of(batch) for batch in working]
    largest = Batch(
        role=vector.role,
        num_reqs=max(batch.num_reqs for batch in working),
        num_tokens=max(batch.num_tokens for batch in working),
        query_len=lengths.pop() if len(lengths) == 1 else None,
        past_prompt=all(batch.past_prompt for batch in working),
        active_loras=0 if vector.role.is_drafter else max(batch.active_loras for batch in working),
        max_query_len=max(longest) if all(longest) else None,
    )
    held = tuple(
        replace(role, entries=tuple(e for e in role.entries if not any(s.lacks(e) for s in vector.ranks)))
        if role.role is vector.role
        else role
        for role in plan.roles
    )
    return cheapest(replace(plan, roles=held), largest)
