"""Models spread over real ranks, gloo between them: the tokens of one rank, from graphs with collectives in them.

Compiled, too: operators are run as they were traced, between collectives that no compiler sees.
"""

import attrs
import pytest
import torch
from hypothesis import settings

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Pool
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, Method
from capture_planner.records.spec import CapturePolicy, CaptureTiming, Parallel, Policy, Sizes
from capture_planner_runner import runner as compiling
from capture_planner_runner.compilation import forwards
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.options import Options
from capture_planner_runner.ranks.collectives import WHOLE, collectives_of
from capture_planner_runner.ranks.peers import ALONE
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from support.rank_processes import on_processes
from support.worlds import CPU, INSTALLED, LONGEST, requests_of, spec_of, world_of

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = torch.device("cpu")
REQUESTS = requests_of(world_of(spec_of(k=0)), 0)[:5]
FEW = Sizes(policy=Policy.EXPLICIT, num_tokens=(6, 16), num_reqs=(3,))
ALL = {
    "full": {"k": 0, "mode": GraphMode.FULL_AND_PIECEWISE},
    "one KV head on two ranks": {"k": 0, "kv_heads": 1, "mode": GraphMode.FULL_DECODE_ONLY},
    "one KV on two ranks": {"k": 0, "mode": GraphMode.FULL_AND_PIECEWISE, "layers": 2, "context": 2},
    "one KV on two ranks, EAGLE": {"k": 2, "mode": GraphMode.FULL_AND_PIECEWISE, "context": 2, "sizes": FEW},
    "one KV on two ranks, draft model": {"k": 2, "method": Method.DRAFT_MODEL, "context": 2},
    "piecewise": {"k": 0, "kv_heads": 2, "mode": GraphMode.PIECEWISE, "layers": 2},
    "eager": {"k": 0, "mode": GraphMode.NONE},
    "EAGLE": {"k": 2, "kv_heads": 2, "mode": GraphMode.FULL_AND_PIECEWISE},
    "EAGLE-3": {
        "k": 2,
        "method": Method.EAGLE3,
        "mode": GraphMode.FULL_AND_PIECEWISE,
        "sizes": FEW,
        # Most graphs are captured on first use, together.
        "capture": CaptureTiming(policy=CapturePolicy.LAZY, memory=1 << 40, seconds_per_minute=1e9),
    },
    "parallel EAGLE-3": {"k": 2, "method": Method.EAGLE3, "parallel": True, "mode": GraphMode.FULL_DECODE_ONLY},
    "MTP": {"k": 2, "method": Method.MTP, "draft_layers": 2, "mode": GraphMode.FULL_DECODE_ONLY},
    "draft model": {"k": 2, "method": Method.DRAFT_MODEL, "mode": GraphMode.FULL_DECODE_ONLY},
    "another backend": {"k": 2, "backend": "probe", "mode": GraphMode.FULL_AND_PIECEWISE, "pool": Pool.PER_ROLE},
}
IN_CI = ("one KV head on two ranks", "one KV on two ranks, EAGLE", "EAGLE-3", "draft model", "full")
CASES = ALL if settings.default.max_examples >= 100 else {name: ALL[name] for name in IN_CI}
COMPILED = CASES if CASES is ALL else ("EAGLE-3",)


@attrs.frozen
class ServedCase:
    """What came of one case on one rank."""

    tokens: dict
    graphs: int
    late: list
    waived: list
    collectives: int
    steps: list
    heads: tuple
    cache: int
    refusal: str
    kinds: int
    not_compiled: list


def serve(case, peers, memory=None, hook=None, **options):
    """Serve a case on the ranks that there are.

    ``memory`` bounds this rank's pool; ``hook`` looks at what a layer of this rank returns.
    """
    among = WHOLE if peers is ALONE else collectives_of(peers, DEVICE)
    place = peers.place
    given = dict(CASES[case])
    context = min(given.pop("context", 1), place.tensor_size)
    spec = spec_of(**given)
    spec = replace(
        spec,
        model=replace(spec.model, dtype=DataType.FLOAT32),
        parallel=Parallel(tensor=place.tensor_size, data=place.data_size, decode_context=context),
    )
    plan = make_plan(spec, CPU, INSTALLED)
    target = load_target(None, plan.model, device=DEVICE, dtype=torch.float32, seed=1, among=among)
    if hook is not None:
        next(iter(target.linears().values())).register_forward_hook(hook)
    drafter = None
    if plan.speculative is not None:
        states = plan.limits.max_num_reqs
        drafter = choose_drafter("random", plan.speculative, target, num_states=states, length=LONGEST, seed=2)
    pages = PageFormat(page_size=4, num_pages=1 + plan.limits.max_num_reqs * -(-LONGEST // 4))
    requests = REQUESTS[place.data :: place.data_size]
    refusal = ""
    chosen = Options(**options)
    with Runner(plan, target, drafter, INSTALLED, RecordedGraphs(), pages=pages, peers=peers, options=chosen) as runner:
        runner.capture(memory=memory)
        served = {done.name: done.tokens for done in runner.serve(requests)}
        (cache, *_) = (cache for role in runner.roles.values() for _, cache in role.attention.caches())
        try:
            among.release()
        except RunError as error:
            refusal = str(error)
    among.release()
    return ServedCase(
        tokens=served,
        graphs=sum(done.waiver is None for done in runner.session.captured),
        late=[(done.role, done.entry) for done in runner.session.captured if done.step is not None],
        waived=[done.waiver.message for done in runner.session.captured if done.waiver is not None],
        collectives=among.calls,
        steps=[step.numbers for step in runner.session.rank_steps],
        cache=cache.keys.nbytes,
        heads=(target.num_heads, target.num_kv_heads, cache.keys.shape[2]),
        refusal=refusal,
        kinds=runner.compilation.kinds,
        not_compiled=runner.compilation.not_compiled,
    )


def other_path(module, inputs, out):
    """Return what a layer returns, in another way for few rows: no trace holds for any number of them."""
    return out if out.shape[-2] > 4 else out * 1


@pytest.fixture(scope="module")
def whole():
    """Every case on one rank."""
    return {case: serve(case, ALONE) for case in CASES}


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """Every case on two ranks that share the model, and one whose pool is too small on the second."""

    def work(peers):
        found = {case: serve(case, peers) for case in CASES}
        found["no memory on rank 1"] = serve("full", peers, 1 if peers.place.rank else None)
        found |= {f"{case}, compiled": serve(case, peers, compile=True) for case in COMPILED}
        found["compared"] = serve("one KV on two ranks, EAGLE", peers, compare=True)
        hook = other_path if peers.place.rank else None
        found["not compiled on rank 1"] = serve("full", peers, compile=True, hook=hook)
        return found

    return on_processes(2, work, tmp_path_factory.mktemp("spread"), tensor=2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_say_what_one_says(case, whole, spread):
    """Greedy tokens in float32, of every kind of graph and of drafter, on both ranks."""
    expected = whole[case]
    for rank in spread:
        assert rank[case].tokens == expected.tokens
        assert rank[case].graphs == expected.graphs
        assert rank[case].late == expected.late
        assert bool(rank[case].late) == ("capture" in CASES[case])
        assert rank[case].collectives > 0
    assert spread[0][case].collectives == spread[1][case].collectives


def test_ranks_that_share_the_kv_have_half_of_it_and_compare_their_graphs(whole, spread):
    """A page has as many tokens as on one rank, and each rank a part of them."""
    expected = whole["one KV on two ranks, EAGLE"]
    for rank in spread:
        found = rank["compared"]
        assert found.tokens == expected.tokens
        assert 2 * found.cache == expected.cache


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_ranks_say_what_one_says_that_is_not(case, whole, spread):
    """From the same graphs, with as many collectives in them."""
    for rank in spread:
        found = rank[f"{case}, compiled"]
        assert not found.not_compiled
        assert found.tokens == whole[case].tokens
        assert (found.graphs, found.collectives) == (rank[case].graphs, rank[case].collectives)
        # Before attention, from there to the sum after it, to the next sum, to the next attention, and to the end.
        assert found.kinds >= 4


def test_what_one_rank_cannot_compile_runs_as_it_is_on_both(whole, spread):
    """The reason names the rank. What both can compile, such as a drafter, would be compiled."""
    for rank in spread:
        found = rank["not compiled on rank 1"]
        (reason,) = found.not_compiled
        assert reason.startswith("target: rank 1: its forward takes other paths for other numbers of tokens")
        assert found.kinds == 0
        assert found.tokens == whole["full"].tokens
        assert found.collectives == rank["full"].collectives


@pytest.mark.thorough
def test_ranks_say_what_one_says_with_pieces_that_inductor_compiled(whole, tmp_path, monkeypatch):
    """Without graphs, as recorded ones see no kernel of Inductor; each rank keeps its own in a folder of its own."""

    def inductor_of(device, place):
        forwards.keep_apart(place.rank)
        return forwards.inductor

    monkeypatch.setattr(compiling, "compiler_for", inductor_of)
    monkeypatch.setenv(forwards.CACHE, str(tmp_path / "cache"))
    options = {"compile": True, "replay": False}
    for found in on_processes(2, lambda peers: serve("full", peers, **options), tmp_path, tensor=2):
        assert not found.not_compiled
        assert found.tokens == whole["full"].tokens
    assert sorted(each.name for each in (tmp_path / "cache").iterdir()) == ["rank-0", "rank-1"]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_its_heads_and_as_few_as_one(case, whole, spread):
    """The model says how many heads it has over all ranks; a cache has those of its rank."""
    heads, kv_heads, cached = whole[case].heads
    assert cached == kv_heads
    for rank in spread:
        assert rank[case].heads == (heads, kv_heads, max(kv_heads // 2, 1))


def test_a_graph_that_does_not_fit_on_one_rank_is_dropped_on_both(whole, spread):
    """Its collectives would wait for the other rank: both run eagerly, and say what one rank says."""
    for rank in spread:
        found = rank["no memory on rank 1"]
        assert found.graphs == 0
        assert found.waived
        assert all("rank 1: " in message and "rank 0: " not in message for message in found.waived)
        assert found.tokens == whole["full"].tokens


def test_ranks_do_not_part_while_there_are_graphs_with_collectives(spread):
    """The end of a process group waits for its graphs (pytorch#115388): the refusal counts them."""
    for rank in spread:
        for case in CASES:
            assert ("are still there" in rank[case].refusal) is bool(rank[case].graphs)


def test_replicas_of_spread_models_say_what_one_model_says(whole, tmp_path):
    """Four ranks, two for each of two models: all agree on every step."""
    cases = ("EAGLE-3", "draft model") if CASES is ALL else ("EAGLE-3",)
    found = on_processes(4, lambda peers: {case: serve(case, peers) for case in cases}, tmp_path, tensor=2)
    assert all(rank["EAGLE-3"].late == found[0]["EAGLE-3"].late != [] for rank in found)
    for case in cases:
        assert found[0][case].tokens == found[1][case].tokens
        assert found[2][case].tokens == found[3][case].tokens
        assert found[0][case].tokens | found[2][case].tokens == whole[case].tokens
        assert found[0][case].steps
        assert all(rank[case].steps == found[0][case].steps for rank in found)
