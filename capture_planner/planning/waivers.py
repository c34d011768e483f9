"""Waivers: every admissible batch that no entry serves, with the reason.

A ladder serves all counts up to its last size, so what is waived is always a tail: decodes of more
requests, mixed batches of more tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder
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
    tails = _decode_tails(working)
    if working.role is not Role.DRAFT_DECODE:
        tails += _mixed_tails(working)
    loras = lora_cases(working.role, working.spec)[-1]
    return tuple(
        Waiver(
            kind=kind,
            query_len=None if varies else query_len,
            max_query_len=query_len if varies else None,
            first=first,
            last=last,
            max_loras=loras,
            reason=reason,
            message="; ".join(filter(None, (f"{name.format(first, last)} run eager: {_WHY[reason]}", price))),
        )
        for kind, query_len, varies, first, last, reason, price in tails
        for name in (_OF_MOST_TOKENS if varies and working.mixed_ladder is not None else _NAMES[kind],)
    )


Tail = tuple[Kind, int | None, bool, int, int, Reason, str]
"""Kind, query length, whether it varies up to that, first and last extent, reason, and its price in words."""


def _decode_tails(working: RoleInProgress) -> list[Tail]:
    """Return the decodes that no entry serves, adjacent ranges with the same reason merged."""
    tails: list[Tail] = []
    for family in working.families:
        reach, reason, price = _decode_reach(working, family)
        for first, last in family.requests.above(reach).intervals:
            tails.append((Kind.DECODE, family.query_len, family.varies, first, last, reason, price))

    def apart(before: Tail, after: Tail) -> bool:
        return (*before[1:3], before[4] + 1, *before[5:]) != (*after[1:4], *after[5:])

    runs = split_when(apart, sorted(tails, key=lambda tail: (tail[1] or 0, tail[3])))
    return [(*run[0][:4], run[-1][4], *run[0][5:]) for run in runs]


def _decode_reach(working: RoleInProgress, family: DecodeFamily) -> tuple[int, Reason, str]:
    """Return the most requests that an entry serves, why none serves more, and the price of that."""
    mixed, own = working.mixed_ladder, _ladder_of(working, family)
    reach = own.sizes[-1] if own is not None and own.sizes else 0
    if mixed is not None and mixed.sizes:
        tokens = mixed.sizes[-1] // family.query_len
        reach = max(reach, min(tokens, mixed.max_num_reqs) if mixed.mode is GraphMode.FULL else tokens)
    ladder = own or mixed
    reason = Reason.MODE if ladder is None else ladder.cut or Reason.SIZES
    if own is None and mixed is not None and mixed.sizes and reach == mixed.max_num_reqs:
        reason = Reason.BACKEND_CAP
    return reach, reason, "" if ladder is None else ladder.price


def _ladder_of(working: RoleInProgress, family: DecodeFamily) -> Ladder | None:
    alike = [ladder for ladder in working.ladders if ladder.query_len == family.query_len]
    serving = [ladder for ladder in alike if ladder.draft_steps in (None, family.draft_steps)]
    return max(serving, key=lambda ladder: ladder.sizes[-1:], default=None)


def _mixed_tails(working: RoleInProgress) -> Iterator[Tail]:
    ladder, limits = working.mixed_ladder, working.spec.limits
    last = most_tokens(working.role, working.spec)
    if ladder is None:
        yield Kind.MIXED, None, False, 1, last, Reason.MODE, ""
        return
    top = ladder.sizes[-1] if ladder.sizes else 0
    most = ladder.max_num_reqs
    if most < min(top, limits.max_num_reqs):
        yield Kind.MIXED, None, False, most + 1, min(top, last), Reason.BACKEND_CAP, ""
    if top < last:
        yield Kind.MIXED, None, False, top + 1, last, ladder.cut or Reason.SIZES, ladder.price
