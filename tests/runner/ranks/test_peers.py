"""Where a rank stands, and the peers of a process that is alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import InvalidValue
from capture_planner_runner.ranks.peers import ALONE, Place

SIZES = st.integers(1, 16)


@given(SIZES, SIZES, st.data())
def test_tensor_parallel_ranks_are_neighbours(tensor_size, data_size, data):
    """Rank numbers and pairs of positions are one to one, and those of one replica follow each other."""
    rank = data.draw(st.integers(0, tensor_size * data_size - 1))
    place = Place(rank, tensor_size=tensor_size, data_size=data_size, host="h")
    assert place.rank == place.data * tensor_size + place.tensor == rank
    assert (place.data, place.tensor) == divmod(rank, tensor_size)
    assert place.size == tensor_size * data_size


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_beyond_the_last_is_refused(rank):
    """Sizes give the number of ranks, and ranks count from 0."""
    with pytest.raises(InvalidValue) as caught:
        Place(rank, tensor_size=3, data_size=2, host="h")
    assert [problem.path for problem in caught.value.problems] == [("place", "rank")]


def test_alone_answers_with_its_own_values():
    """No caller needs to ask whether there are other ranks."""
    assert ALONE.exchange("topic", {"a": 1}) == ({"a": 1},)
    assert ALONE.agree([3, 4]).tolist() == [[3, 4]]
    assert ALONE.tensor_group() is None
    assert (ALONE.place.rank, ALONE.place.size) == (0, 1)
    ALONE.close()
