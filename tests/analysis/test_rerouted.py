"""Batches that run otherwise: exactly those whose mode or padded size differs, by brute force."""

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.analysis.diff import rerouted
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.plan import Plan
from capture_planner.testing import arbitrary_plans, plans
from support import reference

SMALL = plans(max_reqs=12, max_tokens=40) | arbitrary_plans(max_tokens=40)
UNIFORM = SMALL.filter(lambda plan: plan.speculative is None or not plan.speculative.varying_decodes)
"""Of decodes that vary, those of the most tokens are compared, and those of fewer are in the same change."""


def answers(plan: Plan, role, most: int):
    """Return how every admissible batch of a role runs: decodes by requests and query length, mixed ones by tokens.

    Of mixed batches, only those with at most so many requests.
    """
    planned = plan.role(role)
    found = {}
    for batch in reference.admissible(plan, planned):
        decode = reference.is_decode(batch)
        if not decode and batch.num_reqs > most:
            continue
        place = (Kind.DECODE, batch.query_len, batch.num_reqs) if decode else (Kind.MIXED, None, batch.num_tokens)
        entry = reference.dispatch(plan, batch)
        found.setdefault(place, {})[batch.num_reqs, batch.active_loras] = entry and (entry.mode, entry.num_tokens)
    return found


def differ(before, after) -> bool:
    """Say whether batches of one size run otherwise, or may have other numbers of adapters.

    Which numbers of requests are enumerated follows from the graphs, so only those of both count.
    """
    if before is None or after is None or {key[1] for key in before} != {key[1] for key in after}:
        return True
    return any(before[key] != after[key] for key in before.keys() & after.keys())


@st.composite
def pairs(draw):
    """Return two plans: unrelated ones, or one and the same with some graphs less."""
    old = draw(UNIFORM)
    if draw(st.booleans()):
        return old, draw(UNIFORM)
    roles = tuple(
        replace(role, entries=tuple(entry for entry in role.entries if draw(st.booleans()))) for role in old.roles
    )
    return old, replace(old, roles=roles)


@given(pairs())
def test_rerouted_batches_are_those_with_another_mode_or_size(pair):
    """No other batch is named, and none of them is left out."""
    old, new = pair
    changes = list(rerouted(old, new))
    for role in old.planned:
        if role not in new.planned:
            assert not [change for change in changes if change.role is role]
            continue
        most = min(plan.limits.max_num_reqs for plan in pair)
        before, after = (answers(plan, role, most) for plan in pair)
        named = {
            (change.kind, change.query_len, count)
            for change in changes
            if change.role is role
            for first, last in change.ranges
            for count in range(first, last + 1)
        }
        different = {place for place in {**before, **after} if differ(before.get(place), after.get(place))}
        reasons = {place for place in named - different if None in before[place].values()}
        assert different <= named
        assert named - different == reasons  # eager for another reason


@given(SMALL)
def test_nothing_is_rerouted_between_equal_plans(plan):
    """The same plan has no batch that runs otherwise."""
    assert list(rerouted(plan, plan)) == []
