"""The pool of recurrent states in a plan."""

import pytest
from hypothesis import given

from capture_planner import codec
from capture_planner.analysis.lint import lint
from capture_planner.errors import InvalidDocument
from capture_planner.modes import Role
from capture_planner.records.spec import Spec
from capture_planner.testing import plans


@given(plans())
def test_the_pool_has_a_row_for_each_padded_request_and_one_for_padding(plan):
    """Of models with recurrent layers; their target names the rows, padded with the null state's."""
    target = {field.name: field for field in plan.role(Role.TARGET).inputs}
    if plan.model.recurrent is None:
        assert plan.states is None
        assert "state_indices" not in target
    else:
        most = max(plan.limits.max_num_reqs, *(e.num_reqs or 0 for role in plan.roles for e in role.entries), 0)
        k = plan.speculative.num_tokens if plan.speculative else 0
        pool = plan.states
        assert (pool.rows, pool.positions) == (most + 1, 1 + k)
        each = pool.rows * pool.positions * plan.model.recurrent.layers
        assert pool.size >= each * plan.model.recurrent.state // plan.parallel.tensor
        assert target["state_indices"].value == 0
    assert "CP046" not in {found.rule.code for found in lint(plan)}


def test_one_layer_at_least_attends():
    """Groups have the layers that attend, and the error says so."""
    text = """
version: 1
model: {name: m, num_layers: 4, num_heads: 4, num_kv_heads: 2, head_dim: 16, max_model_len: 64, recurrent: {RECURRENT}}
limits: {max_num_reqs: 4, max_num_tokens: 16}
backend: reference
"""
    with pytest.raises(InvalidDocument, match="4 of 4 layers, and one at least attends"):
        codec.loads(text.replace("RECURRENT", "layers: 4, state: 16"), Spec)
    groups = "roles: {target: {groups: [{name: all, layers: 4}]}}\n"
    with pytest.raises(InvalidDocument, match="the groups have 4 layers, the model 1 that attend"):
        codec.loads(text.replace("RECURRENT", "layers: 3, state: 16") + groups, Spec)
    assert codec.loads(text.replace("RECURRENT", "layers: 3, state: 16"), Spec).num_layers(Role.TARGET) == 1
