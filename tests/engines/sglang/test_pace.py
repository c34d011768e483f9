"""What a scheduler's loop spends on each batch, against the loop itself."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import Reason, Role
from capture_planner_sglang.inside.pace import LoopPace

SECONDS = st.integers(1, 9).map(Fraction)


@st.composite
def loops(draw):
    """Turns of a loop: the seconds before a launch, of it, and of a result, whether overlapped, and whether idle."""
    turn = st.tuples(SECONDS, SECONDS, SECONDS, st.booleans(), st.booleans())
    return draw(st.lists(turn, min_size=1, max_size=30))


def outcome(number):
    return (Role.TARGET, number, number, 1, True, 0, None, Reason.SIZES)


@given(loops())
def test_each_stretch_counts_for_the_batch_that_ends_it(turns):
    """A batch costs its launch and its result, with what the loop did before each; idle time counts for none.

    A result comes after the next launch where the two overlap, else before it. Known are all batches but those that
    idle time follows.
    """
    pace, now, given_out = LoopPace(), Fraction(0), []
    expected, waiting, ended = {}, None, None
    for number, (before, launch, result, overlapped, idle) in enumerate(turns):

        def process(each, seconds):
            nonlocal now, ended
            now += seconds
            expected[each] += now - ended
            ended = now
            pace.processed(each, now)

        if waiting is not None and (idle or not overlapped):
            process(waiting, result)
            waiting = None
        started = now + before
        now = started + launch
        idle = idle or number == 0
        given_out += pace.launched(number, outcome(number), started, now, after_idle=idle)
        expected[number] = now - (started if idle else ended)
        ended = now
        if waiting is not None:
            process(waiting, result)
        waiting = number
    followed = {
        number
        for number in range(len(turns) - 1)
        if not turns[number + 1][4] and not (turns[number + 1][3] and number + 2 < len(turns) and turns[number + 2][4])
    }
    last = len(turns) - 2
    if turns[-1][3] and not turns[-1][4]:
        followed.discard(last)  # its result came after the last launch
    assert dict(given_out) == {outcome(number): expected[number] for number in followed}


def test_results_that_are_never_processed_are_forgotten():
    pace = LoopPace()
    for number in range(100):
        assert pace.launched(number, outcome(number), number, number + 1, after_idle=False) == []
    assert len(pace._launched) < 10
