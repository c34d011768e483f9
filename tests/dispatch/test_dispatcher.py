"""The dispatcher and the entry: single answers, each with its reason."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.errors import DispatchError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry, Kind, Rejection
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import Model
from capture_planner.records.plan import Plan, RolePlan, Waiver
from capture_planner.records.spec import Limits, Lora
from capture_planner.testing import arbitrary_plans
from support import reference

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE
MODEL = Model(name="m", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=4096)


def plan_of(*entries, waivers=(), most=16, lora=None, machine):
    """A plan of one role, made by hand."""
    role = RolePlan(role=Role.TARGET, requested=FULL, mode=FULL, groups=(), entries=entries, waivers=waivers)
    return Plan(
        spec_digest="sha256:" + "0" * 64,
        environment=machine,
        model=MODEL,
        limits=Limits(max_num_reqs=most, max_num_tokens=64),
        lora=lora,
        roles=(role,),
    )


@pytest.fixture
def hand_made():
    """Make a plan from entries."""
    machine = Environment(name="e", device=Device(kind=DeviceKind.CPU, name="c", memory=1))
    return lambda *entries, **options: plan_of(*entries, machine=machine, **options)


def uniform(num_reqs, query_len=1, **changes):
    """A full uniform graph."""
    shape = {"num_tokens": num_reqs * query_len, "num_reqs": num_reqs, "query_len": query_len}
    return Entry(**{"mode": FULL} | shape | changes)


def test_dispatch_skips_nearer_graphs_of_other_query_lengths(hand_made):
    """5 requests of 3 tokens take 18 tokens of query length 3, not 16 of another (vllm#53407)."""
    plan = hand_made(uniform(6, 3), uniform(8, 2), Entry(mode=PIECEWISE, num_tokens=16))
    assert Dispatcher(plan).dispatch_counts("target", 5, 15, 3) == Dispatch(uniform(6, 3), 3, 1)


def test_dispatch_prefers_full_to_smaller_piecewise(hand_made):
    """A step with attention in the graph is cheaper than one without."""
    plan = hand_made(uniform(16), Entry(mode=PIECEWISE, num_tokens=4))
    assert Dispatcher(plan).dispatch_counts("target", 4, 4, 1).entry == uniform(16)
    mixed = Entry(mode=FULL, num_tokens=16, num_reqs=16)
    plan = hand_made(mixed, Entry(mode=PIECEWISE, num_tokens=4))
    assert [Dispatcher(plan).dispatch_counts("target", 2, tokens).entry for tokens in (3, 5)] == [mixed, mixed]


def test_cached_answers_keep_request_padding_apart(hand_made):
    """Two mixed batches of as many tokens and different requests are padded differently."""
    entry = Entry(mode=FULL, num_tokens=8, num_reqs=8)
    dispatcher = Dispatcher(hand_made(entry))
    assert dispatcher.dispatch_counts("target", 2, 5).padded_reqs == 6
    assert dispatcher.dispatch_counts("target", 3, 5).padded_reqs == 5
    assert dispatcher.dispatch_counts("target", 2, 5).padded_reqs == 6


def test_cached_answers_do_not_admit_too_many_requests(hand_made):
    """An answer is kept for batches like it, and no others."""
    dispatcher = Dispatcher(hand_made(Entry(mode=PIECEWISE, num_tokens=4), lora=Lora(max_active=2)))
    assert dispatcher.dispatch_counts("target", 2, 60).reason is Reason.UNCOVERED
    assert dispatcher.dispatch_counts("target", 20, 60).reason is Reason.NOT_ADMISSIBLE
    assert dispatcher.dispatch_counts("target", 2, 3, active_loras=1).reason is Reason.UNCOVERED


def test_cache_keeps_decodes_and_mixed_batches_apart(hand_made):
    """Nor the other way round, whichever came first."""
    uniform_one, any_one = uniform(128, 3), Entry(mode=PIECEWISE, num_tokens=400)
    for order in (1, -1):
        dispatcher = Dispatcher(hand_made(uniform_one, any_one))
        for batch, entry in [
            ((2, 300), any_one),
            ((100, 300, 3), uniform_one),
            ((100, 299, 3), any_one),
            ((100, 301, 3), any_one),
            ((100, 300, 3, False), any_one),
        ][::order]:
            assert dispatcher.dispatch_counts("target", *batch).entry == entry


def test_cache_keeps_decodes_of_varying_lengths_apart(hand_made):
    """By their longest request, from each other and from batches of as many requests and tokens without one."""
    short, long = (Entry(mode=FULL, num_tokens=4 * most, num_reqs=4, max_query_len=most) for most in (2, 3))
    mixed = Entry(mode=PIECEWISE, num_tokens=16)
    for order in (1, -1):
        dispatcher = Dispatcher(hand_made(short, long, mixed))
        for most, past_prompt, entry in [(2, True, short), (3, True, long), (None, True, mixed), (3, False, mixed)][
            ::order
        ]:
            counts = {"past_prompt": past_prompt, "max_query_len": most}
            first, second = (dispatcher.dispatch_counts("target", 3, 5, **counts) for _ in range(2))
            assert first.entry == entry
            assert second is first


@pytest.mark.parametrize("num_reqs", [-1, 0, 6])
def test_inadmissible_batch_has_no_graph(hand_made, num_reqs):
    """No requests, or more of them than tokens; also after a batch of as many tokens had one."""
    dispatcher = Dispatcher(hand_made(Entry(mode=PIECEWISE, num_tokens=8)))
    for _ in range(2):
        answer = dispatcher.dispatch_counts("target", num_reqs, 5)
        assert (answer.reason, answer.padded_tokens, answer.padded_reqs) == (Reason.NOT_ADMISSIBLE, 0, 0)
        assert dispatcher.dispatch_counts("target", 2, 5, active_loras=-1).reason is Reason.NOT_ADMISSIBLE
        assert dispatcher.dispatch_counts("target", 2, 5).entry is not None


def test_uniform_graph_is_limited_by_its_tokens(hand_made):
    """A plan made by hand may have one of 16 tokens for 6 requests of 3: it serves 5 (CP010)."""
    short = uniform(6, 3, num_tokens=16)
    dispatcher = Dispatcher(hand_made(short))
    assert dispatcher.dispatch_counts("target", 5, 15, 3).entry == short
    assert dispatcher.dispatch_counts("target", 6, 18, 3).entry is None
    assert Dispatcher(hand_made(uniform(4, 3, num_tokens=18))).dispatch_counts("target", 5, 15, 3).entry is None


def test_answers_are_cached(hand_made):
    """The same batch has the same answer, not another like it."""
    entries = uniform(8), Entry(mode=PIECEWISE, num_tokens=8)
    dispatcher = Dispatcher(hand_made(*entries, lora=Lora(max_active=4)))
    for batch in [(4, 4, 1), (9, 9, 1), (1, 5), (2, 5), (5, 5), (2, 60), (20, 60), (6, 5), (2, 5, None, True, 1)]:
        assert dispatcher.dispatch_counts("target", *batch) is dispatcher.dispatch_counts("target", *batch)


def test_cache_is_bounded(hand_made):
    """65,536 of them, and then from the beginning: memory is bounded whatever is asked."""
    dispatcher = Dispatcher(hand_made(uniform(4), Entry(mode=PIECEWISE, num_tokens=10**6)))

    def kept():
        decodes, mixed = (sum(map(len, d.values())) for d in (dispatcher._decodes, dispatcher._mixed))
        return decodes + mixed + len(dispatcher._others)

    dispatcher.dispatch_counts("target", 4, 4, 1)
    dispatcher.dispatch_counts("target", 20, 1, 2)
    for num_tokens in range(1, (1 << 16) - 1):
        dispatcher.dispatch_counts("target", 1, num_tokens, past_prompt=False)
    assert kept() == 1 << 16
    dispatcher.dispatch_counts("target", 1, 1 << 16, past_prompt=False)
    assert kept() == 1
    assert dispatcher.dispatch_counts("target", 4, 4, 1).entry == uniform(4)


def test_mixed_full_graph_is_limited_by_its_requests(hand_made):
    """A mixed full graph of 2 requests does not serve 3, though its tokens would."""
    small, large = Entry(mode=FULL, num_tokens=8, num_reqs=2), Entry(mode=FULL, num_tokens=16, num_reqs=4)
    dispatcher = Dispatcher(hand_made(small, large))
    assert dispatcher.dispatch_counts("target", 2, 8).entry == small
    assert dispatcher.dispatch_counts("target", 3, 8).entry == large
    assert dispatcher.dispatch_counts("target", 2, 12).entry == large
    assert dispatcher.dispatch_counts("target", 5, 8).entry is None
    piecewise = Entry(mode=PIECEWISE, num_tokens=16)
    dispatcher = Dispatcher(hand_made(small, piecewise))
    assert dispatcher.dispatch_counts("target", 3, 8) == Dispatch(piecewise, 8, 0)
    assert dispatcher.dispatch_counts("target", 2, 8) == Dispatch(small, 0, 0)


def test_waived_batch_has_the_waivers_reason(hand_made):
    """The one that names the batch, and itself."""
    decode = Waiver(kind=Kind.DECODE, query_len=1, first=1, last=4, reason=Reason.BUDGET, message="so")
    mixed = Waiver(kind=Kind.MIXED, first=1, last=64, reason=Reason.MODE, message="so")
    dispatcher = Dispatcher(hand_made(waivers=(decode, mixed)))
    assert dispatcher.dispatch_counts("target", 4, 4, 1) == Dispatch(None, reason=Reason.BUDGET, waiver=decode)
    assert dispatcher.dispatch_counts("target", 5, 5, 1).reason is Reason.UNCOVERED
    assert dispatcher.dispatch_counts("target", 5, 5, 1, past_prompt=False).waiver is mixed
    assert dispatcher.dispatch_counts("target", 5, 5, 1).mode is GraphMode.NONE


def test_lora_count_is_rounded_up_to_a_case(hand_made):
    """To the next case; more than the last has no graph."""
    dispatcher = Dispatcher(hand_made(uniform(8), uniform(8, active_loras=4), lora=Lora(max_active=3)))
    assert dispatcher.dispatch_counts("target", 8, 8, 1, active_loras=3).entry.active_loras == 4
    assert dispatcher.dispatch_counts("target", 8, 8, 1, active_loras=5).reason is Reason.NOT_ADMISSIBLE


def test_graph_for_more_loras_serves_fewer(hand_made):
    """Where those for as many as there are have no room."""
    decode, mixed = uniform(8, active_loras=4), Entry(mode=PIECEWISE, num_tokens=32, active_loras=4)
    plan = hand_made(uniform(4), decode, Entry(mode=PIECEWISE, num_tokens=16), mixed)
    assert Dispatcher(plan).dispatch_counts("target", 6, 6, 1).entry == decode
    assert Dispatcher(plan).dispatch_counts("target", 2, 30).entry == mixed


def test_drafter_ignores_loras(hand_made):
    """It has no graphs for them, and serves the batch all the same."""
    plan = hand_made(uniform(4), lora=Lora(max_active=4))
    plan = attrs.evolve(plan, roles=(attrs.evolve(plan.roles[0], role=Role.DRAFT_PREFILL),))
    for loras in (0, 1, 3):
        assert Dispatcher(plan).dispatch_counts("draft_prefill", 4, 4, 1, active_loras=loras).entry == uniform(4)
        assert reference.dispatch(plan, Batch.decode(Role.DRAFT_PREFILL, 4, 1, loras)) == uniform(4)


def test_dispatch_rejects_unplanned_roles(hand_made):
    """The only question that has no answer."""
    dispatcher = Dispatcher(hand_made())
    for role in (Role.DRAFT_DECODE, "draft_decode", "nonsense"):
        with pytest.raises(DispatchError, match="the plan has no role"):
            dispatcher.dispatch_counts(role, 1, 1)


BATCH = Batch(role=Role.TARGET, num_reqs=4, num_tokens=8, query_len=2)


@pytest.mark.parametrize(
    ("entry", "batch", "rejection"),
    [
        (uniform(4, 2), BATCH, None),
        (uniform(4, 3), BATCH, Rejection.QUERY_LEN),
        (uniform(4, 2), attrs.evolve(BATCH, query_len=None), Rejection.NOT_UNIFORM),
        (uniform(4, 2), attrs.evolve(BATCH, past_prompt=False), Rejection.PROMPT),
        (uniform(3, 2), BATCH, Rejection.REQUESTS),
        (Entry(mode=PIECEWISE, num_tokens=7), BATCH, Rejection.TOKENS),
        (uniform(4, 2), attrs.evolve(BATCH, active_loras=1), Rejection.LORAS),
        (uniform(4, 2, draft_steps=2), BATCH, Rejection.DRAFT_STEPS),
    ],
)
def test_entry_rejections(entry, batch, rejection):
    """Each reason once."""
    assert entry.rejection(batch, 3) is rejection


@given(arbitrary_plans(), st.data())
def test_capture_order_is_piecewise_first_and_largest_first(plan, data):
    """Later graphs fit into the memory of earlier ones."""
    entries = data.draw(st.sampled_from(plan.roles)).entries
    kinds = [entry.mode is FULL for entry in entries]
    assert kinds == sorted(kinds)
    for mode in (PIECEWISE, FULL):
        tokens = [entry.num_tokens for entry in entries if entry.mode is mode]
        assert tokens == sorted(tokens, reverse=True)


@given(arbitrary_plans(), st.data())
def test_entry_costs_are_total(plan, data):
    """The order of preference is total, but for uniform lengths and chains that no batch shares."""
    entries = list(dict.fromkeys(data.draw(st.sampled_from(plan.roles)).entries))
    for one in entries:
        for other in entries:
            if one != other and one.cost == other.cost:
                differ = {n for n in ("num_reqs", "query_len", "draft_steps") if getattr(one, n) != getattr(other, n)}
                assert differ & {"query_len", "draft_steps"}


def test_entry_as_text():
    """Mode, tokens, requests, length, adapters and chain."""
    entry = uniform(4, 2, active_loras=3, draft_steps=2)
    assert str(entry) == "FULL 8 tokens, 4 requests of 2, 3 LoRA, chain of 2"
    assert str(Entry(mode=PIECEWISE, num_tokens=8)) == "PIECEWISE 8 tokens"


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (("x", 1), "num_reqs is 'x'; expected whole numbers"),
        ((None, 1), "num_reqs is None"),
        ((1, None), "num_tokens is None"),
        ((1.5, 3), "num_reqs is 1.5"),
        ((2, 2.5), "num_tokens is 2.5"),
        ((1, float("nan")), "num_tokens is nan"),
        ((None, [1]), r"num_reqs is None and num_tokens is \[1\]"),
    ],
)
def test_counts_that_are_no_numbers_are_named(hand_made, counts, says):
    """Before and after the same batch with numbers was answered."""
    dispatcher = Dispatcher(hand_made(Entry(mode=FULL, num_tokens=4, num_reqs=4, query_len=1)))
    for _ in range(2):
        with pytest.raises(DispatchError, match=says):
            dispatcher.dispatch_counts("target", *counts)
        dispatcher.dispatch_counts("target", 1, 1, 1)
        dispatcher.dispatch_counts("target", 1, 2)
