"""One report of all ranks: each sends its numbers to the first, which adds them to its own report."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import attrs

from capture_planner.analysis.data_parallel import Agreement, Vector, agree
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import Role
from capture_planner.runtime.ledger import RequestResult, Wait
from capture_planner.runtime.ranks.peers import Peers, Plain
from capture_planner.runtime.ranks.record import RankRecord, RankRow, VectorCount
from capture_planner.runtime.serving.agreement import vectors_of
from capture_planner.runtime.session import RunReport, Session

COUNTS = ("requests", "finished", "output_tokens", "with_adapter")
"""Counts of a tally that are sums over the replicas."""

MOST_VECTORS = 200
"""Different vectors of all roles that a report lists."""

Words = Mapping[str, Any]


def with_ranks(report: RunReport, session: Session, dispatcher: Dispatcher, peers: Peers) -> RunReport:
    """Return the report with the rows of all ranks and the requests of all replicas: on the first rank, else as it is.

    :param dispatcher: of the plan as it was captured.
    """
    place = peers.place
    if place.size == 1:
        return report
    words: dict[str, Plain] = {
        "host": place.host,
        "steps": report.counts.steps,
        "idle": sum(step.is_idle for step in session.rank_steps),
        "counts": {name: getattr(report.counts, name) for name in COUNTS},
        "seconds": report.serve_seconds,
        "agreed": [round(step.seconds, 7) for step in session.rank_steps],
        # Tensor-parallel ranks serve the same requests; the first of each replica tells.
        "served": [attrs.asdict(served) for served in report.served] if place.data and not place.tensor else None,
    }
    told = peers.collect("the report", words, interrupted=report.interrupted)
    if place.rank:
        return report
    heard = {rank: cast("Words", each) for rank, each in enumerate(told) if each is not None}
    replicas = [words for words in heard.values() if words["served"] is not None]
    served = [_request(each) for words in replicas for each in words["served"]]
    tally = copy.deepcopy(report.counts)
    for each in served:
        tally.add_request(each)
    # Of many requests only some have rows.
    counts = {name: getattr(report.counts, name) + sum(words["counts"][name] for words in replicas) for name in COUNTS}
    return attrs.evolve(
        report,
        served=(*report.served, *served),
        tally=attrs.evolve(tally, **counts),
        serve_seconds=max(each["seconds"] for each in heard.values()),
        ranks=_record(session, dispatcher, peers, heard),
    )


def _request(fields: dict[str, Any]) -> RequestResult:
    waited = fields["waited_for"]
    return RequestResult(
        **fields | {"tokens": tuple(fields["tokens"]), "waited_for": None if waited is None else Wait(waited)}
    )


def _record(session: Session, dispatcher: Dispatcher, peers: Peers, heard: Mapping[int, Words]) -> RankRecord:
    place, roles = peers.place, tuple(role.role for role in dispatcher.plan.roles)
    counts = Counter(step.numbers for step in session.rank_steps)
    agreed: list[tuple[int, Agreement]] = [
        (steps, agree(dispatcher, vector))
        for numbers, steps in counts.items()
        for vector in vectors_of(roles, numbers).values()
    ]
    # From the last on: of many steps, the first are forgotten.
    steps = min((len(each["agreed"]) for each in heard.values()), default=0)
    times = [[each["agreed"][-step] for each in heard.values()] for step in range(steps, 0, -1)]
    least = [min(each) for each in times]
    rows = []
    for at, (rank, each) in enumerate(heard.items()):
        data, tensor = divmod(rank, place.tensor_size)
        waits = [mine[at] - short for mine, short in zip(times, least, strict=True)]
        eager, larger = _by_others(dispatcher, agreed, data)
        rows.append(
            RankRow(
                rank=rank,
                host=each["host"],
                data=data,
                tensor=tensor,
                steps=each["steps"],
                idle_steps=each["idle"],
                output_tokens=each["counts"]["output_tokens"],
                seconds=each["seconds"],
                waited=sum(waits),
                last=sum(wait == 0.0 for wait in waits),
                eager_by_others=eager,
                larger_by_others=larger,
            )
        )
    vectors = sorted(_vectors(counts, roles), key=lambda each: -each.steps)
    return RankRecord(
        rows=tuple(rows),
        agreements=len(session.rank_steps),
        skews=tuple(max(each) - short for each, short in zip(times, least, strict=True)),
        vectors=tuple(vectors[:MOST_VECTORS]),
        vectors_dropped=max(0, len(vectors) - MOST_VECTORS),
    )


def _by_others(dispatcher: Dispatcher, agreed: Sequence[tuple[int, Agreement]], data: int) -> tuple[int, int]:
    """Return a replica's forwards that ran eager, and those that ran another graph, because of other replicas."""
    eager = larger = 0
    for steps, agreement in agreed:
        submitted = agreement.vector.ranks[data]
        if submitted.batch is None or not submitted.captured:
            continue
        alone = dispatcher.dispatch(submitted.batch).entry
        if alone is not None and agreement.entry is None:
            eager += steps
        elif alone != agreement.entry:
            larger += steps
    return eager, larger


def _vectors(counts: Mapping[tuple[tuple[int, ...], ...], int], roles: Sequence[Role]) -> Iterator[VectorCount]:
    """Yield what was submitted for each role; of steps that differ in other roles only, once."""
    found: Counter[Vector] = Counter()
    for numbers, steps in counts.items():
        for vector in vectors_of(roles, numbers).values():
            if vector.joint() is not None:
                found[vector] += steps
    for vector, steps in found.items():
        yield VectorCount(
            role=vector.role,
            batches=tuple(submitted.batch for submitted in vector.ranks),
            captured=tuple(submitted.captured for submitted in vector.ranks),
            steps=steps,
        )
