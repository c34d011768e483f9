"""Warming up: the shapes that a workload will have are run before, and leave nothing behind."""

import attrs
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from capture_planner import load_backends
from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.spec import Roles
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.request import drafter_of
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from support.runs import pages_for, planned, requests_for, runnable_specs

pytestmark = pytest.mark.usefixtures("one_thread")
REGISTRY = load_backends()


def runner_of(plan, **options):
    """A runner with graphs, a random target and, where the plan has one, a random drafter."""
    target = load_target(None, plan.model, device=torch.device("cpu"), dtype=torch.float64, seed=3)
    drafter = drafter_of(plan, target, "random", seed=3)
    pages = pages_for(plan)
    runner = Runner(plan, target, drafter, REGISTRY, RecordedGraphs(), pages=pages, options=Options(**options))
    runner.capture()
    return runner


def eager_shapes(session):
    """The batches of the target that no FULL graph served."""
    return {
        (forward.num_reqs, forward.num_tokens)
        for forward in session.forwards
        if forward.role is Role.TARGET and (forward.entry is None or forward.entry.num_reqs is None)
    }


@settings(max_examples=max(settings.default.max_examples // 4, 3))
@given(data=st.data(), ahead=st.booleans(), synthetic=st.booleans(), seed=st.integers(0, 9))
def test_every_shape_that_needs_it_is_warmed_up_and_no_token_changes(data, ahead, synthetic, seed):
    """Where lengths do not depend on tokens: without stop tokens, and with no drafter or synthetic acceptance."""
    spec = replace(data.draw(runnable_specs(speculative=synthetic)), roles=Roles())
    plan = planned(spec, REGISTRY)
    requests = [attrs.evolve(each, stop=frozenset()) for each in data.draw(requests_for(spec, most=4))]
    rates = (0.8, 0.5, 0.5, 0.1, 0.0)[: plan.speculative.num_tokens] if synthetic else ()
    options = {"run_ahead": ahead, "drafts_on_device": ahead, "acceptance": rates, "seed": seed}
    with runner_of(plan, **options) as cold:
        expected = [(done.name, done.tokens) for done in cold.serve(requests)]
    with runner_of(plan, **options) as runner:
        ran, drafted = record_of(runner, Role.TARGET), record_of(runner, Role.DRAFT_DECODE)
        warm = runner.warm_up(requests)
        warmed, drafts = set(ran), len(drafted)
        assert [*runner.session.forwards, *runner.session.steps, *runner.session.served] == []
        assert runner.session.tally.steps == 0
        assert [(done.name, done.tokens) for done in runner.serve(requests)] == expected
    assert (warm.ran, warm.reason) == (warm.shapes, "")
    # Kernels outside of graphs are warmed up where graphs serve everything.
    assert warm.ran > 0
    assert (drafts > 0) == any(forward.role is Role.DRAFT_DECODE for forward in runner.session.forwards)
    assert eager_shapes(runner.session) <= warmed
    event(f"warmed up: {min(warm.ran, 3)}")


def record_of(runner, name):
    """The batches of a role that run from now on, as they are run."""
    role, ran = runner.roles.get(name), []
    if role is None:
        return ran
    run = role.run

    def recorded(batch, *arguments, **options):
        ran.append((batch.num_reqs, batch.num_tokens))
        return run(batch, *arguments, **options)

    role.run = recorded
    return ran
