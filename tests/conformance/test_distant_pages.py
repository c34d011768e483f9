"""Pages that lie far apart, backends with a limit, and adapters: what scenes have in addition to plain attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner_conformance import Scene, distant_pages, under_test
from capture_planner_conformance.distant_pages import DistantPages
from capture_planner_conformance.probe import LayerShape, ProbeAdapters, ProbeTarget, Rows, Tables
from capture_planner_conformance.shapes import SMALL, usable_features
from capture_planner_conformance.stage import capped
from capture_planner_runner.serving.states import PageFormat

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SUBJECT = under_test("reference")
PLAIN = PageFormat(page_size=3, num_pages=9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_most_pages_begin_beyond_32_bits_and_tensors_share_none(dtype):
    """Zeroed, and in memory of their own; elements of a page are side by side."""
    pages = DistantPages.reserved(PLAIN, dtype, CPU)
    first, second = (pages.tensor((3, 2, 4), dtype, CPU) for _ in range(2))
    assert first.shape == second.shape == (9, 3, 2, 4)
    assert first.stride() == (first.stride(0), 8, 4, 1)
    begins = [page * first.stride(0) for page in range(9)]
    assert sum(at >= 1 << 31 for at in begins) > 5
    assert sum(at >= 1 << 32 for at in begins) > 3
    assert not first.double().any()
    first.copy_(torch.ones(1))
    assert not second.double().any()
    assert first.double().eq(1).all()


def test_a_machine_without_the_memory_refuses_the_feature_with_what_it_needs(monkeypatch):
    """The other scenes are run, and the report says why these are not."""
    assert usable_features(SUBJECT, SMALL[0], ("distant",)) == (("distant",), ())
    monkeypatch.setattr(distant_pages, "SPAN", 1 << 52)
    with pytest.raises(RunError, match="GiB of address space, which are not free"):
        DistantPages.reserved(PLAIN, torch.float64, CPU)
    usable, (refused,) = usable_features(SUBJECT, SMALL[0], ("distant",))
    assert usable == ()
    assert refused.name == "pages far apart"
    assert "GiB of address space" in refused.reason


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from(SMALL), st.sampled_from((0, 2)))
def test_no_full_graph_has_more_requests_than_the_backend_is_said_to_hold(most, num_reqs, shape, drafts):
    """Whichever group says so; and a limit that no batch reaches changes nothing but itself."""
    scene = Scene(shape=shape, num_reqs=num_reqs, num_tokens=24, size_tokens=(), drafts=drafts, capped=most)
    registry = capped(SUBJECT.registry, "reference", scene)
    plan = make_plan(scene.spec("reference"), SUBJECT.environment, registry)
    for role in plan.roles:
        windows = [group.support.max_num_reqs for group in role.groups]
        bound = most if most in windows else num_reqs
        assert set(windows) <= {most, None}
        assert all(entry.num_reqs <= bound for entry in role.entries if entry.mode is GraphMode.FULL)
    assert most in [group.support.max_num_reqs for group in plan.roles[0].groups]


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=6), st.lists(st.integers(0, 3), max_size=2))
def test_a_row_has_what_its_adapter_adds(lanes, active):
    """By its place among the active ones; none of a place that there is not, and none after the forward."""
    shape = LayerShape(heads=1, kv_heads=1, head_dim=2, windows=(None,))
    target = ProbeTarget(Tables(shape, 5, 6, torch.float64, CPU, 0), Rows(), 5, 6, 1, adapters=3)
    adapters, rows = ProbeAdapters(target), torch.tensor(lanes, dtype=torch.int32)
    assert len(adapters.names) == 3
    with adapters.applied(rows, torch.tensor(active, dtype=torch.int32)):
        own = [active[lane] if 0 <= lane < len(active) else 0 for lane in lanes]
        assert torch.equal(target.added, target.adapters[own])
    assert target.added is None
    assert not target.adapters[0].any()
    assert target.adapters[1:].any(dim=1).all()
