"""What is read of an observed vLLM's steps, against a loop over what was logged."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from capture_planner_vllm.inside import steps, watch


@given(
    outputs=st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 4)),
            st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5) | st.just(300)), unique_by=lambda r: r[0]),
            st.booleans(),
        ),
        max_size=9,
    ),
    bonus=st.integers(0, 1),
)
def test_verifications_equal_a_loop_over_requests(outputs, bonus):
    """Whatever each request proposed and got, where lengths differ and where all are the same."""
    verifications, drafted, accepted = steps.Verifications(bonus), Counter(), Counter()
    for proposed, taken, uniform in outputs:
        drafts = {name: [0] * (3 if uniform else length) for name, length in proposed.items()}
        verifications.scheduled((watch.SCHEDULED, drafts))
        verifications.sampled((watch.SAMPLED, 1), None)
        verifications.accepted((watch.OUTPUT, 1, [name for name, _ in taken], tuple(count for _, count in taken)))
        for name, count in taken:
            for position in range(len(drafts.get(name, ())) if count or not bonus else 0):
                drafted[position] += 1
                accepted[position] += position < count - bonus
    seen = verifications.take()
    assert seen[0] == [drafted[position] for position in range(len(drafted))]
    assert seen[1] == [accepted[position] for position in range(len(drafted))]
    assert verifications.take() == ([], [])
