"""The report of several ranks: each sends its counts to the first rank, which adds them to its own report."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import attrs

from capture_planner.analysis.data_parallel import Vector
from capture_planner.modes import Role
from capture_planner_runner.ledger.rows import RankRecord, RankRow, RequestResult, VectorCount, Wait
from capture_planner_runner.ledger.session import RunReport, Session
from capture_planner_runner.ranks.peers import Peers, Plain
from capture_planner_runner.serving.steps import vectors_of

ROW = ("steps", "idle_steps", "eager_by_others", "larger_by_others")
"""Counts of a tally in the row of a rank."""

MOST_VECTORS = 200
"""Limit of different vectors in a report."""

RankCounts = Mapping[str, Any]


def with_ranks(report: RunReport, session: Session, peers: Peers) -> RunReport:
    """Return the first rank's report with the rows of all ranks and the requests of all replicas; others unchanged.

    Requests and drafts are summed over the replicas. Forwards and steps are the first rank's, because replicas run them
    together.
    """
    place, counts = peers.place, report.counts
    if place.size == 1:
        return report
    counted: dict[str, Plain] = {
        "host": place.host,
        **{name: getattr(counts, name) for name in ROW},
        "requests": counts.request_counts,
        "mismatched_requests": report.mismatched_requests,
        "seconds": report.serve_seconds,
        "agreed": [round(step.seconds, 7) for step in session.rank_steps],
        # Tensor-parallel ranks serve the same requests: the first of each replica sends them.
        "served": [attrs.asdict(served) for served in report.served] if place.data and not place.tensor else None,
    }
    collected = peers.collect("the report", counted, interrupted=report.interrupted)
    if place.rank:
        return report
    by_rank = {rank: cast("RankCounts", each) for rank, each in enumerate(collected) if each is not None}
    replicas = [each for each in by_rank.values() if each["served"] is not None]
    served = [_request(each) for replica in replicas for each in replica["served"]]
    tally = copy.deepcopy(counts)
    for other in replicas:
        tally.add_request_counts(other["requests"])
    return attrs.evolve(
        report,
        served=(*report.served, *served),
        tally=tally,
        mismatched_requests=report.mismatched_requests + sum(other["mismatched_requests"] for other in replicas),
        serve_seconds=max(each["seconds"] for each in by_rank.values()),
        ranks=_record(report, session, peers, by_rank),
    )


def _request(fields: dict[str, Any]) -> RequestResult:
    waited = fields["waited_for"]
    return RequestResult(
        **fields | {"tokens": tuple(fields["tokens"]), "waited_for": None if waited is None else Wait(waited)}
    )


def _record(report: RunReport, session: Session, peers: Peers, by_rank: Mapping[int, RankCounts]) -> RankRecord:
    place, roles = peers.place, tuple(role.role for role in report.plan.roles)
    counts = Counter(step.numbers for step in session.rank_steps)
    # Aligned at the last step, because ranks forget their first steps in long runs.
    steps = min((len(each["agreed"]) for each in by_rank.values()), default=0)
    times = [[each["agreed"][-step] for each in by_rank.values()] for step in range(steps, 0, -1)]
    least = [min(each) for each in times]
    rows = []
    for at, (rank, each) in enumerate(by_rank.items()):
        data, tensor = divmod(rank, place.tensor_size)
        waits = [mine[at] - short for mine, short in zip(times, least, strict=True)]
        rows.append(
            RankRow(
                rank=rank,
                host=each["host"],
                data=data,
                tensor=tensor,
                **{name: each[name] for name in ROW},
                output_tokens=each["requests"]["output_tokens"],
                seconds=each["seconds"],
                waited=sum(waits),
                last=sum(wait == 0.0 for wait in waits),
            )
        )
    vectors = sorted(_vectors(counts, roles), key=lambda each: -each.steps)
    return RankRecord(
        rows=tuple(rows),
        agreements=report.counts.agreements,
        skews=tuple(max(each) - short for each, short in zip(times, least, strict=True)),
        vectors=tuple(vectors[:MOST_VECTORS]),
        vectors_dropped=max(0, len(vectors) - MOST_VECTORS),
    )


def _vectors(counts: Mapping[tuple[tuple[int, ...], ...], int], roles: Sequence[Role]) -> Iterator[VectorCount]:
    """Yield the vectors of each role, each once, although their steps may differ in other roles."""
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
