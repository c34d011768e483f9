"""Profiles of engines: an observation's figures, none of them changed, and what it does not have is said."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.errors import CapturePlannerError
from capture_planner.measuring.observed import observed_profile
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.observation import BatchCount, EagerCost
from capture_planner.records.profile import Profile
from support.commands import PLAN
from support.observing import observation_of

DEPLOYMENT = codec.load_plan(PLAN)


def evolved(observation, **of_graphs):
    """The observation with figures of each graph: functions of its tokens."""
    roles = []
    for role in observation.roles:
        graphs = tuple(
            attrs.evolve(graph, **{name: figure(graph.entry.num_tokens) for name, figure in of_graphs.items()})
            for graph in role.graphs
        )
        roles.append(replace(role, graphs=graphs))
    return replace(observation, roles=tuple(roles))


def profiled():
    """What an engine writes that timed its graphs right after capture."""
    observation = evolved(
        observation_of(DEPLOYMENT),
        milliseconds=lambda tokens: 1.0 + tokens / 64,
        seconds=lambda tokens: 0.05,
        mib=lambda tokens: 2.0,
    )
    target, *others = observation.roles
    eager = (EagerCost(num_reqs=1, num_tokens=1024, milliseconds=40.0),)
    return replace(observation, roles=(replace(target, eager=eager), *others), capture_seconds=9.0, graph_mib=300.0)


def observed(observation):
    return observed_profile(observation, DEPLOYMENT.model, DEPLOYMENT.environment.device, "command")


def test_every_graph_that_was_timed_is_in_a_curve():
    """Its milliseconds by family and padded tokens, as the engine wrote them; the file reads back equal."""
    observation = profiled()
    profile = observed(observation)
    of = {curve.key: dict(zip(curve.tokens, curve.milliseconds, strict=True)) for curve in profile.curves}
    for role in observation.roles:
        for graph in role.graphs:
            key = (role.role, graph.entry.mode, graph.entry.query_len, graph.entry.draft_steps)
            assert of[key][graph.entry.num_tokens] == graph.milliseconds
    assert of[Role.TARGET, GraphMode.NONE, None, None] == {1024: 40.0}
    assert codec.loads(codec.dumps(profile), Profile) == profile
    assert (profile.source, profile.date) == ("vllm 0.33.0", observation.started)


def test_costs_add_up_to_what_the_engine_reported():
    """Time and memory of all graphs, with what capturing took besides."""
    profile = observed(profiled())
    graphs = sum(len(role.entries) for role in DEPLOYMENT.roles)
    assert {cost.seconds for cost in profile.graphs} == {0.05}
    assert profile.base_seconds == pytest.approx(9.0 - 0.05 * graphs, abs=1e-6)
    assert len(DEPLOYMENT.roles) * profile.base_mib == pytest.approx(300.0 - 2.0 * graphs, abs=1e-6)


@given(
    once=st.floats(0, 2),
    each=st.floats(0, 0.05),
    requests=st.sets(st.integers(1, 64), min_size=4, max_size=12),
    pauses=st.integers(0, 1),
)
def test_time_apart_from_passes_is_what_intervals_have_more_than_the_targets_graphs(once, each, requests, pauses):
    """A line over the requests of a decode; an interval in which the host paused for long does not count.

    Drafts run in that time: the profile has the same steps, whatever drafting takes.
    """
    observation = profiled()
    target, *drafts = observation.roles
    steps = DEPLOYMENT.speculative.num_tokens
    decodes = [(n, graph) for n, graph in enumerate(target.graphs) if graph.entry.query_len]
    batches = []
    for number, num_reqs in enumerate(sorted(requests)):
        tokens = num_reqs * (1 + steps)
        spent, graph = min((g.milliseconds, n) for n, g in decodes if g.entry.num_tokens >= tokens)
        interval = spent + once + each * num_reqs + 500.0 * (number < pauses)
        shape = {"num_reqs": num_reqs, "num_tokens": tokens, "query_len": 1 + steps}
        batches.append(BatchCount(**shape, steps=9, graph=graph, interval=interval))
    profile = observed(replace(observation, roles=(replace(target, batches=tuple(batches)), *drafts)))
    for num_reqs in (1, 64):
        apart = once + each * num_reqs
        for drafting in (0.0, 0.1, 3.0):
            assert profile.step(num_reqs, 2.0, drafting) == pytest.approx(2.0 + max(apart, drafting), abs=1e-3)


def test_steps_stand_in_where_graphs_were_not_timed():
    """Sampled steps by the graph that they ran on, eager ones by their own tokens; a note says so."""
    observation = observation_of(DEPLOYMENT)
    target, *others = observation.roles
    graph = next(index for index, each in enumerate(target.graphs) if each.entry.query_len == 4)
    shape = {"num_reqs": 1, "num_tokens": 4, "query_len": 4, "steps": 10}
    batches = (
        BatchCount(**shape, graph=graph, milliseconds=2.0, samples=9),
        BatchCount(**shape, graph=graph, milliseconds=8.0, samples=1),
        BatchCount(num_reqs=2, num_tokens=900, past_prompt=False, steps=1, reason=Reason.MODE, milliseconds=50.0),
    )
    profile = observed(replace(observation, roles=(replace(target, batches=batches), *others)))
    tokens = target.graphs[graph].entry.num_tokens
    assert [(curve.mode, curve.tokens, curve.milliseconds) for curve in profile.curves] == [
        (GraphMode.FULL, (tokens,), (2.0,)),
        (GraphMode.NONE, (900,), (50.0,)),
    ]
    assert any(note.startswith("target: its graphs were not profiled") for note in profile.notes)
    assert "what graphs cost in memory and time was not measured" in profile.notes


def test_an_observation_without_times_is_refused_with_the_switch():
    """Nothing can be taken from an engine that timed nothing."""
    with pytest.raises(CapturePlannerError, match="CAPTURE_PLANNER_PROFILE=1"):
        observed(observation_of(DEPLOYMENT))


@given(st.dictionaries(st.integers(1, 200), st.tuples(st.floats(0.1, 50), st.integers(1, 9)), min_size=1, max_size=8))
def test_eager_times_never_fall_and_keep_their_mean(points):
    """One slow step does not count for all larger sizes; times that grow by themselves are as they were observed."""
    observation = profiled()
    target, *others = observation.roles
    batches = tuple(
        BatchCount(
            num_reqs=1,
            num_tokens=tokens,
            past_prompt=False,
            steps=samples,
            reason=Reason.MODE,
            milliseconds=time,
            samples=samples,
        )
        for tokens, (time, samples) in points.items()
    )
    role = replace(target, eager=(), batches=batches)
    profile = observed(replace(observation, roles=(role, *others)))
    (curve,) = [each for each in profile.curves if each.key == (Role.TARGET, GraphMode.NONE, None, None)]
    times = dict(zip(curve.tokens, curve.milliseconds, strict=True))
    assert list(times.values()) == sorted(times.values())
    weights = {tokens: samples for tokens, (_, samples) in points.items()}
    total = sum(time * samples for time, samples in points.values())
    assert sum(times[tokens] * weights[tokens] for tokens in points) == pytest.approx(total, rel=1e-4)
    raw = [points[tokens][0] for tokens in sorted(points)]
    if raw == sorted(raw):
        assert list(times.values()) == pytest.approx(raw, abs=1e-4)


@pytest.mark.parametrize(("query_len", "kind"), [(4, 4), (6, None), (None, None)])
def test_dummy_batches_of_no_scheduled_length_are_mixed(query_len, kind):
    """VLLM spreads dummy tokens evenly over its requests, which makes no decode of them."""
    observation = profiled()
    target, *others = observation.roles
    eager = (EagerCost(num_reqs=256, num_tokens=1536, query_len=query_len, milliseconds=13.6),)
    profile = observed(replace(observation, roles=(replace(target, eager=eager), *others)))
    assert [curve.query_len for curve in profile.curves if curve.mode is GraphMode.NONE] == [kind]
