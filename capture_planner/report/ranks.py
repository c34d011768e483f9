"""What data-parallel ranks run, as tables and as plain data; and the vectors to show of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from capture_planner.analysis.data_parallel import Agreement, Submission, Vector, agree, explain_rank
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import decode_families
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner.report.data import batch_data
from capture_planner.report.tables import entry_data, mode_text, table_of

NEVER_RUNS = "never runs; the schedule drafts too few tokens"


@attrs.frozen
class Case:
    """A vector that is worth a look, and what it shows."""

    title: str
    vector: Vector


def cases(plan: Plan, role: Role, num_ranks: int) -> tuple[Case, ...]:
    """Return vectors of ``num_ranks`` ranks that a deployment of this plan meets.

    None where the schedule never sends a decode of the role.
    """
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
    middle = min(lengths, key=lambda count: (abs(count - most // 2), count))

    def decode(count: int, active_loras: int = 0) -> Submission:
        return Submission(batch=Batch.decode(role, count, lengths[count], active_loras))

    def prompt(tokens: int) -> Submission:
        limited = min(tokens, plan.limits.max_num_tokens)
        return Submission(batch=Batch.mixed(role, 1, limited))

    usual, few = decode(middle), decode(min(lengths))
    others = (usual,) * (num_ranks - 1)
    made = [
        ("every rank has the same decodes", (usual, *others)),
        ("one rank has fewer requests", (few, *others)),
    ]
    if len({family.query_len for family in families}) > 1:
        last = max(lengths, key=lambda count: (lengths[count] != lengths[middle], -count))
        made.append(("the schedule gives one rank another number of draft tokens", (decode(last), *others)))
    if role is not Role.DRAFT_DECODE:
        made += [
            ("one rank has a short prompt", (prompt(middle * lengths[middle] + 1), *others)),
            ("one rank has as long a prompt as there can be", (prompt(plan.limits.max_num_tokens), *others)),
        ]
        if plan.lora is not None and not role.is_drafter:
            adapters = decode(middle, min(plan.lora.max_active, middle))
            made.append(("one rank has adapters", (adapters, *others)))
    made += [
        ("one rank is idle", (Submission(), *others)),
        ("one rank has no graphs", (attrs.evolve(usual, captured=False), *others)),
        ("every rank is idle", (Submission(),) * num_ranks),
    ]
    return tuple(Case(title, Vector(role=role, ranks=ranks)) for title, ranks in made)


def agreement_data(dispatcher: Dispatcher, agreement: Agreement) -> dict[str, Any]:
    """Return what every rank runs as plain data."""
    joint = agreement.joint
    return {
        "role": agreement.vector.role,
        "mode": agreement.answers[0].dispatch.mode.value,
        "entry": entry_data(agreement.entry),
        "reason": agreement.reason,
        "joint": None if joint is None else batch_data(joint),
        "draft_tokens": agreement.draft_tokens,
        "ranks": [
            {
                "idle": submitted.batch is None,
                "captured": submitted.captured,
                "runs": None if answer.batch is None else batch_data(answer.batch),
                "padded_tokens": answer.dispatch.padded_tokens,
                "padded_reqs": answer.dispatch.padded_reqs,
                "says": explain_rank(dispatcher, agreement, rank),
            }
            for rank, (submitted, answer) in enumerate(
                zip(agreement.vector.ranks, agreement.answers, strict=True)
            )
        ],
    }


def cases_data(dispatcher: Dispatcher, shown: Sequence[Case]) -> dict[str, Any]:
    """Return each case with what every rank runs; where there is none, ``why``."""
    if not shown:
        return {"cases": [], "why": NEVER_RUNS}
    return {
        "cases": [
            {"title": case.title} | agreement_data(dispatcher, agree(dispatcher, case.vector))
            for case in shown
        ]
    }


def cases_table(dispatcher: Dispatcher, shown: Sequence[Case], role: Role) -> RenderableType:
    """Each case as a table by rank; ranks in a row that run the same for the same reason share a line."""
    if not shown:
        return Text(f"{role}: {NEVER_RUNS}")
    parts: list[RenderableType] = []
    for case in shown:
        agreement = agree(dispatcher, case.vector)
        mode = agreement.answers[0].dispatch.mode
        runs: Text = Text("nothing") if agreement.joint is None else mode_text(mode)
        if agreement.entry is not None:
            runs = Text(str(agreement.entry), style=runs.style)
        table = table_of("rank", "submits", "padded by", "because")
        for first, last in _alike(dispatcher, agreement):
            table.add_row(
                str(first) if first == last else f"{first} to {last}",
                _submits(case.vector.ranks[first]),
                _padding(agreement, first),
                explain_rank(dispatcher, agreement, first),
            )
        if parts:
            parts.append(Text(""))
        parts += [Text.assemble(f"{role}, {case.title} -> ", runs), Padding(table, (0, 0, 0, 2))]
    return Group(*parts)


def _alike(dispatcher: Dispatcher, agreement: Agreement) -> list[tuple[int, int]]:
    ranks = agreement.vector.ranks
    found: list[tuple[int, int]] = []
    for rank, submitted in enumerate(ranks):
        same = found and (submitted, explain_rank(dispatcher, agreement, rank)) == (
            ranks[found[-1][0]],
            explain_rank(dispatcher, agreement, found[-1][0]),
        )
        if same:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


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
