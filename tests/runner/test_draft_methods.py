"""What drafters of each method propose, against the same model over whole sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.model import DraftModel, Method, Speculative
from capture_planner.records.spec import Policy, Sizes
from capture_planner_runner.capture.variants import without_graphs
from capture_planner_runner.models.drafters import DraftLanguageModel
from capture_planner_runner.options import Options
from support.worlds import LONGEST, requests_of, serve, spec_of, world_of

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 4, 3))
DRAFTERS = {
    "eagle of two layers": Speculative(method=Method.EAGLE, num_tokens=3, model=DraftModel(num_layers=2)),
    "one mtp module": Speculative(method=Method.MTP, num_tokens=3),
    "mtp modules": Speculative(method=Method.MTP, num_tokens=3, model=DraftModel(num_layers=3)),
    "draft model": Speculative(method=Method.DRAFT_MODEL, num_tokens=3, model=DraftModel(num_layers=2)),
    "parallel draft model": Speculative(method=Method.DRAFT_MODEL, num_tokens=3, parallel_drafting=True),
    "parallel eagle": Speculative(method=Method.EAGLE, num_tokens=3, parallel_drafting=True),
    "parallel eagle3": Speculative(method=Method.EAGLE3, num_tokens=3, parallel_drafting=True),
}


def spec_for(name, *, layers=1, num_reqs=3, num_tokens=32, **scene):
    """Return the spec of a drafter, with a few sizes."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_tokens=(num_tokens // 2, num_tokens), num_reqs=(num_reqs,))
    spec = spec_of(k=0, layers=layers, num_reqs=num_reqs, num_tokens=num_tokens, sizes=sizes, **scene)
    return replace(spec, speculative=DRAFTERS[name] if isinstance(name, str) else name)


SCENES = st.fixed_dictionaries(
    {
        "num_reqs": st.integers(1, 4),
        "num_tokens": st.integers(8, 32),
        "mode": st.sampled_from((GraphMode.NONE, GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL)),
        "backend": st.sampled_from(("reference", "probe")),
    }
)


def dense(model, **inputs):
    """Run a model over one whole sequence, and attend without pages."""

    def attend(layer, query, keys, values, scoring):
        group = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scoring.scale
        seen = torch.ones(len(query), len(query), dtype=torch.bool).tril()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)

    return model.forward(attend=attend, **inputs)


def expected_drafts(world, tokens, *, is_first):
    """Return the drafts after ``tokens`` of one request, from nothing but models and tokens.

    Of several modules the later ones remember rejected drafts, so after a request's first step only the first is told.
    """
    plan, drafter, target = world.plan.speculative, world.drafter, world.target
    ids, most = torch.tensor(tokens), plan.num_tokens

    def propose(states, module=0):
        zeros = torch.zeros(len(states), dtype=torch.int64)
        return drafter.propose(states, zeros, zeros, module).tolist()

    if plan.method is Method.DRAFT_MODEL:
        found = []
        if plan.parallel_drafting:
            rows = torch.cat([ids, ids.new_full((most - 1,), drafter.mask_token)])
            return propose(dense(drafter, input_ids=rows, positions=torch.arange(len(rows)), hidden=None)[-most:])
        for _ in range(most):
            rows = torch.tensor([*tokens, *found])
            found += propose(dense(drafter, input_ids=rows, positions=torch.arange(len(rows)), hidden=None)[-1:])
        return found
    settled = len(ids) - 1
    positions = torch.arange(settled)
    hidden, aux = dense(target, input_ids=ids[:-1], embeddings=None, positions=positions, aux_layers=drafter.aux_layers)
    states = hidden if aux is None else aux
    if plan.parallel_drafting:
        states = torch.cat([states, drafter.mask_hidden.expand(most - 1, -1)])
        states = states if aux is None else drafter.combine(states)
        rows = torch.cat([ids[1:], ids.new_full((most - 1,), drafter.mask_token)])
        return propose(dense(drafter, input_ids=rows, positions=torch.arange(len(rows)), hidden=states)[-most:])
    states = states if aux is None else drafter.combine(states)
    found = []
    for number in range(most):
        rows = torch.tensor([*tokens[1:], *found])
        if plan.is_modules:
            if number and not is_first:
                return found
            rows = rows[number:]
            states = dense(drafter, input_ids=rows, positions=positions, hidden=states, module=number)
            found += propose(states[-1:], number)
            continue
        out = dense(drafter, input_ids=rows, positions=torch.arange(len(rows)), hidden=states)
        found += propose(out[-1:])
        states = torch.cat([states, out[-1:]])
    return found


@FEW
@given(
    name=st.sampled_from(sorted(DRAFTERS)),
    scene=SCENES,
    seed=st.integers(0, 99),
    poison=st.booleans(),
    page_size=st.integers(1, 8),
)
def test_drafts_are_those_over_whole_sequences(name, scene, seed, poison, page_size):
    """After each step, of every request that has drafts: pages, graphs, padding and rejected rows change nothing."""
    world = world_of(spec_for(name, **scene), page_size=page_size, seed=seed % 3)
    checked = 0
    with world.runner(options=Options(poison=poison)) as runner:
        runner.capture()
        serving = runner.start(requests_of(world, seed))
        serving.scheduler.arrive(1.0, 0.0)
        states = serving.scheduler.states
        while not serving.scheduler.done:
            before = states.computed.copy()
            serving.step()
            for live in serving.scheduler.unfinished:
                row = live.state_index
                length, drafts = int(states.length[row]), int(states.proposed[row])
                # Later than that a first pass is cut at the model's end, and no draft of the rest is verified.
                drafts = min(drafts, LONGEST - length)
                if not drafts:
                    continue
                tokens = states.tokens[row, : length + drafts].tolist()
                is_first = before[row] == 0 and length == states.prompt[row] + 1
                wanted = expected_drafts(world, tokens[:length], is_first=is_first)
                assert tokens[length:][: len(wanted)] == wanted[:drafts]
                checked += 1
    assert checked


@FEW
@given(scene=SCENES, seed=st.integers(0, 99), k=st.integers(1, 5), options=st.booleans())
def test_the_target_as_its_own_draft_model_is_always_right(scene, seed, k, options):
    """Every draft that is verified is accepted, with graphs or without."""
    own = Speculative(method=Method.DRAFT_MODEL, num_tokens=k, model=DraftModel(num_layers=2))
    world = world_of(spec_for(own, layers=2, **scene), seed=seed % 3)
    drafter = DraftLanguageModel(world.target)
    object.__setattr__(world, "drafter", drafter)
    plan = world.plan if options else without_graphs(world.plan)
    with world.runner(plan) as runner:
        runner.capture()
        serve(runner, requests_of(world, seed))
        steps = runner.session.steps
    assert sum(step.drafted for step in steps) == sum(step.accepted for step in steps)
    assert any(step.drafted for step in steps)


@pytest.mark.parametrize("name", DRAFTERS)
def test_graphs_serve_each_pass_of_a_drafter(name):
    """Uniform decodes replay full graphs in the roles of the method, at the query lengths that vLLM runs."""
    world = world_of(spec_for(name), drafts="copy")
    with world.runner() as runner:
        runner.capture()
        serve(runner, requests_of(world, 1))
        forwards = runner.session.forwards
    lengths = {
        role: {f.query_len for f in forwards if f.role is role and f.mode is GraphMode.FULL}
        for role in world.plan.planned
    }
    widths = {"draft model": 5, "parallel draft model": 7, "parallel eagle": 6, "parallel eagle3": 6}
    assert lengths[Role.TARGET] == {4}
    assert lengths[Role.DRAFT_PREFILL] == {widths.get(name, 4)}
    chain = name in ("eagle of two layers", "one mtp module", "draft model")
    assert lengths.get(Role.DRAFT_DECODE) == ({1} if chain else None)


@FEW
@given(name=st.sampled_from([name for name in DRAFTERS if "parallel" in name]), seed=st.integers(0, 99))
def test_a_batch_leaves_room_for_the_first_draft_pass(name, seed):
    """No pass has more tokens than the limits, however narrow they are."""
    spec = spec_for(name, num_tokens=1 + DRAFTERS[name].extra_slots + seed % 7)
    world = world_of(spec, seed=seed % 3)
    with world.runner() as runner:
        serve(runner, requests_of(world, seed))
        most = max(forward.num_tokens for forward in runner.session.forwards)
    assert most <= spec.limits.max_num_tokens
