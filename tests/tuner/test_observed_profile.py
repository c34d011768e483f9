"""Profiles of engines: an observation's figures, none of them changed, and what it does not have is said."""

import itertools
import statistics

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate
from capture_planner.engines.deployments import emulation_of
from capture_planner.errors import CapturePlannerError
from capture_planner.measuring.fits import entry_family, predict_graphs
from capture_planner.measuring.step_times import decode_lengths, kind_of_step, step_times
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import Prices, Steps, judge, passes_of
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import draft_steps
from capture_planner.records.observation import BatchCount, EagerCost, ObservedGraph
from capture_planner.records.profile import Overhead, Profile
from capture_planner_tuner.observed_profile import _graph_of, observed_profile, served_steps
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


def profiled(experts=0.0):
    """What an engine writes that timed its graphs right after capture.

    :param experts: milliseconds of the experts of one token, of a mixture.
    """
    figures = {
        "milliseconds": lambda tokens: 1.0 + tokens / 64 + experts * tokens**0.5,
        "seconds": lambda tokens: 0.05,
        "mib": lambda tokens: 2.0,
    }
    if experts:
        figures["half_milliseconds"] = lambda tokens: 1.0 + tokens / 64 + experts * (tokens // 2) ** 0.5
    observation = evolved(observation_of(DEPLOYMENT), **figures)
    target, *others = observation.roles
    eager = (EagerCost(num_reqs=1, num_tokens=1024, milliseconds=40.0),)
    drafts = (EagerCost(num_reqs=1, num_tokens=1024, milliseconds=3.0),)
    roles = (replace(target, eager=eager), *(replace(role, eager=drafts) for role in others))
    return replace(observation, roles=roles, capture_seconds=9.0, graph_mib=300.0)


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
    assert profile.base_mib == pytest.approx(300.0 - 2.0 * graphs, abs=1e-6)


def test_graphs_with_adapters_count_once():
    """What graphs are predicted to take is what the engine reported of all; a trial of another size has a time."""
    observation = profiled()
    target, *others = observation.roles
    adapted = tuple(attrs.evolve(graph, entry=attrs.evolve(graph.entry, active_loras=2)) for graph in target.graphs)
    trial = attrs.evolve(target.graphs[0], milliseconds=99.0)
    roles = (replace(target, graphs=(*adapted, *target.graphs[1:]), trials=(trial,)), *others)
    number = sum(len(role.graphs) for role in roles)
    profile = observed(
        replace(observation, roles=roles, capture_seconds=9 + 0.05 * number, graph_mib=300 + 2.0 * number)
    )
    found = predict_graphs(profile, [(role.role, graph.entry) for role in roles for graph in role.graphs])
    assert found.seconds == pytest.approx(9 + 0.05 * number)
    assert found.memory_mib == pytest.approx(300 + 2.0 * number)
    curve = next(curve for curve in profile.curves if curve.key == entry_family(Role.TARGET, trial.entry))
    assert dict(zip(curve.tokens, curve.milliseconds, strict=True))[trial.entry.num_tokens] == 99.0


@pytest.mark.parametrize("requests", [16, 32, 64])
def test_passes_that_were_not_counted_run_on_the_graphs_of_the_engine(requests):
    """SGLang's graphs of prefills serve no decode, though they have room for it."""
    words = ["--model-path", "Qwen/Qwen3-8B", "--max-running-requests", "64", "--cuda-graph-max-bs-decode", "16"]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "my/drafter"]
    words += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    observation = observation_of(emulate("sglang", words, find_environment("h200")))
    for role in observation.roles[:2]:
        batch = Batch.decode(role.role, requests, 4)
        assert _graph_of(role, observation)(batch) == emulation_of(observation).dispatch(batch).entry


def served(observation, profile, apart, base, slope, noise=()):
    """The observation with target batches whose intervals follow the model of a step, off by ``noise``.

    :param apart: what the mode adds to the base overhead, by mode and query length.
    """
    target = observation.roles[0]
    prices = Prices(Costs(profile), observation, {role.role: role.mode for role in observation.roles})
    batches = []
    for number, (num_reqs, num_tokens, query_len, index) in enumerate(SHAPES):
        shape = {"num_reqs": num_reqs, "num_tokens": num_tokens, "query_len": query_len}
        count = BatchCount(
            **shape,
            past_prompt=query_len is not None,
            steps=1 + number,
            graph=index,
            reason=None if index else Reason.SIZES,
        )
        served_by = [None if index is None else target.graphs[index].entry]
        for each, _ in [*passes_of(count.batch(Role.TARGET), observation)][1:]:
            graphs = next(role.graphs for role in observation.roles if role.role is each.role)
            length = draft_steps(each.role, each.num_reqs, observation.speculative)
            served_by.append(
                min((g.entry for g in graphs if not g.entry.rejection(each, length)), key=preferred, default=None)
            )
        passes = [
            prices.of(each, entry, repeats)
            for entry, (each, repeats) in zip(served_by, passes_of(count.batch(Role.TARGET), observation), strict=True)
        ]
        kind = (GraphMode.NONE, query_len) if index is None else (served_by[0].mode, served_by[0].query_len)
        interval = sum(passes) + apart[kind] + base + slope * num_reqs
        interval *= 1 + (noise[number % len(noise)] if noise else 0.0)
        batches.append(attrs.evolve(count, interval=interval, intervals=count.steps))
    return replace(observation, roles=(replace(target, batches=tuple(batches)), *observation.roles[1:]))


def preferred(entry):
    return entry.cost


TARGET = DEPLOYMENT.roles[0]
DECODES = [n for n, entry in enumerate(TARGET.entries) if entry.query_len == 4]
SHAPES = [
    *((TARGET.entries[n].num_reqs, TARGET.entries[n].num_tokens, 4, n) for n in DECODES),
    *((reqs, 4 * reqs, 4, None) for reqs in (3, 5, 40)),
    *((reqs, 600 + 97 * reqs, None, None) for reqs in range(1, 9)),
]
KINDS = sorted({(GraphMode.NONE, 4), (GraphMode.NONE, None), *((TARGET.entries[n].mode, 4) for n in DECODES)}, key=str)


@given(
    base=st.floats(0, 20),
    slope=st.floats(0, 0.05),
    apart=st.lists(st.floats(0, 30), min_size=len(KINDS), max_size=len(KINDS)),
    noise=st.lists(st.floats(0, 0.4), min_size=1, max_size=7),
    experts=st.sampled_from((0.0, 0.1, 0.5)),
)
def test_profile_predicts_the_mean_step_that_it_was_fitted_to(base, slope, apart, noise, experts):
    """Of each kind, whatever the host and the drafter take, and however the steps of a kind spread."""
    apart = dict(zip(KINDS, apart, strict=True))
    apart[min(apart, key=apart.get)] = 0.0
    start = profiled(experts)
    observation = served(start, observed(start), apart, base, slope, noise)
    profile = observed(observation)
    assert not any("less than their passes" in note for note in profile.notes)
    judged = judged_mean(profile, observation)
    for kind, (predicted, measured) in judged.items():
        assert predicted == pytest.approx(measured, rel=1e-3), kind
    times = step_times(observation)
    total = sum(count.steps for count in observation.roles[0].batches)
    assert times.steps == total
    assert times.mean_ms == pytest.approx(
        sum(count.interval * count.steps for count in observation.roles[0].batches) / total
    )
    assert {each.key for each in profile.overheads} == {each.kind for each in times.kinds}


@given(
    floors=st.lists(st.floats(0, 60), min_size=len(KINDS), max_size=len(KINDS)),
    slope=st.floats(0, 0.05),
    experts=st.sampled_from((0.0, 0.1, 0.5)),
)
def test_time_of_the_host_is_found_and_longer_passes_hide_it(floors, slope, experts):
    """An eager step takes it at least. On a graph padding has its price, so the mean of the host's wait is added."""
    floors = dict(zip(KINDS, floors, strict=True))
    start = profiled(experts)
    bare = observed(start)
    host = replace(
        bare,
        overheads=tuple(
            Overhead(mode=mode, query_len=length, milliseconds=0.0, floor=floors[mode, length], steps=1)
            for mode, length in KINDS
        ),
    )
    observation = served(start, host, dict.fromkeys(KINDS, 0.0), 0.0, slope)
    profile = observed(observation)
    for kind, (predicted, measured) in judged_mean(profile, observation).items():
        assert predicted == pytest.approx(measured, rel=2e-3), kind
    for each in profile.overheads:
        if each.mode is GraphMode.NONE:
            held = [
                step
                for step in served_steps(bare, observation)[0]
                if step.kind == each.key and step.passes - step.above < floors[each.key] - 0.5
            ]
            assert each.milliseconds == 0
            assert not held or each.floor == pytest.approx(floors[each.key], rel=0.1, abs=1)
        else:
            assert each.floor == 0
            assert each.milliseconds <= floors[each.key]


def judged_mean(profile, observation):
    """Predicted and measured mean step of each kind, by judging each step by itself."""
    target, modes = observation.roles[0], {role.role: role.mode for role in observation.roles}
    found = {}
    for count in target.batches:
        batch = count.batch(Role.TARGET)
        own = None if count.graph is None else target.graphs[count.graph].entry

        def answer(each, own=own):
            if each.role is Role.TARGET:
                return own
            graphs = next(role.graphs for role in observation.roles if role.role is each.role)
            length = draft_steps(each.role, each.num_reqs, observation.speculative)
            return min((g.entry for g in graphs if not g.entry.rejection(each, length)), key=preferred, default=None)

        judged = judge(answer, Steps({batch: 1}), Costs(profile), observation, modes)
        kind = kind_of_step(target, count, decode_lengths(observation))
        predicted, measured, weight = found.get(kind, (0.0, 0.0, 0))
        found[kind] = (
            predicted + judged.mean_step_ms * count.steps,
            measured + count.interval * count.steps,
            weight + count.steps,
        )
    return {kind: (predicted / weight, measured / weight) for kind, (predicted, measured, weight) in found.items()}


def test_steps_shorter_than_their_passes_are_said():
    """No overhead is negative."""
    observation = served(profiled(), observed(profiled()), dict.fromkeys(KINDS, 0.0), 0.0, 0.0, [-0.9])
    profile = observed(observation)
    assert {each.milliseconds for each in profile.overheads} == {0.0}
    assert any("less than their passes" in note for note in profile.notes)


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


def eager_steps(points, **time_of):
    """Return the curve of eager passes by sampled steps alone: milliseconds and samples by tokens."""
    observation = profiled()
    target, *others = observation.roles
    shape = {"num_reqs": 1, "past_prompt": False, "reason": Reason.MODE}
    batches = tuple(
        BatchCount(**shape, num_tokens=tokens, steps=samples, **{name: pick(*timed) for name, pick in time_of.items()})
        for tokens, timed in points.items()
        for samples in timed[1:]
    )
    profile = observed(replace(observation, roles=(replace(target, eager=(), batches=batches), *others)))
    (curve,) = [each for each in profile.curves if each.key == (Role.TARGET, GraphMode.NONE, None, None)]
    return curve


SAMPLED = {"milliseconds": lambda time, samples: time, "samples": lambda time, samples: samples}
TIMED_BY_INTERVALS = {"interval": lambda time, samples: time, "intervals": lambda time, samples: samples}


@pytest.mark.parametrize("times", [SAMPLED, TIMED_BY_INTERVALS], ids=["sampled", "intervals"])
@given(
    points=st.dictionaries(
        st.integers(1, 300), st.tuples(st.integers(1, 50).map(float), st.integers(1, 9)), min_size=1, max_size=8
    )
)
def test_eager_times_never_fall_and_are_the_nearest_such(points, times):
    """Of each doubling of tokens the median, and no curve that never falls is nearer to the medians."""
    curve = eager_steps(points, **times)
    doublings = {}
    for tokens, (time, samples) in sorted(points.items()):
        doublings.setdefault((tokens - 1).bit_length(), []).append((tokens, [time] * samples))
    assert curve.tokens == tuple(alike[-1][0] for alike in doublings.values())
    assert list(curve.milliseconds) == sorted(curve.milliseconds)
    every = [[time for _, repeats in alike for time in repeats] for alike in doublings.values()]
    medians = [(statistics.median_low(alike), len(alike)) for alike in every]

    def distance(fit):
        return sum(samples * abs(own - median) for own, (median, samples) in zip(fit, medians, strict=True))

    values = sorted({median for median, _ in medians})
    least = min(map(distance, itertools.combinations_with_replacement(values, len(medians))))
    assert distance(curve.milliseconds) == pytest.approx(least, abs=1e-3)


@given(
    sizes=st.lists(st.integers(20, 4000), min_size=9, max_size=9, unique=True).map(sorted),
    compiled=st.integers(0, 8),
    seconds=st.integers(1, 10),
)
@example(sizes=[20, 21, 22, 23, 24, 25, 26, 513, 514], compiled=7, seconds=1)
def test_a_step_that_compiled_kernels_is_no_time_of_a_pass(sizes, compiled, seconds):
    """Wherever it comes, times stay within those of the other steps, as long as there are others as large."""
    points = {tokens: (10 + tokens / 100, 1) for tokens in sizes}
    # Of the largest sizes two at least tell what is usual.
    points |= {5000: (60.0, 2)}
    points[sizes[compiled]] = (1000.0 * seconds, 1)
    assert max(eager_steps(points, **SAMPLED).milliseconds) <= 60.0


@pytest.mark.parametrize(("query_len", "kind"), [(4, 4), (6, None), (None, None)])
def test_dummy_batches_of_no_scheduled_length_are_mixed(query_len, kind):
    """VLLM spreads dummy tokens evenly over its requests, which makes no decode of them."""
    observation = profiled()
    target, *others = observation.roles
    eager = (EagerCost(num_reqs=256, num_tokens=1536, query_len=query_len, milliseconds=13.6),)
    profile = observed(replace(observation, roles=(replace(target, eager=eager), *others)))
    eager_curves = [each for each in profile.curves if each.mode is GraphMode.NONE and each.role is Role.TARGET]
    assert [curve.query_len for curve in eager_curves] == [kind]


@given(
    per_token=st.floats(0.01, 2),
    once=st.floats(0, 30),
    driver=st.floats(0, 5),
    cold=st.floats(0, 500),
    above=st.lists(st.integers(2, 9), min_size=1, max_size=4, unique=True),
)
def test_what_a_size_takes_alone_is_told_from_what_is_allocated_once(per_token, once, driver, cold, above):
    """By captures into pools of their own; the costs of the captured graphs still add up, and times are points."""
    observation, roles, total = profiled(), [], 0.0
    for role in observation.roles:
        graphs, trials = [], []
        for graph in role.graphs:
            is_first = not graphs
            mib = driver + is_first * (cold + per_token * graph.entry.num_tokens)
            total += mib
            graphs.append(attrs.evolve(graph, mib=mib))
        kinds = {(g.entry.mode, g.entry.query_len, g.entry.draft_steps): g for g in reversed(role.graphs)}
        for largest in kinds.values():
            for factor in above:
                tokens, reqs = largest.entry.num_tokens * factor, largest.entry.num_reqs
                entry = attrs.evolve(largest.entry, num_tokens=tokens, num_reqs=None if reqs is None else reqs * factor)
                mib = driver + once + per_token * tokens
                trials.append(ObservedGraph(entry=entry, mib=mib, seconds=0.05, milliseconds=1.0 + tokens / 64))
        roles.append(replace(role, graphs=tuple(graphs), trials=tuple(trials)))
    observation = replace(observation, roles=tuple(roles), graph_mib=total + 100.0)
    profile = observed(observation)
    single = {role.role for role in roles if len(role.graphs) < 2}
    for cost in profile.graphs:
        if cost.role in single or len(above) < 2:
            continue
        assert cost.mib_per_token == pytest.approx(per_token, rel=0.05, abs=0.01)
    curves = {curve.key: dict(zip(curve.tokens, curve.milliseconds, strict=True)) for curve in profile.curves}
    for role in roles:
        for trial in role.trials:
            assert curves[entry_family(role.role, trial.entry)][trial.entry.num_tokens] == trial.milliseconds
    work = [(role.role, graph.entry) for role in roles for graph in role.graphs]
    predicted = predict_graphs(profile, work).memory_mib
    assert predicted >= total or predicted == pytest.approx(total + 100.0, rel=1e-3)


@given(
    padding=st.floats(0, 0.1), some=st.floats(0.01, 5), share=st.floats(0.01, 1), eager=st.floats(0, 30), data=st.data()
)
def test_experts_of_a_batch_are_told_from_its_padding(padding, some, share, eager, data):
    """By replays with all and with half of the rows as tokens: a step takes what its own size and tokens do."""

    def experts(tokens):
        return some * tokens**share  # fewer of them are new with each token

    def replay(size, tokens):
        return 1.0 + padding * size + experts(tokens)

    observation, roles = profiled(), []
    for role in observation.roles:
        graphs = [
            attrs.evolve(
                graph, milliseconds=replay(size, size), half_milliseconds=replay(size, size // 2) if size else None
            )
            for graph in role.graphs
            for size in (graph.entry.num_tokens,)
        ]
        roles.append(replace(role, graphs=tuple(graphs), eager=()))
    cost = EagerCost(num_reqs=1, num_tokens=1024, milliseconds=eager + experts(1024))
    observation = replace(observation, roles=(replace(roles[0], eager=(cost,)), *roles[1:]))
    profile = observed(observation)
    assert codec.loads(codec.dumps(profile), Profile) == profile
    prices = Prices(Costs(profile), observation, {role.role: role.mode for role in observation.roles})
    target = observation.roles[0]
    sizes = sorted({graph.entry.num_tokens for graph in target.graphs})
    graph = data.draw(st.sampled_from(target.graphs)).entry
    least = graph.query_len or 1
    tokens = data.draw(st.integers(1, graph.num_tokens // least)) * least
    batch = Batch(
        role=Role.TARGET,
        num_reqs=tokens // least,
        num_tokens=tokens,
        query_len=graph.query_len,
        past_prompt=graph.query_len is not None,
    )
    # Between powers of two of the smallest size the times are interpolated, and below it they are in proportion.
    lowest = next((size for size in reversed(sizes) if size <= tokens), 0)
    within = experts(next(size for size in sizes if size >= tokens)) - experts(lowest) + 2 * experts(sizes[0])
    found = prices.of(batch, graph, 1)
    assert found == pytest.approx(replay(graph.num_tokens, tokens), abs=within + 0.01)
    known = prices.of(Batch.mixed(Role.TARGET, 1, 1024), None, 1)
    assert known == pytest.approx(eager + experts(1024), abs=0.01) or known > eager


@given(st.floats(0, 1e6), st.floats(1, 1e6))
def test_memory_is_also_a_number_of_cached_tokens(mib, each):
    observation = replace(profiled(), kv_token_bytes=each)
    tokens = observation.kv_tokens(mib)
    assert tokens * each <= mib * (1 << 20) * (1 + 1e-12)
    assert mib * (1 << 20) < (tokens + 1) * each * (1 + 1e-12)
    assert replace(observation, kv_token_bytes=None).kv_tokens(mib) is None
