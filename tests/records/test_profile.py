"""Profiles refuse what no machine can have measured, and files of them are told from all others."""

import pytest

from capture_planner import codec
from capture_planner.errors import InvalidDocument, InvalidValue
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner.records.profile import CostCurve, Profile
from capture_planner.records.spec import Spec

CURVE = CostCurve(role=Role.TARGET, mode=GraphMode.FULL, query_len=1, tokens=(1, 8), milliseconds=(1.0, 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": GraphMode.FULL_AND_PIECEWISE}, "a pass runs PIECEWISE, FULL or NONE"),
        ({"tokens": (8, 1)}, "ascending order"),
        ({"tokens": (), "milliseconds": ()}, "ascending order"),
        ({"milliseconds": (1.0,)}, "1 times for 2 sizes"),
    ],
)
def test_a_curve_refuses_sizes_without_order_and_times_without_sizes(change, message):
    """Every way in which a curve is no function of its sizes is a problem with the field's name."""
    with pytest.raises(InvalidValue, match=message):
        replace(CURVE, **change)


def test_a_profile_is_known_by_its_curves_and_no_other_kind_reads_it(profile: Profile):
    """A profile given where a spec or a plan is expected is refused by its name."""
    document = codec.Document.parse(codec.dumps(profile), "profile.yaml")
    assert document.is_profile
    assert document.load(Profile) == profile
    for kind in (Spec, Plan):
        with pytest.raises(InvalidDocument, match="this is a profile, not a"):
            document.load(kind)


def test_a_family_is_listed_once(profile: Profile):
    """Two curves of one family have no meaning."""
    with pytest.raises(InvalidValue, match="listed twice"):
        replace(profile, curves=(CURVE, CURVE))


@pytest.fixture
def profile() -> Profile:
    text = """
source: capture-planner 0.1.0
date: "2026-11-22T16:00:00Z"
device: {kind: cpu, name: processor, memory: 8GiB}
model: {name: tiny, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 64, max_model_len: 64}
curves:
  - {role: target, mode: FULL, query_len: 1, tokens: [1, 8], milliseconds: [1.0, 2.0]}
"""
    return codec.loads(text, Profile)
