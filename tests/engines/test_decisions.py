"""How decisions of engines are written down."""

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.engines.emulation import Decisions, written
from capture_planner.modes import Role

SIZES = st.lists(st.integers(0, 999))


@given(st.lists(st.tuples(SIZES | st.none() | st.booleans(), SIZES.map(tuple) | st.integers())))
def test_decisions_keep_their_order(steps):
    """With their values as text, of the target unless another role is named."""
    decisions = Decisions()
    for number, (before, after) in enumerate(steps):
        decisions.note(f"rule-{number}", before, after, "why", Role.DRAFT_DECODE if number % 2 else Role.TARGET)
    assert [decision.rule for decision in decisions] == [f"rule-{number}" for number in range(len(steps))]
    for number, (decision, (before, after)) in enumerate(zip(decisions, steps, strict=True)):
        assert (decision.before, decision.after) == (written(before), written(after))
        assert decision.role is (Role.DRAFT_DECODE if number % 2 else Role.TARGET)


@given(SIZES)
def test_decision_shortens_long_lists(sizes):
    """All of up to twelve, and none as such; of more the first six and the last three."""
    words = written(sizes).split(", ")
    assert written(tuple(sizes)) == written(sizes)
    if not sizes:
        assert words == ["none"]
    elif len(sizes) <= 12:
        assert list(map(int, words)) == sizes
    else:
        assert words.pop(6) == "..."
        assert list(map(int, words)) == sizes[:6] + sizes[-3:]


def test_decision_writes_none_and_booleans_as_yaml():
    """As a file would have them."""
    assert [written(value) for value in (None, True, False, 0)] == ["none", "true", "false", "0"]
