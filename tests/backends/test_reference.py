import pytest

from capture_planner.modes import GraphSupport, Refresh, Role
from capture_planner.records.backend import PaddingContract
from capture_planner.records.spec import Limits
from capture_planner_reference import Reference

BACKEND = Reference()


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("capability", [None, "7.0", "9.0", "12.0"])
def test_reference_supports_every_batch_on_every_device(machine, layers, graph, role, capability):
    where = layers(), machine(capability)
    assert BACKEND.support(role, *where).level is GraphSupport.ALWAYS
    assert BACKEND.refresh(role, *where) is Refresh.IN_GRAPH
    assert BACKEND.padding(role, *where) == PaddingContract()
    limits = Limits(max_num_reqs=8, max_num_tokens=64)
    workspace = BACKEND.workspace(role, *where, [graph(8)], limits)
    assert (workspace.device, workspace.pinned) == (0, 0)


def test_support_names_the_kind_of_graph(machine, layers):
    assert "recorded" in BACKEND.support(Role.TARGET, layers(), machine(None)).reason
    assert "CUDA" in BACKEND.support(Role.TARGET, layers(), machine("9.0")).reason
