"""Reports of what data-parallel ranks run, as a plan has it; and the vectors to show of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import attrs

from capture_planner.analysis.data_parallel import Agreement, Submission, Vector, agree, explain_rank
from capture_planner.codec import json_of, plain
from capture_planner.codec.plain import plain_some
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import decode_families, most_tokens
from capture_planner.records.text import counted
from capture_planner.report.writing import Grid, Report, Section, ran

NEVER_RUNS = "never runs; the schedule drafts too few tokens"


@attrs.frozen(kw_only=True)
class RankReport:
    """What each rank runs of one vector, and why."""

    title: str = ""
    """What the vector shows; empty for a vector from a file."""
    agreement: Agreement
    reasons: tuple[str, ...]
    """By rank, in words."""


def rank_report(dispatcher: Dispatcher, vector: Vector, title: str = "") -> RankReport:
    """Return what each rank runs of a vector; raises ``DispatchError`` for a role that is not planned."""
    agreement = agree(dispatcher, vector)
    reasons = tuple(explain_rank(dispatcher, agreement, rank) for rank in range(len(vector.ranks)))
    return RankReport(title=title, agreement=agreement, reasons=reasons)


@json_of(RankReport)
def _json(report: RankReport) -> dict[str, Any]:
    agreement = report.agreement
    ranks = zip(agreement.vector.ranks, agreement.answers, report.reasons, strict=True)
    return ({"title": report.title} if report.title else {}) | {
        "role": plain(agreement.vector.role),
        "mode": agreement.answers[0].dispatch.mode.value,
        **plain_some(agreement, "entry", "reason", "joint", "draft_tokens"),
        "ranks": [
            {
                "idle": submitted.batch is None,
                "captured": submitted.captured,
                "runs": plain(answer.batch),
                **plain_some(answer.dispatch, "padded_tokens", "padded_reqs"),
                "message": reason,
            }
            for submitted, answer, reason in ranks
        ],
    }


def cases_json(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return the cases, or why there are none."""
    return {"cases": plain(list(reports))} | ({} if reports else {"why": NEVER_RUNS})


def cases(dispatcher: Dispatcher, role: Role, num_ranks: int) -> tuple[RankReport, ...]:
    """Return vectors of ``num_ranks`` ranks that a deployment meets; empty where the role never runs a decode."""
    plan = dispatcher.plan
    families = decode_families(role, plan)
    if not families:
        return ()
    lengths = {
        count: family.query_len
        for family in families
        for first, last in family.requests.intervals
        for count in (first, (first + last) // 2, last)
    }
    most = max(lengths)
    # Only a few counts of each range are listed, so half the most need not be one of them.
    middle = min(lengths, key=lambda count: (abs(count - most // 2), count))

    def decode(count: int, active_loras: int = 0) -> Submission:
        return Submission(batch=Batch.decode(role, count, lengths[count], active_loras))

    def prompt(tokens: int) -> Submission:
        return Submission(batch=Batch.mixed(role, 1, min(tokens, most_tokens(role, plan))))

    usual, few = decode(middle), decode(min(lengths))
    others = (usual,) * (num_ranks - 1)
    vectors = [("every rank has the same decodes", (usual, *others)), ("one rank has fewer requests", (few, *others))]
    # Without a schedule all ranks draft the same number of tokens.
    if len({family.query_len for family in families}) > 1:
        last = max(lengths, key=lambda count: (lengths[count] != lengths[middle], -count))
        vectors.append(("the schedule gives one rank another number of draft tokens", (decode(last), *others)))
    # A draft decode never has prompts: they are with the draft prefill.
    if role is not Role.DRAFT_DECODE:
        vectors += [
            ("one rank has a short prompt", (prompt(middle * lengths[middle] + 1), *others)),
            ("one rank has as long a prompt as there can be", (prompt(most_tokens(role, plan)), *others)),
        ]
        if plan.lora is not None and not role.is_drafter:
            adapters = decode(middle, min(plan.lora.max_active, middle))
            vectors.append(("one rank has adapters", (adapters, *others)))
    vectors += [
        ("one rank is idle", (Submission(), *others)),
        ("one rank has no graphs", (attrs.evolve(usual, captured=False), *others)),
        ("every rank is idle", (Submission(),) * num_ranks),
    ]
    return tuple(rank_report(dispatcher, Vector(role=role, ranks=ranks), title) for title, ranks in vectors)


def cases_report(reports: Sequence[RankReport], role: Role) -> Report:
    """Return each case as a table by rank; neighbours that run the same for the same reason share a line."""
    title = f"What data-parallel ranks run: {role}"
    sections = [_case(report, role, number) for number, report in enumerate(reports)]
    if not sections:
        sections.append(Section(name="none", title="", parts=(f"{role}: {NEVER_RUNS}",)))
    return Report(kind="vector of ranks", title=title, sections=tuple(sections))


def _case(report: RankReport, role: Role, number: int) -> Section:
    agreement, ranks = report.agreement, report.agreement.vector.ranks
    runs = "nothing" if agreement.joint is None else agreement.entry or ran(agreement.answers[0].dispatch.mode)
    rows = []
    for _, group in groupby(range(len(ranks)), key=lambda rank: (ranks[rank], report.reasons[rank])):
        first, *others = group
        span = f"{first} to {others[-1]}" if others else str(first)
        rows.append((span, _submits(ranks[first]), _padding(agreement, first), report.reasons[first]))
    grid = Grid.of(("rank", "submits", "padded by", "because"), rows)
    return Section(name=f"case-{number}", title=f"{role}, {report.title} -> {runs}", parts=(grid,))


def _submits(submitted: Submission) -> str:
    batch = submitted.batch
    if batch is None:
        return "idle" if submitted.captured else "idle, no graphs"
    text = f"{counted(batch.num_reqs, 'request')}, {counted(batch.num_tokens, 'token')}"
    if batch.active_loras:
        text += f", {batch.active_loras} LoRA"
    return text if submitted.captured else f"{text}, no graphs"


def _padding(agreement: Agreement, rank: int) -> str:
    answer = agreement.answers[rank].dispatch
    if answer.entry is None:
        return "nothing"
    text = counted(answer.padded_tokens, "token")
    return text if answer.entry.num_reqs is None else f"{text}, {counted(answer.padded_reqs, 'request')}"
