"""The promise of a plan that is proposed: what its steps and today's are expected to take, by role and shape."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import attrs

from capture_planner.engines.tuning.judgement import SPREAD, Pricing
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.measured import PassCost
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import DecodeFamily, kind_of
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.promise import MAX_PROMISED, ExpectedSteps, Promise, PromisedSteps


def promise_of(before: Pricing, after: Pricing, steps: Mapping[Batch, int]) -> Promise:
    """Return what a plan promises, by costs that were measured on the engine itself.

    :param before: the time of today's steps.
    :param after: that of the plan's.
    :param steps: how often each batch of the target ran, in the traffic that both sides are judged on; not empty.
    """
    return Promise(
        costs=before.costs.profile.source,
        steps=sum(steps.values()),
        before=_expected(before, steps),
        after=_expected(after, steps),
    )


def promising(plan: Plan, before: Pricing, after: Pricing, steps: Mapping[Batch, int]) -> Plan:
    """Return the plan with its promise; the arguments are those of ``promise_of``."""
    return replace(plan, promise=promise_of(before, after, steps))


@attrs.define
class _Tally:
    """The steps of one row so far."""

    first: int
    last: int
    steps: int = 0
    milliseconds: float = 0.0

    def add(self, extent: int, milliseconds: float, steps: int) -> None:
        self.first, self.last = min(self.first, extent), max(self.last, extent)
        self.steps += steps
        self.milliseconds += milliseconds * steps


_Row = tuple[Role, int | None, GraphMode, int, Entry | None]
"""Role, query length (None: mixed), mode, the octave of an eager batch's extent, and the graph."""


def _expected(pricing: Pricing, steps: Mapping[Batch, int]) -> ExpectedSteps:
    families = {role: pricing.deployment.families(role) for role in pricing.deployment.modes}
    rows: dict[_Row, _Tally] = {}
    total: Counter[Role] = Counter()
    spent, overheads = 0.0, Counter[tuple[GraphMode, int | None]]()
    for batch, count in steps.items():
        step = pricing.step(batch)
        spent += step.milliseconds * count
        for each in step.passes:
            role = each.batch.role
            key, extent = _key(each, families[role])
            # Shares are of the steps in which the role runs.
            total[role] += count
            overheads[key[2], key[1]] += 0 if role.is_drafter else count
            # The target's rows have whole steps, as that is what an observation can measure; a drafter's have passes.
            taken = each.milliseconds if role.is_drafter else step.milliseconds
            rows.setdefault(key, _Tally(extent, extent)).add(extent, taken, count)
    mean, number = spent / sum(steps.values()), sum(steps.values())
    shares = {key: count / number for key, count in overheads.items()}
    return ExpectedSteps(
        mean_step_ms=_rounded(mean),
        error_ms=_rounded(_error(pricing.costs.profile, mean, shares)),
        rows=tuple(_merged(_promised(key, row, total[key[0]]) for key, row in sorted(rows.items(), key=_place))),
    )


def _key(cost: PassCost, families: tuple[DecodeFamily, ...]) -> tuple[_Row, int]:
    """Return the row of a pass, and its extent: requests of a decode, tokens of a mixed batch."""
    batch = cost.batch
    kind = kind_of(batch, families)
    extent = batch.extent(kind)
    query_len = batch.decode_query_len if kind is Kind.DECODE else None
    if cost.entry is None:
        # Eager times grow with the size: one row for all of them would mean nothing.
        return (batch.role, query_len, GraphMode.NONE, extent.bit_length(), None), extent
    return (batch.role, query_len, cost.entry.mode, 0, cost.entry), extent


def _place(item: tuple[_Row, _Tally]) -> tuple[object, ...]:
    (role, query_len, mode, *_), row = item
    return list(Role).index(role), query_len or 0, row.first, row.last, mode.value


def _promised(key: _Row, row: _Tally, total: int) -> PromisedSteps:
    role, query_len, mode, *_ = key
    return PromisedSteps(
        role=role,
        query_len=query_len,
        first=row.first,
        last=row.last,
        mode=mode,
        milliseconds=_rounded(row.milliseconds / row.steps),
        share=min(1.0, _rounded(row.steps / total)),
    )


def _merged(rows: Iterable[PromisedSteps]) -> list[PromisedSteps]:
    """Return no more rows than a promise may have: neighbours of one kind and mode become one, the rarest first."""
    left = list(rows)
    while len(left) > MAX_PROMISED:
        near = [
            (left[at].share + left[at + 1].share, at) for at in range(len(left) - 1) if _alike(left[at], left[at + 1])
        ]
        # Nothing left to merge: leave out what hardly ever runs.
        if not near:
            rare = sorted(left, key=lambda row: row.share)[: len(left) - MAX_PROMISED]
            return [row for row in left if all(row is not each for each in rare)]
        _, at = min(near)
        left[at : at + 2] = [_one(left[at], left[at + 1])]
    return left


def _alike(a: PromisedSteps, b: PromisedSteps) -> bool:
    return (a.role, a.query_len, a.mode) == (b.role, b.query_len, b.mode)


def _one(a: PromisedSteps, b: PromisedSteps) -> PromisedSteps:
    share = a.share + b.share
    weight = a.share / share if share else 0.5
    return replace(
        a,
        first=min(a.first, b.first),
        last=max(a.last, b.last),
        milliseconds=_rounded(a.milliseconds * weight + b.milliseconds * (1 - weight)),
        share=min(1.0, _rounded(share)),
    )


def _error(profile: Profile, mean: float, shares: Mapping[tuple[GraphMode, int | None], float]) -> float:
    """Return the standard error of a mean step: from the spread of the passes' times, and that of the overheads.

    :param shares: the share of the steps whose target runs in each mode, by mode and query length.
    """
    spread = SPREAD if profile.spread is None else profile.spread
    overheads = (each.error * shares.get(each.key, 0.0) for each in profile.overheads)
    return math.hypot(spread * mean, *overheads)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
