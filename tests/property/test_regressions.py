"""Public bugs, by their threads: each is a batch or a plan that must be right for ever."""

import attrs
import pytest

from capture_planner.analysis.lint import lint
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.planning.planner import plan
from capture_planner.planning.sizing import engine_lists as engines
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.testing import FakeBackend

GPU = Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=80 << 30, multiprocessors=132)
MACHINE = Environment(name="h100", device=GPU)
SUPPORT = Support(level=GraphSupport.ALWAYS, reason="told")
ALPHA = FakeBackend(name="alpha", supports=dict.fromkeys(Role, SUPPORT))
REGISTRY = Registry([RegisteredBackend(backend=ALPHA, distribution="d", version="1")])
MODEL = Model(name="m", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=4096)


def planned(max_num_reqs=256, num_tokens=None, schedule=(), **changes):
    """The plan of a small model on a backend that can do everything."""
    eagle = Speculative(method=Method.EAGLE, num_tokens=num_tokens, schedule=schedule) if num_tokens else None
    spec = Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=max_num_reqs, max_num_tokens=8192),
        backend="alpha",
        speculative=eagle,
        **changes,
    )
    return plan(spec, MACHINE, REGISTRY)


@pytest.mark.parametrize("policy", [Policy.DEFAULT, Policy.VLLM, Policy.SGLANG, Policy.POWERS_OF_TWO])
def test_vllm_28207_uniform_sizes_are_multiples_of_the_query_length(policy):
    """vllm#28207: with K = 2, each uniform size of the target is a multiple of 3."""
    made = planned(num_tokens=2, sizes=Sizes(policy=policy))
    uniform = [e.num_tokens for e in made.role(Role.TARGET).entries if e.query_len is not None]
    assert uniform
    assert all(size % 3 == 0 for size in uniform)


def test_vllm_39773_piecewise_draft_decode_is_found():
    """vllm#39773: a draft decode that somebody planned PIECEWISE is an error of the lint."""
    made = planned(num_tokens=3)
    decode = made.role(Role.DRAFT_DECODE)
    wrong = replace(decode, mode=GraphMode.PIECEWISE, entries=(Entry(mode=GraphMode.PIECEWISE, num_tokens=8),))
    assert "CP030" not in {finding.rule.code for finding in lint(made)}
    broken = replace(made, roles=(*made.roles[:2], wrong))
    assert "CP030" in {finding.rule.code for finding in lint(broken)}


@pytest.mark.parametrize("policy", [Policy.DEFAULT, Policy.POWERS_OF_TWO])
def test_vllm_54933_the_largest_decode_is_covered(policy):
    """vllm#54933: 6 requests of 7 tokens are 42; 42 is a size, not 40."""
    made = planned(max_num_reqs=6, num_tokens=6, sizes=Sizes(policy=policy))
    answer = Dispatcher(made).dispatch_counts(Role.TARGET, 6, 42, 7)
    assert answer.mode is GraphMode.FULL
    assert answer.entry.num_tokens == 42


def captured_by_vllm(schedule):
    """The full graphs of vLLM 0.33: each query length of the schedule at each size."""
    most_k = max(k for _, _, k in schedule)
    tokens = engines.vllm_tokens(
        max_num_reqs=256,
        max_num_tokens=8192,
        query_len=1 + most_k,
        platform_max=512,
        tiers=[(1 + k, last) for _, last, k in schedule],
    )
    return [
        Entry(mode=GraphMode.FULL, num_tokens=n * q, num_reqs=n, query_len=q)
        for q in sorted({1 + k for *_, k in schedule})
        for n in engines.vllm_requests(tokens, query_len=q, max_query_len=1 + most_k, max_num_reqs=256)
    ]


def vllm_dispatch(entries, num_reqs, q):
    """Only the smallest captured number of tokens that holds the batch is looked at."""
    sizes = [entry.num_tokens for entry in entries if entry.num_tokens >= num_reqs * q]
    group = [entry for entry in entries if sizes and entry.num_tokens == min(sizes)]
    fits = [entry for entry in group if entry.query_len == q and entry.num_reqs >= num_reqs]
    return fits[0] if fits else None


SCHEDULES = [
    (((1, 16, 2), (17, 256, 1)), 20, 102, 53),
    (((1, 16, 5), (17, 64, 3), (65, 256, 1)), 44, 150, 69),
    (((1, 16, 4), (17, 64, 2), (65, 256, 0)), 80, None, None),
]


@pytest.mark.parametrize(("schedule", "misses", "captured", "reachable"), SCHEDULES)
def test_vllm_53407_nearest_size_misses_full_graphs_and_next_fit_none(schedule, misses, captured, reachable):
    """vllm#53407, #56136: over vLLM's own graphs it misses 20, 44 and 80 of 256 sizes; we miss none."""
    entries = captured_by_vllm(schedule)
    k_of = {n: k for first, last, k in schedule for n in range(first, last + 1)}
    able = {n for n, k in k_of.items() if any(e.query_len == 1 + k and e.num_reqs >= n for e in entries)}
    answers = {n: vllm_dispatch(entries, n, 1 + k) for n, k in k_of.items()}
    assert len([n for n in able if answers[n] is None]) == misses
    if captured is not None:
        assert len(entries) == captured
        assert len(set(answers.values()) - {None}) == reachable
    dispatcher = Dispatcher(_with_target(schedule, entries))
    ours = {n for n, k in k_of.items() if dispatcher.dispatch_counts("target", n, n * (1 + k), 1 + k).entry}
    assert ours == able


@pytest.mark.parametrize("schedule", [schedule for schedule, *_ in SCHEDULES])
def test_own_plan_of_a_dynamic_schedule_has_no_unreachable_graph(schedule):
    """Law 4 on the same schedules: every decode graph is reached, and no decode misses one."""
    made = planned(num_tokens=max(k for *_, k in schedule), schedule=schedule)
    dispatcher, entries = Dispatcher(made), made.role("target").entries
    answers = {
        dispatcher.dispatch_counts("target", n, n * (1 + k), 1 + k).entry
        for first, last, k in schedule
        for n in range(first, last + 1)
    }
    assert None not in answers
    assert {e for e in entries if e.query_len is not None} == {e for e in answers if e.query_len is not None}


def _with_target(schedule, entries) -> Plan:
    made = planned(num_tokens=max(k for *_, k in schedule), schedule=schedule)
    target = replace(made.role("target"), entries=tuple(entries), waivers=())
    return attrs.evolve(made, roles=(target, *made.roles[1:]))
