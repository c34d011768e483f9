"""An observation answers as the dispatcher that was observed, for every batch, and never guesses."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines.deployments import emulation_of
from capture_planner.modes import Reason, Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import batches as admissible_batches
from capture_planner.records.batch_space import decode_families, is_admissible
from capture_planner.records.plan import Plan
from capture_planner.testing import arbitrary_plans, batches, plans
from support.examples import at_most
from support.observing import observation_of

ANY_PLAN = plans(max_reqs=16, max_tokens=64, varying=False) | arbitrary_plans(max_tokens=64, varying=False)


@at_most(50, suppress_health_check=[HealthCheck.too_slow])
@given(ANY_PLAN)
def test_observation_of_a_plan_dispatches_as_the_plan(plan: Plan) -> None:
    """Every admissible batch: decodes by requests, and the hardest mixed batch of each number of tokens."""
    observed, dispatcher = emulation_of(observation_of(plan)), Dispatcher(plan)
    for role in plan.planned:
        for batch, _ in admissible_batches(role, plan):
            answer, expected = observed.dispatch(batch), dispatcher.dispatch(batch)
            assert (answer.entry, answer.reason) == (expected.entry, expected.reason), batch


@at_most(30, suppress_health_check=[HealthCheck.too_slow])
@given(ANY_PLAN)
def test_observation_of_a_plan_dispatches_every_mixed_batch(plan: Plan) -> None:
    """Admissible mixed batches of every number of requests and tokens, of decodes and with prompts."""
    observed, dispatcher = emulation_of(observation_of(plan)), Dispatcher(plan)
    limits = plan.limits
    for role in plan.planned:
        if role is Role.DRAFT_DECODE:
            continue
        families = decode_families(role, plan)
        for num_tokens, past_prompt in itertools.product(range(1, limits.max_num_tokens + 1), (True, False)):
            for num_reqs in range(1, min(num_tokens, limits.max_num_reqs) + 1):
                batch = Batch(role=role, num_reqs=num_reqs, num_tokens=num_tokens, past_prompt=past_prompt)
                if not is_admissible(batch, plan, families):
                    continue  # longer than the model's sequences
                answer, expected = observed.dispatch(batch), dispatcher.dispatch(batch)
                assert (answer.entry, answer.reason) == (expected.entry, expected.reason), batch


@at_most(50, suppress_health_check=[HealthCheck.too_slow])
@given(ANY_PLAN, st.data())
def test_observation_answers_truly_or_says_that_it_does_not_know(plan: Plan, data: st.DataObject) -> None:
    """Batches of any kind, inadmissible ones too."""
    observed, dispatcher = emulation_of(observation_of(plan)), Dispatcher(plan)
    batch = data.draw(batches(plan))
    answer, expected = observed.dispatch(batch), dispatcher.dispatch(batch)
    if is_admissible(batch, plan, decode_families(batch.role, plan)):
        assert answer.reason is Reason.UNKNOWN or (answer.entry, answer.reason) == (expected.entry, expected.reason)
    else:
        assert answer.reason is Reason.NOT_ADMISSIBLE
