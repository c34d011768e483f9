"""Strategies for data-parallel ranks: what each submits, and the vectors that are gathered."""

from __future__ import annotations

import attrs
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from capture_planner.analysis.data_parallel import Submission, Vector
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import decode_families
from capture_planner.records.plan import Plan
from capture_planner.testing.strategies.plans import batches

MAX_RANKS = 16


@st.composite
def submissions(draw: DrawFn, plan: Plan, role: Role, query_len: int | None = None) -> Submission:
    """Return what a rank submits: idle, a decode of ``query_len`` if given, or any batch there can be.

    Now and then the rank has no graphs, or lost a few of the plan's.
    """
    entries, batch = plan.role(role).entries, None
    if query_len is not None:
        num_reqs = draw(st.integers(1, plan.limits.max_num_reqs))
        loras = draw(st.integers(0, 0 if plan.lora is None else plan.lora.max_active + 1))
        batch = Batch.decode(role, num_reqs, query_len, loras)
    elif draw(st.integers(0, 3)):
        batch = draw(batches(plan, role).map(_possible))
    lost = st.frozensets(st.sampled_from(entries), max_size=3) if entries else st.just(frozenset())
    return Submission(
        batch=batch,
        captured=draw(st.integers(0, 15)) < 15,
        missing=draw(lost) if draw(st.integers(0, 7)) == 7 else frozenset(),
    )


def _possible(batch: Batch) -> Batch:
    """Return the batch with counts that a scheduler can send."""
    reqs = max(batch.num_reqs, 1)
    return attrs.evolve(
        batch, num_reqs=reqs, num_tokens=max(batch.num_tokens, reqs), active_loras=max(batch.active_loras, 0)
    )


@st.composite
def vectors(draw: DrawFn, plan: Plan, *, min_ranks: int = 2, max_ranks: int = MAX_RANKS) -> Vector:
    """Return vectors of one of the plan's roles: alike decodes, any batches together, idle ranks."""
    assume(plan.roles)
    role = draw(st.sampled_from(plan.roles)).role
    lengths = [family.query_len for family in decode_families(role, plan)]
    any_rank = submissions(plan, role)
    decodes = submissions(plan, role, draw(st.sampled_from(lengths))) if lengths else any_rank
    kind = draw(st.sampled_from((decodes, decodes | st.just(Submission()), decodes | any_rank, any_rank)))
    return Vector(role=role, ranks=tuple(draw(st.lists(kind, min_size=min_ranks, max_size=max_ranks))))
