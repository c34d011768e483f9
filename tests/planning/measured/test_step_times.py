"""Times of steps with every size are those that a table is judged against."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import Steps, every_size, judge
from capture_planner.records.batch import Batch
from capture_planner.records.model import Method, Speculative
from capture_planner.testing import specs
from support.examples import at_most
from support.tuning import profile

DRAFTS = Speculative(method=Method.EAGLE3, num_tokens=3)


@at_most(30)
@given(specs(max_reqs=24, max_tokens=96, measured=None), st.data())
def test_a_step_takes_what_every_size_takes(spec, data):
    """In any modes, of decodes and of mixed batches."""
    number = data.draw(st.integers(1, 24))
    batch = data.draw(st.sampled_from((Batch.decode(Role.TARGET, number, 4), Batch.mixed(Role.TARGET, number, 90))))
    mode = data.draw(st.sampled_from((None, GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE)))
    modes = dict.fromkeys(Role, GraphMode.FULL_AND_PIECEWISE if mode is None else mode)
    costs = Costs(profile(Role, speculative=DRAFTS))
    judged = judge(lambda batch: None, Steps({batch: 1}), costs, spec, modes)
    assert every_size(costs, spec, None if mode is None else modes)(batch) == pytest.approx(judged.every_size_ms)
