"""Waivers: every admissible batch that no entry serves, with the reason.

A ladder serves all counts up to its last size, so what is waived is always a tail: decodes of more
requests, mixed batches of more tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.role import RoleInProgress
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import DecodeFamily, lora_cases, most_tokens, split_when
from capture_planner.records.plan import Waiver

_WHY = {
    Reason.MODE: "the resolved mode has no graph for them",
    Reason.SIZES: "the size policy ends below them",
    Reason.BACKEND_CAP: "the backend cannot capture that many requests",
    Reason.BUDGET: "their graphs were dropped to meet the budget",
}

_NAMES = {Kind.DECODE: "decodes of {} to {} requests", Kind.MIXED: "mixed batches of {} to {} tokens"}

_OF_MOST_TOKENS = "decodes of {} to {} requests that no graph of mixed batches has the tokens for"
"""Varying decodes: those of few tokens may fit where the largest do not."""


def waivers(working: RoleInProgress) -> tuple[Waiver, ...]:
    """Return the waivers of a role whose ladders are final."""
    tails = list(_decode_tails(working))
    if working.role is not Role.DRAFT_DECODE:
        tails += _mixed_tails(working)
    has_mixed, loras = working.mixed_ladder is not None, lora_cases(working.role, working.spec)[-1]
    return tuple(replace(each, message=_message(each, has_mixed=has_mixed), max_loras=loras) for each in tails)


def _message(tail: Waiver, *, has_mixed: bool) -> str:
    name = _OF_MOST_TOKENS if tail.max_query_len is not None and has_mixed else _NAMES[tail.kind]
    return "; ".join(
        filter(None, (f"{name.format(tail.first, tail.last)} run eager: {_WHY[tail.reason]}", tail.message))
    )


def _decode_tails(working: RoleInProgress) -> Iterator[Waiver]:
    """Yield the decodes that no entry serves, adjacent ranges with the same reason merged; messages are prices."""
    tails = []
    for family in working.families:
        reach, reason, price = _decode_reach(working, family)
        length = {"max_query_len" if family.varies else "query_len": family.query_len}
        tails += [
            Waiver(kind=Kind.DECODE, first=first, last=last, reason=reason, message=price, **length)
            for first, last in family.requests.above(reach).intervals
        ]

    def apart(before: Waiver, after: Waiver) -> bool:
        return replace(before, first=before.last + 1, last=after.last) != after

    by_length = sorted(tails, key=lambda tail: (tail.query_len or tail.max_query_len or 0, tail.first))
    for run in split_when(apart, by_length):
        yield replace(run[0], last=run[-1].last)


def _decode_reach(working: RoleInProgress, family: DecodeFamily) -> tuple[int, Reason, str]:
    """Return the most requests that an entry serves, why none serves more, and the price of that."""
    alike = [ladder for ladder in working.ladders if ladder.query_len == family.query_len]
    serving = [ladder for ladder in alike if ladder.draft_steps in (None, family.draft_steps)]
    mixed, own = working.mixed_ladder, max(serving, key=lambda ladder: ladder.sizes[-1:], default=None)
    reach = own.sizes[-1] if own is not None and own.sizes else 0
    # Graphs of mixed batches serve decodes too; FULL ones hold no more requests than they were captured with.
    if mixed is not None and mixed.sizes:
        tokens = mixed.sizes[-1] // family.query_len
        reach = max(reach, min(tokens, mixed.max_num_reqs) if mixed.mode is GraphMode.FULL else tokens)
    ladder = own or mixed
    reason = Reason.MODE if ladder is None else ladder.cut or Reason.SIZES
    if own is None and mixed is not None and mixed.sizes and reach == mixed.max_num_reqs:
        reason = Reason.BACKEND_CAP
    return reach, reason, "" if ladder is None else ladder.price


def _mixed_tails(working: RoleInProgress) -> Iterator[Waiver]:
    ladder, limits = working.mixed_ladder, working.spec.limits
    last = most_tokens(working.role, working.spec)
    if ladder is None:
        yield Waiver(kind=Kind.MIXED, first=1, last=last, reason=Reason.MODE, message="")
        return
    top = ladder.sizes[-1] if ladder.sizes else 0
    most = ladder.max_num_reqs
    # A batch of few tokens may have more requests than a graph of its size holds.
    if most < min(top, limits.max_num_reqs):
        end = min(top, last)
        yield Waiver(kind=Kind.MIXED, first=most + 1, last=end, reason=Reason.BACKEND_CAP, message="")
    if top < last:
        reason = ladder.cut or Reason.SIZES
        yield Waiver(kind=Kind.MIXED, first=top + 1, last=last, reason=reason, message=ladder.price)
