"""The KV cache of a device: as much as is left, with graphs predicted from a trial; a fake device counts bytes."""

import functools
from contextlib import nullcontext

import attrs
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner.modes import Pool, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.spec import CapturePolicy, CaptureTiming
from capture_planner_runner.capture.variants import sampled
from capture_planner_runner.graphs.reading import Reading
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.launch import cache_memory
from capture_planner_runner.launch.cache_memory import PageRange, Trial, device_pages, largest_step, predicted_graphs
from capture_planner_runner.ledger.rows import GraphCapture
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from support.launches import HERE, SPEC, CountingReference, registry_of, requests_of

pytestmark = pytest.mark.usefixtures("one_thread")
REGISTRY = registry_of(CountingReference())
PLAN = make_plan(SPEC, HERE, REGISTRY)


class FakeGauge:
    """A device whose memory is what a test says."""

    def __init__(self, total, used, step=0):
        self.total, self.gone, self.step, self.asked = total, used, step, 0

    def used(self):
        """What is gone, and all there is."""
        return self.gone, self.total

    def allocated(self):
        """More at each call: a trial reserves something."""
        self.asked += 1
        return 1000 * self.asked

    def peak(self):
        """What the largest step takes on top."""
        return 1000 * self.asked + self.step


@pytest.fixture(scope="module")
def make():
    """What assembles a runner of a plan, with few or many pages."""
    target = load_target(None, PLAN.model, device=torch.device("cpu"), dtype=torch.float64, seed=3)
    drafter = choose_drafter("random", PLAN.speculative, target, num_states=3, length=60, seed=4)
    return functools.partial(_runner, target, drafter)


def _runner(target, drafter, plan, pages):
    return Runner(plan, target, drafter, REGISTRY, RecordedGraphs(), pages=pages)


def lazily(memory):
    """The plan with all but the first graph of each role on first use, and so much memory for them."""
    timing = CaptureTiming(policy=CapturePolicy.LAZY, memory=memory, seconds_per_minute=1.0)
    return replace(PLAN, capture=timing, roles=tuple(replace(role, lazy=role.entries[1:]) for role in PLAN.roles))


def needed_of(**changes):
    """Pages of 100 bytes: at least 5, and 36 at most."""
    values = {"format": PageFormat(page_size=4, num_pages=1), "least": 5, "most": 36, "memory": 100} | changes
    return PageRange(**values)


@given(
    st.integers(0, 20_000),
    st.integers(0, 4_000),
    st.floats(0.1, 1),
    st.tuples(*[st.integers(0, 4_000)] * 3),
    st.none() | st.integers(0, 4_000),
)
def test_a_cache_takes_what_is_left_and_no_more(total, used, share, trial, reserved):
    """All parts together stay within the share; a page more would not, or is of no use.

    What is reserved for graphs on first use is one of them, and the trial is of what is captured at start.
    """
    fixed, step, graphs = trial
    plan = PLAN if reserved is None else lazily(reserved)
    later = reserved or 0
    needed, found = needed_of(), Trial(fixed=fixed, step=step, graphs=graphs, captures=9)
    is_small = needed.most * needed.memory <= cache_memory.NO_TRIAL * (share * total - used - later)
    left = int(share * total) - used - fixed - step - graphs - later - needed.memory
    tried = []
    fits = is_small or left // needed.memory >= needed.least
    refusal = nullcontext() if fits else pytest.raises(RunError, match="raise --memory-utilization")
    pages = chosen = None
    with pytest.MonkeyPatch.context() as patch, refusal:
        patch.setattr(cache_memory, "run_trial", lambda plan, *arguments: tried.append(plan) or found)
        pages, chosen = device_pages(plan, needed, share, None, FakeGauge(total, used), None)
    assert (pages is not None) == fits
    assert all(each.num_graphs == plan.num_graphs - plan.num_lazy for each in tried)
    event(f"fits: {fits}, without a trial: {is_small}")
    if is_small:
        assert (pages.num_pages, chosen.predicted) == (1 + needed.most, 0)
    elif fits:
        assert pages.num_pages == 1 + min(needed.most, left // needed.memory)
        assert used + fixed + step + graphs + later + pages.num_pages * needed.memory <= share * total
        assert ("capture.memory" in chosen.reason) == (later > 0)
        assert (chosen.predicted, "9 captures" in chosen.reason) == (graphs, True)


def test_a_trial_reads_what_a_small_cache_leaves_and_releases_it(make):
    """Buffers, the largest step, and graphs of each kind; backends are released."""
    backend = REGISTRY["reference"].backend
    gauge = FakeGauge(10_000, 0, step=77)
    trial = cache_memory.run_trial(PLAN, needed_of(memory=10), make, gauge, None)
    assert trial.step == 77
    assert trial.captures == sampled(PLAN).num_graphs <= 3 * 2 * len(PLAN.roles)
    assert trial.graphs > 0
    assert backend.held == 0


@pytest.mark.parametrize("tokens", [1, 12, 47, 200])
def test_the_largest_step_has_all_tokens_that_limits_admit(tokens):
    """In prompts that the model has room for, one more token each."""
    plan = replace(PLAN, limits=attrs.evolve(PLAN.limits, max_num_tokens=tokens))
    requests = largest_step(plan)
    longest = PLAN.model.max_model_len - 1
    assert sum(len(each.prompt) for each in requests) == min(tokens, longest * PLAN.limits.max_num_reqs)
    assert all(each.length <= PLAN.model.max_model_len for each in requests)


def test_a_plan_is_sampled_by_kind():
    """The largest, the middle and the smallest graph of each role and mode; all else runs eager."""
    few = sampled(PLAN)
    for role, before in zip(few.roles, PLAN.roles, strict=True):
        kinds = {(entry.mode, entry.query_len is None) for entry in before.entries}
        assert {(entry.mode, entry.query_len is None) for entry in role.entries} == kinds
        for mode, mixed in kinds:
            of_kind = [e for e in before.entries if (e.mode, e.query_len is None) == (mode, mixed)]
            chosen = [e for e in role.entries if (e.mode, e.query_len is None) == (mode, mixed)]
            assert len(chosen) == min(3, len(of_kind))
            assert {max(of_kind, key=lambda e: e.num_tokens), min(of_kind, key=lambda e: e.num_tokens)} <= set(chosen)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1 << 22)), min_size=2, max_size=2), st.integers(0, 5000))
def test_graphs_are_predicted_by_their_kind(costs, limit):
    """The first graph pays for the pool; each other one what a second took, and the driver's part at least."""
    role = PLAN.role(Role.TARGET)
    plan = replace(PLAN, roles=(role,), pool=Pool.SHARED)
    kinds = {(entry.mode, entry.query_len is None) for entry in role.entries}
    captured, memory, driver = [], 0, 0
    for mode, mixed in sorted(kinds, key=str):
        entries = [e for e in role.entries if (e.mode, e.query_len is None) == (mode, mixed)]
        for entry, (grown, outside) in zip(entries, costs, strict=False):
            at = Reading(used=0, held=0)
            readings = (at, at, Reading(used=outside, held=0))
            captured.append(
                GraphCapture(role=role.role, entry=entry, seconds=0, memory=grown, alone=0, readings=readings)
            )
        more = len(entries) - 1
        second = costs[1] if more else (0, 0)
        memory += costs[0][0] + more * second[0]
        driver += costs[0][1] + more * max(second[1], cache_memory.LEAST_DRIVER)
    assert predicted_graphs(plan, captured, None) == memory + driver
    assert predicted_graphs(plan, captured, limit) == min(memory, limit) + driver


def test_pages_are_of_the_workload_and_of_the_limits():
    """The longest request with its drafts, and all places at full length."""
    target = load_target(None, PLAN.model, device=torch.device("cpu"), dtype=torch.float64, seed=3)
    needed = PageRange.of(PLAN, target, requests_of(20), 4)
    assert 1 <= needed.least <= needed.most == PLAN.limits.max_num_reqs * PLAN.model.max_model_len // 4
    assert needed.of_number(7).num_pages == 8
