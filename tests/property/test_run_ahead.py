"""With a drafter, a step that is launched before the last one is read serves the tokens that it would serve after."""

import functools
from collections import Counter
from collections.abc import Callable

import attrs
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from capture_planner import load_backends
from capture_planner.modes import Chain, GraphMode, Refresh, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.backend import Axis, Fill, MetadataField, PaddingContract
from capture_planner.records.model import DataType, DraftModel, Method, Model, Speculative
from capture_planner.records.spec import Limits, Parallel, Policy, Roles, Sizes, Spec
from capture_planner_conformance import Case as SuiteCase
from capture_planner_conformance import Shape, play
from capture_planner_conformance.scene import Serve
from capture_planner_runner.capture.variants import without_graphs
from capture_planner_runner.execution.updates import Updates
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch.request import drafter_of
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.numerics.verification import RowKeeper
from capture_planner_runner.options import ExecutionPolicy, Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.workload import Request
from support.probe import Probe
from support.runner_conformance import RunnerScene, runner_under_test
from support.runner_conformance.laws import RunnerCheck
from support.runs import CPU, pages_for, planned, requests_for, runnable_specs

pytestmark = pytest.mark.usefixtures("one_thread")
REGISTRY = load_backends()
FULL = (GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL_DECODE_ONLY)


def models(plan, kind="random"):
    """A random target, whose tokens hang on what it attends to as much as on the last one, and a drafter for it."""
    target = load_target(None, plan.model, device=torch.device("cpu"), dtype=torch.float64, seed=3)
    for name, module, attribute in target.weights():
        if "embed_tokens" in name:
            getattr(module, attribute).data.mul_(0.1)
    return target, drafter_of(plan, target, kind, seed=3)


@attrs.frozen
class RunResult:
    """What a run gave: tokens by request, and how many steps were launched before the last one was read."""

    tokens: dict
    ahead: int
    rejected: int
    drafted: dict
    """How many drafts were verified and accepted, by their place."""


def runner_of(plan, target, drafter, observer=None, **options):
    """A runner that verifies on the device unless the options say otherwise."""
    options = Options(**{"drafts_on_device": True} | options)
    pages, grapher = pages_for(plan), RecordedGraphs()
    return Runner(plan, target, drafter, REGISTRY, grapher, pages=pages, options=options, observer=observer)


def serve(runner, requests, answers=None):
    """Serve, and check that every page and every place is free again."""
    serving, first = runner.start(requests, answers=answers), len(runner.session.steps)
    scheduler, ahead, now = serving.scheduler, 0, 0.0
    while not serving.done:
        scheduler.arrive(now, 0.0)
        if not serving.step() and scheduler.next_arrival is not None:
            now = scheduler.next_arrival
        now += 0.01
        ahead += bool(scheduler.states.ahead.any())
    assert scheduler._pool.free == runner.pages.num_pages - 1
    assert len(scheduler._free) == runner.plan.limits.max_num_reqs
    steps = runner.session.steps[first:]
    return RunResult(
        tokens={done.name: done.tokens for done in serving.served},
        ahead=ahead,
        rejected=sum(step.drafted - step.accepted for step in steps),
        drafted=drafts_of(steps),
    )


def drafts_of(steps):
    """What became of the drafts at each place; requests are in other steps where these run ahead."""
    found = Counter()
    for step in steps:
        for place, counts in enumerate(zip(step.drafted_at, step.accepted_at, strict=True)):
            found.update({(place, kind): count for kind, count in enumerate(counts)})
    return dict(found)


def captured(plan, target, drafter, requests, answers=None, **options):
    """Capture and serve, each step launched ahead where it can be."""
    with runner_of(plan, target, drafter, run_ahead=True, **options) as runner:
        runner.capture()
        return serve(runner, requests, answers)


def waiting(plan, target, drafter, requests, **options):
    """Serve eagerly, each step when the last one is read and verified on the host."""
    with runner_of(without_graphs(plan), target, drafter, run_ahead=False, drafts_on_device=False, **options) as runner:
        found = serve(runner, requests)
    assert found.ahead == 0
    return found


def speculative(data):
    """A plan with full graphs and a drafter whose first pass is on the target's rows."""
    spec = replace(data.draw(runnable_specs(speculative=True, max_reqs=3)), roles=Roles())
    model = replace(spec.model, embeddings=False, num_layers=1)
    method = data.draw(st.sampled_from((Method.EAGLE, Method.EAGLE3, Method.MTP)))
    layers = 1 if method is not Method.MTP else data.draw(st.sampled_from((1, max(spec.speculative.num_tokens, 2))))
    drafter = replace(
        spec.speculative,
        method=method,
        model=DraftModel(num_layers=layers),
        parallel_drafting=False,
        varying_decodes=(),
    )
    reqs = data.draw(st.sets(st.integers(1, spec.limits.max_num_reqs), min_size=1))
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=tuple(sorted(reqs)), num_tokens=(8,))
    return replace(spec, model=model, speculative=drafter, mode=data.draw(st.sampled_from(FULL)), sizes=sizes)


def drawn(data, kind):
    """A plan with its models, requests, their tokens without run-ahead, and these after their prompts."""
    spec = speculative(data)
    plan = planned(spec, REGISTRY)
    requests = data.draw(requests_for(spec))
    deployment = (plan, *models(plan, kind))
    plain = waiting(*deployment, requests).tokens
    return deployment, requests, plain, {request.name: request.prompt + plain[request.name] for request in requests}


@settings(max_examples=max(settings.default.max_examples // 2, 3))
@given(data=st.data(), kind=st.sampled_from(("random", "copy", "chance")), poison=st.booleans())
def test_tokens_are_those_of_steps_that_wait(data, kind, poison):
    """Any schedule of drafts, requests that come and end meanwhile by length or stop token, sizes without a graph."""
    deployment, requests, plain, answers = drawn(data, kind)
    found = captured(*deployment, requests, answers, poison=poison)
    assert found.tokens == plain
    event(f"ahead: {found.ahead > 1}, rejected: {found.rejected > 0}")


@settings(max_examples=max(settings.default.max_examples // 3, 2))
@given(data=st.data(), kind=st.sampled_from(("copy", "chance")))
def test_rows_that_are_kept_belong_to_the_places_that_the_device_computed(data, kind):
    """As ``run --check tokens`` compares them: the host knows places of a step ahead only once the last one is read."""
    deployment, requests, _, answers = drawn(data, kind)
    rows = []
    for ahead in (True, False):
        keeper = RowKeeper()
        with runner_of(*deployment, keeper, run_ahead=ahead, drafts_on_device=ahead) as runner:
            runner.capture()
            serve(runner, requests, answers)
        kept = keeper.rows(answers)
        assert kept.absent == ()
        rows.append(kept)
    expected = dict(zip(rows[1].places, rows[1].hidden, strict=True))
    assert {*rows[0].places} == expected.keys()
    for place, hidden in zip(rows[0].places, rows[0].hidden, strict=True):
        torch.testing.assert_close(hidden, expected[place], msg=lambda text, place=place: f"{place}: {text}")


SPEC = Spec(
    model=Model(
        name="tiny",
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        hidden_size=16,
        vocab_size=61,
        max_model_len=64,
        dtype=DataType.FLOAT64,
    ),
    limits=Limits(max_num_reqs=3, max_num_tokens=24),
    mode=GraphMode.FULL_DECODE_ONLY,
    backend="reference",
    speculative=Speculative(method=Method.EAGLE, num_tokens=3, chain=Chain.SINGLE),
    sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=(1, 2, 3), num_tokens=(12,)),
)
REQUESTS = [
    Request(name=f"r{number}", arrival=0.05 * number, prompt=(7, number, 30), max_new_tokens=12) for number in range(5)
]


@functools.cache
def drafting(k):
    """The same with k drafts, and its models."""
    plan = make_plan(replace(SPEC, speculative=replace(SPEC.speculative, num_tokens=k)), CPU, REGISTRY)
    return plan, *models(plan)


@settings(max_examples=max(settings.default.max_examples // 3, 2))
@given(data=st.data(), k=st.sampled_from((1, 3)), seed=st.integers(0, 9))
def test_synthetic_acceptance_is_drawn_for_the_place_where_a_step_begins(data, k, seed):
    """Drafts are then output, so that one that is accepted elsewhere shows."""
    rates = tuple(sorted(data.draw(st.lists(st.floats(0, 1), min_size=k, max_size=k)), reverse=True))
    requests = [attrs.evolve(each, prompt=each.prompt[:9]) for each in data.draw(requests_for(SPEC))]
    options = {"acceptance": rates, "seed": seed}
    found = captured(*drafting(k), requests, **options)
    waited = waiting(*drafting(k), requests, **options)
    assert (found.tokens, found.drafted) == (waited.tokens, waited.drafted)
    event(f"ahead: {found.ahead > 1}, rejected: {found.rejected > 0}")


@attrs.frozen
class Case:
    """A runner that is captured, and what its requests are told without run-ahead."""

    runner: Runner
    plain: dict

    def serve(self):
        """Serve the requests."""
        return serve(self.runner, REQUESTS, {each.name: each.prompt + self.plain[each.name] for each in REQUESTS})


@pytest.fixture(scope="module")
def case():
    """A drafter that is right by chance: some drafts are accepted and some are not, or nothing below would tell."""
    plan = make_plan(SPEC, CPU, REGISTRY)
    target, drafter = models(plan, "chance")
    plain = waiting(plan, target, drafter, REQUESTS).tokens
    with runner_of(plan, target, drafter, run_ahead=True) as runner:
        runner.capture()
        case = Case(runner, plain)
        found = case.serve()
        assert found.tokens == plain
        assert min(found.ahead, found.rejected, sum(step.accepted for step in runner.session.steps)) > 5
        yield case


def _changed(change: Callable) -> Callable:
    original = Updates.correct

    def correct(updates, step, state, outcome):
        original(updates, *change(step, state, outcome))

    return correct


def _less(outcome):
    return attrs.evolve(outcome, rejected=(outcome.rejected - 1).clamp(min=0))


MISTAKES = {
    "nothing goes back": lambda step, state, outcome: (
        step,
        state,
        attrs.evolve(outcome, rejected=torch.zeros_like(outcome.rejected)),
    ),
    "one too few goes back": lambda step, state, outcome: (step, state, _less(outcome)),
    "lengths stay": lambda step, state, outcome: (
        attrs.evolve(step, target=attrs.evolve(step.target, lengths=())),
        state,
        outcome,
    ),
    "slots stay": lambda step, state, outcome: (
        attrs.evolve(step, target=attrs.evolve(step.target, slot_mapping=step.target.slot_mapping.clone())),
        state,
        outcome,
    ),
    "drafts of another place": lambda step, state, outcome: (
        step,
        attrs.evolve(state, proposed=state.proposed.roll(1, 0)),
        outcome,
    ),
    "newest token of another request": lambda step, state, outcome: (
        step,
        state,
        attrs.evolve(outcome, token=outcome.token.roll(1)),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_correction_changes_tokens(case, mistake, monkeypatch):
    """The comparison above can fail: each field that is not corrected shows."""
    monkeypatch.setattr(Updates, "correct", _changed(MISTAKES[mistake]))
    assert case.serve().tokens != case.plain


def test_recurrent_states_go_on_from_what_was_kept(monkeypatch):
    """The conformance suite serves a model with recurrent layers ahead, finds nothing, and finds the mistake."""
    shape = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=48)
    scene = RunnerScene(shape=shape, drafts=2, ahead=True, recurrent=True, num_reqs=2, mode=GraphMode.FULL_DECODE_ONLY)
    suite_case = SuiteCase(scene=scene, steps=(Serve(requests=((5, 9, 0), (3, 7, 0), (4, 6, 2))),))
    assert play(runner_under_test(), suite_case).failure is None
    monkeypatch.setattr(Updates, "correct", _changed(MISTAKES["one too few goes back"]))
    assert play(runner_under_test(), suite_case).failure.check is RunnerCheck.VERIFIED


def test_a_launch_that_breaks_loses_no_token(case, monkeypatch):
    """Verification had written where the next step begins; serving goes on from what the host has read."""
    serving = case.runner.start(REQUESTS)
    serving.scheduler.arrive(1.0, 0.0)
    for _ in range(4):
        serving.step()
    with monkeypatch.context() as patch:
        patch.setattr(case.runner.roles[Role.DRAFT_PREFILL], "run", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            serving.step()
    while serving.step():
        pass
    assert {done.name: done.tokens for done in serving.served} == case.plain


def test_a_step_without_full_graphs_waits(case):
    """Eager attention is prepared with real lengths: such a step is launched when the last one is read."""
    plan = make_plan(replace(SPEC, mode=GraphMode.PIECEWISE), CPU, REGISTRY)
    for variant in (without_graphs(plan), plan):
        found = captured(variant, case.runner.model, case.runner.drafter, REQUESTS)
        assert (found.tokens, found.ahead) == (case.plain, 0)


def policy(spec, backends=REGISTRY, **options):
    """Decide for a spec, as on a GPU."""
    return ExecutionPolicy.of(make_plan(spec, CPU, backends), backends, Options(**options), is_gpu=True)


def test_each_reason_to_wait_is_said():
    """A run that cannot run ahead says why; one that was not asked to, or can, says nothing."""
    assert policy(SPEC).run_ahead
    assert policy(SPEC).behind == ""
    drawn = (1.0,) * SPEC.speculative.num_tokens
    for options, says in (
        ({"debug": True}, "debug"),
        ({"drafts_on_device": False}, "verified on the host"),
        ({"proposals": drawn}, "draft lengths are drawn"),
    ):
        found = policy(SPEC, **options)
        assert not found.run_ahead
        assert says in found.behind
    assert policy(SPEC, run_ahead=False, debug=True).behind == ""
    for changed, says in (
        (replace(SPEC, model=replace(SPEC.model, embeddings=True)), "embeddings"),
        (replace(SPEC, model=replace(SPEC.model, mrope=True)), "mrope_positions"),
        (replace(SPEC, parallel=Parallel(data=2)), "replicas"),
        (replace(SPEC, speculative=replace(SPEC.speculative, parallel_drafting=True)), "verified on the host"),
        (replace(SPEC, speculative=replace(SPEC.speculative, varying_decodes=(Role.TARGET,))), "how many drafts"),
    ):
        assert says in policy(changed).behind
    lists = PaddingContract(
        fields=(MetadataField(name="paged_kv_indices", axis=Axis.PAGE, fill=Fill.CONSTANT, value=0),)
    )
    for probe, says in (
        (Probe(refresh=Refresh.HOST), "target, draft_prefill, draft_decode plans on the host"),
        (Probe(refresh=Refresh.IN_GRAPH, padding=lists), "paged_kv_indices"),
    ):
        assert says in policy(replace(SPEC, backend="probe"), load_backends(probe)).behind
