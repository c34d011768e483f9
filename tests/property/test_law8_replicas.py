"""Law 8 for what really ran: replicas that serve requests run the same entries, and each says what it says alone."""

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from capture_planner.analysis.data_parallel import agree
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, Reason
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.spec import Policy, Sizes
from capture_planner_runner.execution.fields import ACROSS_REPLICAS
from capture_planner_runner.execution.role import ForwardObserver
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.numerics.verification import RowKeeper
from capture_planner_runner.options import Options
from capture_planner_runner.ranks.peers import ALONE
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.steps import vectors_of
from capture_planner_runner.serving.workload import Request
from support.rank_threads import on_ranks, replicas_of
from support.worlds import CPU, INSTALLED, World, requests_of, spec_of, worlds

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 4, 2))


class AcrossWatcher(ForwardObserver):
    """Keeps what the field of all replicas' tokens holds in each forward, with the tokens that run."""

    def __init__(self):
        self.kept = []

    def forward(self, role, step):
        self.kept.append((role.role, step.extents.tokens, role.fields[ACROSS_REPLICAS].tolist()))
        return super().forward(role, step)


def served(world, requests, peers=None, *, captured=True, observer=None, **options):
    """Serve requests on one rank; return its runner and what each request was given."""
    together = {} if peers is None else {"peers": peers, "observer": observer or AcrossWatcher()}
    runner = Runner(
        world.plan,
        world.target,
        world.drafter,
        world.registry,
        RecordedGraphs(),
        pages=world.pages,
        options=Options(**options),
        **together,
    )
    with runner:
        if captured:
            # By itself: a capture is collective, and this test leaves one rank out of it.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runner, "peers", ALONE)
                runner.capture()
        found = runner.serve(requests)
    return runner, {each.name: each.tokens for each in found}


def ran(runner):
    """Return by step and role the entry, and the reason where there is none."""
    found = {}
    for forward in runner.session.forwards:
        found.setdefault((forward.step, forward.role), (forward.entry, forward.reason))
    return found


@FEW
@given(worlds(), st.integers(2, 4), st.integers(0, 1 << 16), st.sampled_from((None, True)), st.booleans())
def test_replicas_run_the_same_entries_and_say_what_one_model_says(world, size, seed, ahead, poison):
    """Requests are dealt in turns, so that ranks are idle, in prompts and in decodes at different steps."""
    each = replicas_of(world, size)
    requests = requests_of(world, seed)[: size + 2]
    _, expected = served(each[0], requests)
    options = {"poison": poison} if poison else {"run_ahead": ahead, "drafts_on_device": ahead}
    found = on_ranks(
        size, lambda peers: served(each[peers.place.rank], requests[peers.place.data :: size], peers, **options)
    )
    assert all(not isinstance(one, Exception) for one in found), found
    assert {name: tokens for _, answers in found for name, tokens in answers.items()} == expected
    runners = [runner for runner, _ in found]
    vectors = [[step.numbers for step in runner.session.rank_steps] for runner in runners]
    assert all(one == vectors[0] for one in vectors)
    idle = [[step.is_idle for step in runner.session.rank_steps] for runner in runners]
    event("idle ranks run along" if any(map(any, idle)) else "no rank is idle")
    for forwards in zip(*(runner.observer.kept for runner in runners), strict=True):
        # The same forward on every rank, idle ones included: its field holds what each of them runs.
        assert len({role for role, _, _ in forwards}) == 1
        assert all(across == [tokens for _, tokens, _ in forwards] for _, _, across in forwards)
    dispatcher = Dispatcher(world.plan)
    roles = [role.role for role in world.plan.roles]
    forwards = [ran(runner) for runner in runners]
    for step, numbers in enumerate(vectors[0]):
        for role, vector in vectors_of(roles, numbers).items():
            agreement = agree(dispatcher, vector)
            for rank, entries in enumerate(forwards):
                if (step, role) in entries:
                    assert not idle[rank][step]
                    assert entries[step, role] == (agreement.entry, agreement.reason)


@FEW
@given(worlds(), st.integers(2, 3), st.integers(0, 1 << 16))
def test_rows_of_requests_are_kept_and_no_dummy_rows(world, size, seed):
    """What is verified: each row of each request once, on the replica that served it, whichever of them are idle."""
    each = replicas_of(world, size)
    requests = requests_of(world, seed)[: size + 1]
    prompts = {request.name: request.prompt for request in requests}

    def work(peers):
        keeper = RowKeeper()
        _, answers = served(each[peers.place.rank], requests[peers.place.data :: size], peers, observer=keeper)
        sequences = {name: prompts[name] + tokens for name, tokens in answers.items()}
        return sequences, keeper.rows(sequences)

    found = on_ranks(size, work)
    assert all(not isinstance(one, Exception) for one in found), found
    for sequences, rows in found:
        assert (rows.absent, rows.not_kept) == ((), 0)
        assert set(rows.places) == {(name, at) for name, each in sequences.items() for at in range(len(each) - 1)}


@FEW
@given(worlds(), st.integers(2, 3), st.data())
def test_one_rank_without_graphs_makes_all_eager_with_the_reason(world, size, data):
    """A rank that captured nothing: where the plan has an entry, each rank says that a rank has none."""
    each = replicas_of(world, size)
    without = data.draw(st.integers(0, size - 1))
    requests = requests_of(world, 0)[: size + 1]

    def work(peers):
        rank = peers.place.rank
        return served(each[rank], requests[rank::size], peers, captured=rank != without)[0]

    dispatcher = Dispatcher(each[0].plan)
    roles = [role.role for role in world.plan.roles]
    for runner in on_ranks(size, work):
        assert isinstance(runner, Runner), runner
        for (step, role), (entry, reason) in ran(runner).items():
            vector = vectors_of(roles, runner.session.rank_steps[step].numbers)[role]
            alone = dispatcher.dispatch(vector.joint())
            assert entry is None
            assert reason is (Reason.RANK if alone.entry is not None else alone.reason)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_decode_is_prepared_anew_where_another_replica_changes_its_graph(ahead):
    """A graph fills its own fields for the next step, and a larger one, which others need then, has more of them."""
    spec = replace(spec_of(k=0, num_reqs=3, num_tokens=8), mode=GraphMode.FULL_AND_PIECEWISE, backend="reference")
    spec = replace(spec, sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=(1, 3), num_tokens=(8,)))
    target = load_target(None, spec.model, device=torch.device("cpu"), dtype=torch.float64, seed=1)
    pages = PageFormat(page_size=4, num_pages=40)
    world = World(plan=make_plan(spec, CPU, INSTALLED), spec=spec, target=target, drafter=None, pages=pages, seed=1)
    lengths = {"long": (1, 14, 0.0), "short": (5, 3, 0.03), "other": (3, 2, 0.06)}
    requests = [
        Request(name=name, arrival=arrival, prompt=tuple(range(3, 3 + prompt)), max_new_tokens=output)
        for name, (prompt, output, arrival) in lengths.items()
    ]
    _, expected = served(world, requests)
    each, mine = replicas_of(world, 2), (requests[:1], requests[1:])
    found = on_ranks(2, lambda peers: served(each[peers.place.rank], mine[peers.place.rank], peers, run_ahead=ahead))
    assert {name: tokens for _, answers in found for name, tokens in answers.items()} == expected
