"""Intervals of an observed vLLM: what each step takes until the next, by a stand-in with a clock of its own."""

import statistics
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner_vllm.inside import observe_steps
from support.vllm_observed import observed, process, started, step


@given(
    st.lists(
        st.tuples(
            st.integers(1, 14), st.integers(0, 2), st.floats(1e-3, 4e-3), st.floats(1e-3, 4e-3), st.sampled_from("srnd")
        ),
        min_size=1,
        max_size=30,
    ),
    st.booleans(),
)
def test_intervals_are_each_steps_launch_and_its_wait(taken, ahead):
    """Against a loop over the steps: each follows another, or what lies before it ends what is known.

    A step of which all requests are new may have been waited for, and a dummy run is no step. Launched ahead, a step's
    wait is the one after its follower's launch.
    """
    clock, expected, open_, before = SimpleNamespace(now=0.0), {}, [], 0.0
    with process() as folder, pytest.MonkeyPatch.context() as patch:
        runner = started(ahead=ahead)
        patch.setattr(observe_steps, "perf_counter", lambda: clock.now)
        for num_reqs, prompts, launch, wait, kind in taken:
            scheduled = step(num_reqs, 4, prompts)
            if kind == "n":
                scheduled.scheduled_new_reqs = list(scheduled.num_scheduled_tokens)
            if kind == "d":
                runner._dummy_run(8)
            if kind in "nd":
                open_.clear()
            if len(open_) > ahead:
                shape, own = open_.pop(0)
                expected.setdefault(shape, []).append((own + before) * 1e3)
            runner.execute_model(scheduled)
            clock.now += launch
            runner.sample_tokens(None).get_output()
            clock.now += wait
            open_.append(((num_reqs + prompts, scheduled.total_num_scheduled_tokens), launch))
            before = wait
        runner.shutdown()
        target, *drafts = observed(folder).roles
    seen = {(each.num_reqs, each.num_tokens): each for each in target.batches}
    assert {shape: each.intervals for shape, each in seen.items() if each.intervals} == {
        shape: len(times) for shape, times in expected.items()
    }
    for shape, times in expected.items():
        assert seen[shape].interval == pytest.approx(statistics.fmean(times), rel=1e-3, abs=1e-4)
        error = statistics.stdev(times) / len(times) ** 0.5 if len(times) > 1 else None
        assert seen[shape].interval_error == (None if error is None else pytest.approx(error, rel=1e-3, abs=1e-4))
    assert not any(each.intervals for role in drafts for each in role.batches)
