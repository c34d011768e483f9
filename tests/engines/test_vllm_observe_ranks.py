"""Observing vLLM's data-parallel ranks, by a stand-in: what each brought to a step, and steps without work."""

import os
import sys
from collections import Counter
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.modes import GraphMode, Reason, Role
from support.vllm_observed import observed, process, run, started, step


@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 14), st.sampled_from((1, 4)), st.integers(0, 2), st.integers(0, 2), st.integers(1, 300)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_vectors_are_what_the_ranks_summed(steps):
    """Each step of the target with what every rank brought, and what this one ran; steps without work are counted."""
    expected: Counter[tuple[object, ...]] = Counter()
    with process() as folder:
        runner = started(ranks=2)
        group = sys.modules["vllm.distributed.parallel_state"].get_dp_group()
        for num_reqs, query_len, prompts, mode, tokens in steps:
            group.peers[1] = (tokens, mode, 0, -1, 0, 1, 0)
            run(runner, step(num_reqs, query_len, prompts))
            rows = [tuple(row) for row in group.sums[-1]]
            desc = runner.answers[-1][1]["target"]
            expected[rows[5], rows[0], rows[2], rows[1], desc.num_tokens if desc.cg_mode else None] += 1
            runner._dummy_run(4, uniform_decode=True)
        runner.shutdown()
        seen = observed(folder)
    (target,) = (each for each in seen.roles if each.role is Role.TARGET)
    numbers = {"NONE": 0, "PIECEWISE": 1, "FULL": 2}
    found: Counter[tuple[object, ...]] = Counter()
    for each in target.vectors:
        size = None if each.graph is None else target.graphs[each.graph].entry.num_tokens
        lengths = tuple(length or 0 for length in each.query_len)
        modes = tuple(numbers[mode.value] for mode in each.modes)
        found[each.num_reqs, each.num_tokens, lengths, modes, size] += each.steps
    assert found == expected
    assert target.steps == len(steps) == seen.idle_steps
    alone = [each.modes[0] for each in target.vectors if each.reason is Reason.RANK]
    assert all(mode is not GraphMode.NONE for mode in alone)


def test_replicas_that_share_nothing_are_told_apart():
    """VLLM gives each replica of a model without experts rank 0 of 1, and its index."""
    with process() as folder:
        runner = started()
        runner.shutdown()
        assert observed(folder).replica == 0
    with process() as folder, mock.patch("support.vllm_observed.INDEX", 3):
        started().shutdown()
        (path,) = folder.glob("*.yaml")
        seen = codec.load_observation(path)
    assert (seen.replica, seen.rank, path.name) == (3, 0, f"vllm.replica3.rank0.{os.getpid()}.yaml")
