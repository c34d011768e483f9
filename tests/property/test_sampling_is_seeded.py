"""Sampled tokens follow from the requests and the seed: from graphs and eager, whatever shares a batch or is padded."""

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from capture_planner import load_backends
from capture_planner_runner.capture.variants import without_graphs
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.request import drafter_of, model_of
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from support.runner_conformance.sampled import notes_of_drafts
from support.runs import pages_for, planned, requests_for, runnable_specs

pytestmark = pytest.mark.usefixtures("one_thread")
REGISTRY = load_backends()
FEW = settings(max_examples=max(settings.default.max_examples // 3, 3))
OPTIONS = st.builds(
    Options,
    temperature=st.sampled_from((0.05, 0.7, 1.5)),
    top_p=st.sampled_from((1.0, 0.8)),
    seed=st.integers(0, (1 << 64) - 1),
    poison=st.booleans(),
    debug=st.booleans(),
    run_ahead=st.booleans(),
    drafts_on_device=st.booleans(),
)


def verifies_all(speculative, limits):
    """Say whether each decode verifies all its drafts, whatever else is in its batch."""
    slots = speculative.extra_slots
    most = limits.max_num_reqs * (1 + speculative.num_tokens + slots) + slots
    return not (speculative.schedule or speculative.varying_decodes) and limits.max_num_tokens >= most


@FEW
@given(data=st.data(), options=OPTIONS, seed=st.integers(0, 100))
def test_equal_seeds_have_equal_tokens_from_graphs_and_eager_in_a_batch_and_alone(data, options, seed):
    """Where how many drafts are verified does not depend on the batch, nothing does."""
    spec = data.draw(runnable_specs())
    plan = planned(spec, REGISTRY)
    requests = data.draw(requests_for(spec))
    model = model_of(plan, None, device=torch.device("cpu"), seed=seed)
    drafter = drafter_of(plan, model, "random", seed=seed)

    def serve(plan, options, *batches):
        with Runner(plan, model, drafter, REGISTRY, RecordedGraphs(), pages=pages_for(plan), options=options) as runner:
            runner.capture()
            tokens = {done.name: done.tokens for batch in batches for done in runner.serve(batch)}
            return tokens, runner.session.tally

    tokens, tally = serve(plan, options, requests)
    plain = Options(temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    with notes_of_drafts() as verified:
        eager, of_eager = serve(without_graphs(plan), plain, requests)
    assert tokens == eager
    assert len(verified) == of_eager.drafted_tokens
    if plan.speculative is None or verifies_all(plan.speculative, plan.limits):
        alone, _ = serve(without_graphs(plan), plain, *([request] for request in requests))
        assert tokens == alone
    event(f"drafter: {drafter is not None}, drafts accepted: {tally.accepted_tokens > 0}")
