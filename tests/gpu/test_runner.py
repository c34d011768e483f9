"""The runner on a GPU: graphs give the tokens of the same kernels, and logits within 2 % of float32.

``benchmarks/gpu_equality.py`` is the same for thousands of steps. On a CPU the reference backend and
recorded graphs stand in, so that all of it runs anywhere. CAPTURE_PLANNER_GPU_EXAMPLES says how many
deployments of each backend are served on a GPU (a fifth of it, so 4).
"""

from __future__ import annotations

import functools
import os
import random

import attrs
import pytest
import torch
from _deployments import CASES, CYCLE, REGISTRY, deployment, missing, small, tiny
from _equality import TOLERANCE, Watching, check, differing, errors, faults, in_float32

from capture_planner.modes import Chain, Pool
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, Method, Speculative
from capture_planner_runner.capture.variants import without_speculation
from capture_planner_runner.graphs.recorded import grapher_for
from capture_planner_runner.models.huggingface import load_target

# Kernel libraries warn while they compile.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("one_thread")]
EXAMPLES = max(int(os.environ.get("CAPTURE_PLANNER_GPU_EXAMPLES", "20")) // 5, 1)
CPU = pytest.param(CASES["reference"], "cpu", id="reference-cpu")
PLACES = [CPU, *(pytest.param(case, "cuda", id=f"{case.name}-cuda") for case in CASES.values())]
EXACT = [CPU, *(p for p in PLACES[1:] if DataType.FLOAT32 in p.values[0].dtypes)]

everywhere = pytest.mark.parametrize(("case", "place"), PLACES)
grapher_once = functools.cache(grapher_for)


def device_for(case, place):
    """Return the device, or skip where the case cannot be served there."""
    device = torch.device("cuda:0" if place == "cuda" else place)
    why = missing(case, device)
    if why is not None:
        pytest.skip(why)
    return device


def made_of(case, place, spec, seed=0, **options):
    """Deploy a spec; few and short requests on a CPU."""
    device = device_for(case, place)
    fewer = {"requests": 4, "prompts": (1, 40), "outputs": (2, 8)} if place == "cpu" else {"requests": 16}
    return deployment(case, spec, device, grapher_once(device), seed=seed, **(fewer | options))


def indices(place):
    """Return deployments that are far apart in the cycle: other K, other mode, other chain."""
    return [5 * i % CYCLE + i // CYCLE for i in range(EXAMPLES if place == "cuda" else 2)]


@everywhere
def test_graphs_give_the_tokens_of_eager_kernels(case, place):
    """Poisoned before each forward, indices checked; float32 also those of plain greedy decoding."""
    device_for(case, place)
    for index in indices(place):
        spec = tiny(case, index, random.Random(index))
        seen = check(made_of(case, place, spec, index), eager=True, poison=True, debug=True)
        assert faults(seen) == [], seen


@pytest.mark.parametrize(("case", "place"), PLACES[1:])
@pytest.mark.parametrize("k", [0, 3])
def test_compiled_bodies_in_graphs_give_the_tokens_of_their_kernels_without(case, place, k):
    """FULL and PIECEWISE graphs, and a drafter; logits are as near to float32 as without compiling."""
    seen = check(made_of(case, place, small(case, k), 5), poison=k == 3, compile=True)
    assert faults(seen) == [], seen


@everywhere
@pytest.mark.parametrize("poison", [False, True])
def test_steps_launched_ahead_give_the_same_tokens(case, place, poison):
    """Before the tokens of the step before are read; what is poisoned was read by then."""
    spec = small(case, 0)
    seen = check(made_of(case, place, spec, 1), poison=poison, run_ahead=True)
    assert seen["ran ahead"]
    assert faults(seen) == [], seen


@pytest.mark.parametrize(("case", "place"), PLACES[1:])
def test_steps_with_drafts_launched_ahead_give_the_same_tokens(case, place):
    """Poisoned before each forward: nothing that the next step goes on from is lost."""
    seen = check(made_of(case, place, small(case, 3), 1), poison=True, run_ahead=True)
    assert faults(seen) == [], seen


@everywhere
@pytest.mark.parametrize("on_device", [False, True])
def test_device_verification_equals_host_verification(case, place, on_device):
    """Graphs and the same kernels agree, wherever tokens are settled."""
    seen = check(made_of(case, place, small(case, 3), 7), poison=True, drafts_on_device=on_device)
    assert faults(seen) == [], seen


@pytest.mark.parametrize(("case", "place"), EXACT)
@pytest.mark.parametrize("k", [0, 3])
def test_running_ahead_changes_no_token(case, place, k):
    """In float32, where another batch does not change the likeliest token."""
    spec = small(case, k)
    spec = replace(spec, model=replace(spec.model, dtype=DataType.FLOAT32))
    made = made_of(case, place, spec, 2)
    ahead, behind = (made.serve(made.plan, run_ahead=ahead, drafts_on_device=True) for ahead in (True, False))
    assert (ahead.ahead or k > 0, behind.ahead) == (True, False)
    assert differing(ahead.tokens, behind.tokens) == []


@everywhere
def test_shared_pool_changes_no_token_and_takes_less_memory(case, place):
    """Compared with a pool for each role, with three roles that have graphs."""
    seen = check(made_of(case, place, replace(small(case, 3), pool=Pool.SHARED), 3), other_pool=True)
    assert faults(seen) == [], seen
    assert seen["other pool"]["saved"] > 0


@everywhere
@pytest.mark.parametrize("k", [0, 3])
def test_sampled_tokens_are_those_of_the_same_kernels_in_either_pool(case, place, k):
    """With top-p, and drafts that are drawn inside of graphs; a shared pool takes no more memory."""
    made = attrs.evolve(made_of(case, place, replace(small(case, k), pool=Pool.SHARED), 6), kind="random")
    serve = functools.partial(made.serve, temperature=0.8, top_p=0.95)
    graphs, kernels = serve(made.plan, poison=True), serve(made.plan, replay=False)
    apart = serve(replace(made.plan, pool=Pool.PER_ROLE))
    assert differing(graphs.tokens, kernels.tokens) == []
    assert differing(graphs.tokens, apart.tokens) == []
    assert graphs.pool_bytes <= apart.pool_bytes


@pytest.mark.parametrize(("case", "place"), EXACT)
@pytest.mark.parametrize("kind", ["random", "copy"])
def test_fused_chain_proposes_the_tokens_of_single_steps(case, place, kind):
    """Every token that the target is given to verify is the same, right or not."""
    found = []
    for chain in Chain:
        spec = small(case, 5)
        spec = replace(
            spec,
            model=replace(spec.model, dtype=DataType.FLOAT32),
            speculative=Speculative(method=Method.EAGLE, num_tokens=5, chain=chain),
        )
        made = attrs.evolve(made_of(case, place, spec, 4), kind=kind)
        fused = {entry.draft_steps for role in made.plan.roles for entry in role.entries} - {None, 1}
        assert bool(fused) is (chain is Chain.FUSED)
        plain = made.serve(without_speculation(made.plan, REGISTRY)).tokens
        answers = {request.name: request.prompt + plain[request.name] for request in made.requests}
        watching = Watching()
        run = made.serve(made.plan, answers, observer=watching)
        assert run.tokens == plain
        assert kind == "random" or sum(step.accepted for step in run.session.steps)
        found.append(watching.fed())
    assert found[0] == found[1]


# What the comparison itself is worth: on a CPU, where anybody can run it.


@pytest.mark.parametrize("k", [0, 2, 7])
def test_watching_covers_every_position_of_every_answer(k):
    """The sequences are the requests with what they were given; each position stands there once or more."""
    case = CASES["reference"]
    made = made_of(case, "cpu", small(case, k), 5)
    watching = Watching()
    run = made.serve(made.plan, observer=watching, run_ahead=True)
    sequences, rows, hidden = watching.sequences()
    assert len(rows) == len(hidden)
    for request in made.requests:
        whole = [*request.prompt, *run.tokens[request.name][:-1]]
        (index,) = [i for i, tokens in enumerate(sequences) if tokens[: len(whole)] == whole]
        assert {at for sequence, at in rows if sequence == index} >= set(range(len(whole)))


def test_logits_check_detects_other_weights():
    """And those of the same weights are not: the error is one of the forward."""
    case, device = CASES["reference"], torch.device("cpu")
    made = made_of(case, "cpu", small(case, 2), 6)
    watching = Watching()
    made.serve(made.plan, observer=watching)
    other = load_target(None, made.plan.model, device=device, dtype=torch.float32, seed=made.seed + 1)
    for reference, is_near in ((made.target, True), (other, False)):
        error, _ = errors(made.target, in_float32(reference), watching, device)
        assert (error.worst < TOLERANCE["float32"]) is is_near
        assert (error.median < TOLERANCE["bfloat16"]) is is_near


def test_token_check_names_the_request_that_differs():
    """By its name, wherever the token is."""
    tokens = {"a": (1, 2, 3), "b": (1, 2, 3)}
    assert differing(tokens, tokens | {"b": (1, 2, 4)}) == ["b"]
