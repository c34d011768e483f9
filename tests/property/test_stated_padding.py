"""What a decision says of the worst padding is what the entries of the plan pad, by brute force over all counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given

from capture_planner import load_plan
from capture_planner.records._base import replace
from capture_planner.records.batch_space import decode_families, mixed_tokens
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.testing import plans

LOCKED = sorted((Path(__file__).parents[2] / "plans" / "locked").glob("*.yaml"))
STATED = re.compile(
    r"(?P<mode>\w+) (?:decode, query length (?P<query>\d+)(?:, chain of (?P<chain>\d+))?|mixed): .*?"
    r"worst padding (?:[\d.]+% becomes )?(?P<worst>[\d.]+%)"
)


def worst(sizes: Iterable[int], counts: Iterable[int], step: int) -> str:
    """Return the most that a count is padded by, in the next of the sizes."""
    ordered = sorted(set(sizes))
    ratios = [
        next(size for size in ordered if size >= count) / (-(-count // step) * step)
        for count in counts
        if count <= ordered[-1]
    ]
    return f"{max(ratios) - 1:.1%}"


def stated(role: RolePlan) -> dict[tuple[str, str | None, str | None], str]:
    """Return the worst padding that decisions say last, by mode, query length and chain."""
    found = [STATED.match(decision.message) for decision in role.decisions]
    return {(each["mode"], each["query"], each["chain"]): each["worst"] for each in found if each}


def check(plan: Plan) -> int:
    """Compare what is said with the entries; return how many statements there are."""
    number = 0
    for role in plan.roles:
        for (mode, query, chain), says in stated(role).items():
            entries = [entry for entry in role.entries if entry.mode.value == mode and entry.max_query_len is None]
            if query is None:
                sizes = [entry.num_tokens for entry in entries if entry.query_len is None]
                domain = mixed_tokens(role.role, plan)
            else:
                alike = [e for e in entries if e.query_len == int(query) and e.draft_steps == (chain and int(chain))]
                sizes = [entry.num_reqs or 0 for entry in alike]
                domain = next(
                    family.requests
                    for family in decode_families(role.role, plan)
                    if family.query_len == int(query) and (chain is None or family.draft_steps == int(chain))
                )
            if not sizes:  # The budget dropped the list, as a waiver says.
                continue
            number += 1
            counts = [count for first, last in domain.intervals for count in range(first, last + 1)]
            assert says == worst(sizes, counts, domain.step), (role.role, mode, query, chain)
    return number


@given(plans(max_reqs=64, max_tokens=256))
def test_what_is_said_of_the_worst_padding_is_so(plan: Plan) -> None:
    """Of each ladder of a plan, also where a budget left sizes out."""
    check(plan)


@pytest.mark.parametrize("path", LOCKED[:6], ids=lambda path: path.stem)
def test_locked_plans_say_it_too(path: Path) -> None:
    """Each has ladders of which it is said."""
    assert check(load_plan(path))


def test_a_size_less_is_seen() -> None:
    """Without each second graph the padding is more than what is said."""
    plan = load_plan(LOCKED[0])
    roles = tuple(replace(role, entries=role.entries[::2]) for role in plan.roles)
    with pytest.raises(AssertionError):
        check(replace(plan, roles=roles))
