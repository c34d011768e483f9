"""Random plans within limits that a test can ask exhaustively, most of them with a schedule if they speculate."""

from __future__ import annotations

import attrs
from hypothesis import reject
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner.testing import deployments


@st.composite
def vllm_plans(draw: st.DrawFn, *, max_reqs: int = 64, max_tokens: int = 512) -> Plan:
    """Return plans that the planner made."""
    inputs = draw(deployments(max_reqs=max_reqs, max_tokens=max_tokens))
    speculative = inputs.spec.speculative
    if speculative is not None and draw(st.integers(0, 3)):
        lengths = draw(st.lists(st.integers(0, speculative.num_tokens), min_size=1, max_size=3))
        width = draw(st.integers(1, 24))
        tiers = tuple((1 + index * width, (1 + index) * width, k) for index, k in enumerate(lengths))
        spec = replace(inputs.spec, speculative=replace(speculative, schedule=tiers))
        inputs = attrs.evolve(inputs, spec=spec)
    try:
        return inputs.plan()
    except PlanningError:
        reject()
