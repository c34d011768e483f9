"""Ranks: single vectors, each with its answer, its reason and its sentence."""

from pathlib import Path

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.analysis.data_parallel import Submission, Vector, agree, explain_rank
from capture_planner.analysis.explain import WHY_NONE
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import DispatchError, InvalidValue
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import Method, Model, Speculative
from capture_planner.records.plan import Plan, RolePlan, Waiver
from capture_planner.records.spec import Limits, Lora
from capture_planner.report.ranks import cases, cases_report
from capture_planner.testing import arbitrary_plans, plans
from support.strategies import vectors

LOCKED = Path(__file__).parent.parent.parent / "plans" / "locked"
FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


def plan_of(*entries, role=Role.TARGET, waivers=(), lora=None, speculative=None):
    """A plan of one role, made by hand."""
    planned = RolePlan(role=role, requested=FULL, mode=FULL, groups=(), entries=entries, waivers=waivers)
    return Plan(
        spec_digest="sha256:" + "0" * 64,
        environment=Environment(name="e", device=Device(kind=DeviceKind.CPU, name="c", memory=1)),
        model=Model(name="m", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=4096),
        limits=Limits(max_num_reqs=64, max_num_tokens=256),
        lora=lora,
        speculative=speculative,
        roles=(planned,),
    )


def uniform(num_reqs, query_len=1, **changes):
    """A full uniform graph."""
    shape = {"num_tokens": num_reqs * query_len, "num_reqs": num_reqs, "query_len": query_len}
    return Entry(**{"mode": FULL} | shape | changes)


def piecewise(num_tokens):
    """A piecewise graph."""
    return Entry(mode=PIECEWISE, num_tokens=num_tokens)


def decode(num_reqs, query_len=1, role=Role.TARGET, **changes):
    """What a rank with decodes submits."""
    batch = Batch(role=role, num_reqs=num_reqs, num_tokens=num_reqs * query_len, query_len=query_len)
    kept = {name: changes.pop(name) for name in ("captured", "missing") if name in changes}
    return Submission(batch=attrs.evolve(batch, **changes), **kept)


def mixed(num_reqs, num_tokens):
    """What a rank with a prompt submits."""
    batch = Batch(role=Role.TARGET, num_reqs=num_reqs, num_tokens=num_tokens, past_prompt=False)
    return Submission(batch=batch)


def asked(plan, *ranks):
    """The agreement, and the sentence of each rank."""
    dispatcher, vector = Dispatcher(plan), Vector(role=plan.roles[0].role, ranks=ranks)
    agreement = agree(dispatcher, vector)
    return agreement, [explain_rank(dispatcher, agreement, rank) for rank in range(len(ranks))]


def test_agree_on_the_graph_of_the_largest_decode():
    """Each rank with its own padding, and a sentence that names who has more."""
    agreement, told = asked(plan_of(uniform(4), uniform(8), uniform(16)), decode(1), decode(7), Submission())
    assert agreement.entry == uniform(8)
    padded = [(a.dispatch.padded_tokens, a.dispatch.padded_reqs) for a in agreement.answers]
    assert padded == [(7, 7), (1, 1), (7, 7)]
    assert told == [
        "rank 1 has 7 requests",
        "same as it would run alone",
        "idle, with a dummy batch of 1 request of 1 token; same as the other ranks",
    ]


def test_agree_on_a_mixed_graph_for_one_prompt():
    """Uniform graphs are for vectors of decodes alone."""
    plan = plan_of(uniform(8), piecewise(16), piecewise(64))
    agreement, told = asked(plan, decode(8), mixed(2, 40), decode(4))
    assert agreement.entry == piecewise(64)
    assert [answer.dispatch.padded_tokens for answer in agreement.answers] == [56, 24, 60]
    assert not agreement.joint.past_prompt
    assert told[0] == "rank 1 has no decodes of 1 token; rank 1 has 40 tokens"
    assert told[1] == "same as it would run alone"


def test_agree_on_a_mixed_graph_for_two_query_lengths():
    """K differs by rank where the schedule gives it by batch size: no uniform graph serves both."""
    schedule = ((1, 4, 3), (5, 64, 1))
    speculative = Speculative(method=Method.EAGLE3, num_tokens=3, schedule=schedule)
    plan = plan_of(uniform(4, 4), uniform(8, 2), piecewise(16), speculative=speculative)
    agreement, told = asked(plan, decode(2, 4), decode(8, 2), Submission())
    assert agreement.entry == piecewise(16)
    assert agreement.draft_tokens == 1
    assert told[:2] == [
        "rank 1 has no decodes of 4 tokens; rank 1 has 8 requests and 16 tokens",
        "rank 0 has no decodes of 2 tokens",
    ]
    assert agreement.answers[2].batch == Batch(role=Role.TARGET, num_reqs=1, num_tokens=2, query_len=2)
    once = asked(plan, decode(2, 4), decode(3, 4), Submission())[0]
    assert (once.entry, once.draft_tokens, once.answers[2].batch.num_tokens) == (uniform(4, 4), 3, 4)


def test_agree_on_the_most_loras():
    """An entry for fewer would compute another rank wrongly."""
    plan = plan_of(uniform(8), uniform(8, active_loras=2), lora=Lora(max_active=2))
    agreement, told = asked(plan, decode(8), decode(8, active_loras=2))
    assert agreement.entry == uniform(8, active_loras=2)
    assert told == ["rank 1 has 2 active LoRA", "same as it would run alone"]


@pytest.mark.parametrize("idle", [False, True])
def test_agree_on_eager_for_a_rank_without_graphs(idle):
    """The reason is on each rank, and its sentence names the cause."""
    plan = plan_of(uniform(8))
    without = Submission(captured=False) if idle else decode(3, captured=False)
    agreement, told = asked(plan, decode(8), without, decode(1))
    assert {a.dispatch.reason for a in agreement.answers} == {Reason.RANK}
    assert agreement.lost_entry == uniform(8)
    assert told[0] == told[2] == "all run eager: rank 1 has no graphs"
    assert told[1].endswith("all run eager: this rank has no graphs")
    assert told[1].startswith("idle, ") == idle


def test_explain_rank_names_all_ranks_without_graphs():
    """Seen from each of them, and from the third."""
    told = asked(plan_of(uniform(8)), decode(8, captured=False), decode(8), decode(8, captured=False))[1]
    assert told == [
        "all run eager: this rank and rank 2 have no graphs",
        "all run eager: ranks 0, 2 have no graphs",
        "all run eager: this rank and rank 0 have no graphs",
    ]


def test_agree_skips_a_graph_that_one_rank_lost():
    """The next that all have is taken; without one, all run eager."""
    plan = plan_of(uniform(8), uniform(16))
    lost = frozenset({uniform(8)})
    agreement, told = asked(plan, decode(8), decode(2, missing=lost))
    assert (agreement.entry, agreement.lost_entry) == (uniform(16), uniform(8))
    assert told == [
        f"rank 1 has not captured {uniform(8)}",
        f"this rank has not captured {uniform(8)}; rank 0 has 8 requests",
    ]
    agreement, told = asked(plan, decode(8, missing=frozenset({uniform(16)})), decode(2, missing=lost))
    assert agreement.reason is Reason.RANK
    assert told[0] == f"all run eager: rank 1 has not captured {uniform(8)}"


def test_agree_replaces_a_lost_chain_by_one_of_the_same_length():
    """The scan knows the schedule: a chain serves its own length, and a drafter counts no adapters."""
    chains = [uniform(size, draft_steps=steps) for size in (4, 8) for steps in (1, 2)]
    speculative = Speculative(method=Method.EAGLE3, num_tokens=3)
    plan = plan_of(*chains, role=Role.DRAFT_DECODE, speculative=speculative, lora=Lora(max_active=2))
    lost = frozenset({uniform(4, draft_steps=2)})
    ranks = decode(3, role=Role.DRAFT_DECODE, active_loras=2), Submission(missing=lost)
    agreement = asked(plan, *ranks)[0]
    assert agreement.lost_entry == uniform(4, draft_steps=2)
    assert agreement.entry == uniform(8, draft_steps=2)
    assert agreement.joint.active_loras == 0


def test_agree_has_the_reason_of_the_joint_batch():
    """With the waiver that it comes from; that a rank lacks graphs, too, changes nothing."""
    waiver = Waiver(kind=Kind.MIXED, first=17, last=256, reason=Reason.SIZES, message="up to 16")
    plan = plan_of(uniform(8), piecewise(16), waivers=(waiver,))
    for captured in (True, False):
        agreement, told = asked(plan, decode(2, captured=captured), mixed(1, 100), Submission())
        assert (agreement.reason, agreement.lost_entry) == (Reason.SIZES, None)
        assert {answer.dispatch.waiver for answer in agreement.answers} == {waiver}
        assert told[0] == (
            f"all run eager: joint batch of 2 requests, 100 tokens, mixed: {WHY_NONE[Reason.SIZES]} (up to 16)"
        )
        assert told[2] == f"idle, with a dummy batch of 1 request of 1 token; {told[0]}"


def test_agree_treats_a_prompt_of_decode_shape_as_mixed():
    """Law 5, over ranks; with nothing planned for mixed batches, that is a hole."""
    agreement, told = asked(plan_of(uniform(8)), decode(8), decode(8, past_prompt=False))
    assert (agreement.entry, agreement.reason) == (None, Reason.UNCOVERED)
    assert WHY_NONE[Reason.UNCOVERED] in told[0]


def test_dummy_batch_has_no_more_tokens_than_the_joint_batch():
    """A prompt's last token is 1 token: an idle rank with 1 + K would make the batch larger."""
    plan = plan_of(piecewise(1), piecewise(8), speculative=Speculative(method=Method.EAGLE3, num_tokens=3))
    agreement = asked(plan, mixed(1, 1), Submission())[0]
    assert agreement.entry == piecewise(1)
    assert agreement.answers[1].batch.num_tokens == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
def test_agree_on_nothing_if_all_are_idle(num_ranks):
    """No forward, and no batch that stands in, whether or not graphs were captured."""
    for captured in (True, False):
        agreement, told = asked(plan_of(uniform(8)), *[Submission(captured=captured)] * num_ranks)
        assert (agreement.joint, agreement.entry, agreement.draft_tokens) == (None, None, None)
        assert {answer.dispatch.reason for answer in agreement.answers} == {Reason.IDLE}
        assert {answer.batch for answer in agreement.answers} == {None}
        assert set(told) == {"no rank has work: no forward runs"}


@pytest.mark.parametrize("idle", [True, False])
def test_agree_rejects_unplanned_roles(idle):
    """Also where no rank has work."""
    ranks = (Submission(),) if idle else (decode(1, role=Role.DRAFT_DECODE),)
    with pytest.raises(DispatchError, match="no role draft_decode"):
        agree(Dispatcher(plan_of(uniform(8))), Vector(role=Role.DRAFT_DECODE, ranks=ranks))


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        (Batch(role=Role.TARGET, num_reqs=0, num_tokens=4), "num_reqs"),
        (Batch(role=Role.TARGET, num_reqs=4, num_tokens=3), "num_tokens"),
        (Batch(role=Role.TARGET, num_reqs=4, num_tokens=4, active_loras=-1), "active_loras"),
    ],
)
def test_submission_rejects_impossible_batches(batch, name):
    """One wrong rank would be hidden behind the largest of the others."""
    with pytest.raises(InvalidValue) as error:
        Submission(batch=batch)
    assert [problem.path for problem in error.value.problems] == [("batch", name)]


def test_vector_rejects_other_roles_and_no_ranks():
    """Target and drafters agree separately."""
    with pytest.raises(InvalidValue, match="at least one rank"):
        Vector(role=Role.TARGET, ranks=())
    ranks = (Submission(), decode(1), decode(1, role=Role.DRAFT_DECODE))
    with pytest.raises(InvalidValue) as error:
        Vector(role=Role.TARGET, ranks=ranks)
    assert [problem.path for problem in error.value.problems] == [("ranks", 2, "batch", "role")]


@given(arbitrary_plans(), st.data())
def test_explain_rank_has_a_sentence_for_every_rank(plan, data):
    """Whatever is asked, each rank is told why, in a sentence without an empty part."""
    vector = data.draw(vectors(plan))
    dispatcher = Dispatcher(plan)
    agreement = agree(dispatcher, vector)
    for rank in range(len(vector.ranks)):
        told = explain_rank(dispatcher, agreement, rank)
        assert told.strip(" ;:") == told
        assert "; ;" not in told


@given(plans(max_reqs=64), st.integers(2, 16), st.sampled_from(Role))
def test_cases_are_admissible(plan, num_ranks, role):
    """Each is admissible on every rank, of as many ranks as asked, and can be shown."""
    assume(role in plan.planned)
    dispatcher = Dispatcher(plan)
    shown = cases(dispatcher, role, num_ranks)
    assert len({case.title for case in shown}) == len(shown)
    for case in shown:
        assert len(case.agreement.vector.ranks) == num_ranks
        for submitted in case.agreement.vector.ranks:
            if submitted.batch is not None:
                assert dispatcher.dispatch(submitted.batch).reason is not Reason.NOT_ADMISSIBLE
    cases_report(shown, role)


def test_cases_of_a_schedule_have_different_k():
    """And of a plan with adapters, a rank that has some."""
    speculative = Speculative(method=Method.EAGLE3, num_tokens=3, schedule=((1, 4, 3), (5, 64, 1)))
    plan = plan_of(uniform(8), speculative=speculative, lora=Lora(max_active=2))
    by_title = {case.title: case.agreement.vector for case in cases(Dispatcher(plan), Role.TARGET, 4)}
    differing = by_title["the schedule gives one rank another number of draft tokens"]
    assert {submitted.batch.query_len for submitted in differing.ranks} == {2, 4}
    adapters = by_title["one rank has adapters"]
    assert [submitted.batch.active_loras for submitted in adapters.ranks] == [2, 0, 0, 0]


@pytest.mark.parametrize("path", sorted(LOCKED.glob("*.yaml")), ids=lambda path: path.stem)
def test_locked_plans_cover_all_cases_of_ranks(path):
    """Every case of every role has an entry, or a reason other than a hole."""
    plan = codec.load_plan(path)
    for role in plan.roles:
        for case in cases(Dispatcher(plan), role.role, 8):
            assert case.agreement.reason not in (Reason.UNCOVERED, Reason.NOT_ADMISSIBLE)
