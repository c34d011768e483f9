"""Modes and levels: the algebra that everything else stands on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, GraphSupport, Role

MODES = st.sampled_from(GraphMode)
HALVES = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
}


@pytest.mark.parametrize("mode", GraphMode)
def test_halves(mode):
    """The decode and the mixed half of each mode are vLLM's."""
    assert (mode.decode_mode.value, mode.mixed_mode.value) == HALVES[mode.value]
    assert mode.is_separate == (mode.decode_mode is not mode.mixed_mode)
    assert mode.has_piecewise == ("PIECEWISE" in HALVES[mode.value])
    assert {kind.value for kind in mode.allowed} == set(HALVES[mode.value]) - {"NONE"}


@given(MODES)
def test_a_half_is_a_mode_of_one_routine(mode):
    """Halving twice changes nothing."""
    for half in (mode.decode_mode, mode.mixed_mode):
        assert not half.is_separate
        assert half.decode_mode is half.mixed_mode is half


@given(MODES)
def test_without_piecewise(mode):
    """Nothing but the piecewise half goes away."""
    left = mode.without_piecewise
    assert left <= mode
    assert left.without_piecewise is left
    assert not left.has_piecewise
    for half in ("decode_mode", "mixed_mode"):
        before = getattr(mode, half)
        assert getattr(left, half) is (GraphMode.NONE if before is GraphMode.PIECEWISE else before)


@given(MODES, MODES)
def test_modes_are_ordered_totally(one, other):
    """Exactly one of less, equal and more; more comes with more decodes in full graphs, or as many."""
    assert (one < other) + (one is other) + (one > other) == 1
    if one < other:
        assert one.decode_mode <= other.decode_mode


def test_other_types_do_not_compare():
    """A mode and text have no order."""
    with pytest.raises(TypeError):
        GraphMode.NONE < "FULL"  # noqa: B015


def test_support_levels_are_vllms():
    """More support is a larger number."""
    assert [level.name for level in sorted(GraphSupport)] == [
        "NEVER",
        "UNIFORM_SINGLE_TOKEN_DECODE",
        "UNIFORM_BATCH",
        "ALWAYS",
    ]


def test_two_roles_are_a_drafters():
    """The target is not one of them."""
    assert [role for role in Role if role.is_drafter] == [Role.DRAFT_PREFILL, Role.DRAFT_DECODE]
