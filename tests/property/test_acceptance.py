"""Graphs change neither a token nor what becomes of a draft: drafted and accepted, step by step.

Tokens alone stay right even where graphs draft worse, since verification refuses what the target would not say.
"""

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from capture_planner import load_backends
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.records._base import replace
from capture_planner.records.spec import Roles
from capture_planner_runner.capture.variants import without_graphs, without_speculation
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.request import drafter_of
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from support.runs import pages_for, planned, requests_for, runnable_specs

pytestmark = pytest.mark.usefixtures("one_thread")
REGISTRY = load_backends()
FEW = settings(max_examples=max(settings.default.max_examples // 3, 3))


def serve(plan, target, drafter, requests, answers=None, **options):
    """Capture and serve; return tokens by request, and of each step what was drafted and accepted."""
    pages = pages_for(plan)
    graphs = RecordedGraphs()
    with Runner(plan, target, drafter, REGISTRY, graphs, pages=pages, options=Options(**options)) as runner:
        runner.capture()
        tokens = {done.name: done.tokens for done in runner.serve(requests, answers=answers)}
        replays = sum(f.entry is not None for f in runner.session.forwards if f.role is not Role.TARGET)
        return tokens, [(step.drafted_at, step.accepted_at) for step in runner.session.steps], replays


@settings(FEW)
@given(data=st.data(), kind=st.sampled_from(("random", "copy", "chance")), device=st.booleans(), poison=st.booleans())
def test_graphs_accept_what_eager_accepts_with_either_pool(data, kind, device, poison):
    """Any plan with a drafter and any requests; also where drafts are verified on the device."""
    spec = replace(data.draw(runnable_specs(speculative=True, lazy=True)), roles=Roles())
    plan = planned(spec, REGISTRY)
    assume(plan.num_graphs)
    requests = data.draw(requests_for(spec))
    target = load_target(None, plan.model, device=torch.device("cpu"), dtype=torch.float64, seed=3)
    drafter = drafter_of(plan, target, kind, seed=3)
    plain, _, _ = serve(without_speculation(plan, REGISTRY), target, None, requests)
    answers = {request.name: request.prompt + plain[request.name] for request in requests}
    tokens, eager, _ = serve(without_graphs(plan), target, drafter, requests, answers)
    assert tokens == plain
    event("accepts" if any(map(sum, (accepted for _, accepted in eager))) else "accepts nothing")
    for pool in Pool:
        pooled = replace(plan, pool=pool)
        found = serve(pooled, target, drafter, requests, answers, drafts_on_device=device, poison=poison)
        assert found[:2] == (tokens, eager)
        event("drafts from graphs" if found[2] else "drafts eager")


@settings(max_examples=max(settings.default.max_examples // 6, 2))
@given(data=st.data(), kind=st.sampled_from(("random", "chance")), device=st.booleans(), poison=st.booleans())
def test_varying_graphs_say_what_uniform_graphs_and_eager_say(data, kind, device, poison):
    """A drafter proposes as many drafts as it likes: filled up or not, from graphs or not, the tokens are the same."""
    spec = replace(data.draw(runnable_specs(speculative=True)), roles=Roles(), mode=GraphMode.FULL_AND_PIECEWISE)
    k = spec.speculative.num_tokens
    rates = tuple(sorted(data.draw(st.lists(st.floats(0, 1), min_size=k, max_size=k)), reverse=True))
    target = load_target(None, spec.model, device=torch.device("cpu"), dtype=torch.float64, seed=3)
    requests, found, varied = data.draw(requests_for(spec)), [], []
    plain, _, _ = serve(without_speculation(planned(spec, REGISTRY), REGISTRY), target, None, requests)
    answers = {request.name: request.prompt + plain[request.name] for request in requests}
    for roles in ((), (Role.TARGET,), (Role.TARGET, Role.DRAFT_PREFILL)):
        plan = planned(replace(spec, speculative=replace(spec.speculative, varying_decodes=roles)), REGISTRY)
        varied.append(any(entry.max_query_len for role in plan.roles for entry in role.entries))
        drafter = drafter_of(plan, target, kind, seed=3)
        options = {"drafts_on_device": device, "poison": poison, "proposals": rates}
        tokens, accepted, _ = serve(plan, target, drafter, requests, answers, **options)
        eager = serve(without_graphs(plan), target, drafter, requests, answers, proposals=rates)
        assert (tokens, accepted) == eager[:2]
        assert tokens == plain
        found.append(accepted)
    # The same drafts are accepted with a graph of the draft prefill and without.
    assert found[1] == found[2]
    event(f"graphs of varying decodes: {any(varied)}")


@settings(max_examples=max(settings.default.max_examples // 6, 2))
@given(data=st.data(), device=st.booleans(), poison=st.booleans(), seed=st.integers(0, 9))
def test_synthetic_acceptance_is_what_is_drawn_from_graphs_and_eager(data, device, poison, seed):
    """Whatever the target says, on host and device: each request gains what its draws say, and so the same tokens."""
    spec = replace(data.draw(runnable_specs(speculative=True, lazy=True)), roles=Roles())
    plan = planned(spec, REGISTRY)
    assume(plan.num_graphs)
    k = plan.speculative.num_tokens
    rates = tuple(sorted(data.draw(st.lists(st.floats(0, 1), min_size=k, max_size=k)), reverse=True))
    requests = data.draw(requests_for(spec))
    target = load_target(None, plan.model, device=torch.device("cpu"), dtype=torch.float64, seed=3)
    drafter = drafter_of(plan, target, "random", seed=3)
    options = {"acceptance": rates, "seed": seed}
    eager = serve(without_graphs(plan), target, drafter, requests, **options, drafts_on_device=False)
    assert serve(plan, target, drafter, requests, **options, drafts_on_device=device, poison=poison)[:2] == eager[:2]
    for drafted, accepted in eager[1]:
        assert all(0 <= one <= other for one, other in zip(accepted, drafted, strict=True))
        # A place of rate 1 accepts all of its drafts, and one of rate 0 none.
        assert all(a == d for a, d, rate in zip(accepted, drafted, rates, strict=False) if rate == 1)
        assert not any(a for a, rate in zip(accepted, rates, strict=False) if rate == 0)
