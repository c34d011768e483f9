"""The table of a traffic file: what it refuses, and where it says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.errors import InvalidDocument, InvalidValue
from capture_planner.modes import Role
from capture_planner.records._base import digest
from capture_planner.records.spec import Spec
from capture_planner.records.traffic import Traffic, TrafficCount
from support.strategies import traffics

FILE = "version: 1\nsources: [x]\nbatches:\n  - {{role: target, {0}}}\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("counts: [1]", "batches[0].counts: counts of no shape"),
        ("num_reqs: [1, 2], counts: [1]", "batches[0].num_reqs: 2 values, and counts has 1"),
        ("num_reqs: [0], counts: [1]", "batches[0].num_reqs[0]: must be at least 1, got 0"),
        ("num_reqs: [1], counts: [0]", "batches[0].counts[0]: must be at least 1, got 0"),
        ("query_len: 4, num_reqs: [2], num_tokens: [9], counts: [1]", "2 requests of 4 tokens are not 9 tokens"),
        ("num_tokens: [9], counts: [1], steps: [1]", "batches[0].steps: unknown key"),
    ],
)
def test_wrong_rows_are_refused_at_their_place(row, message):
    with pytest.raises(InvalidDocument) as raised:
        codec.loads(FILE.format(row), Traffic, "a.yaml")
    assert "a.yaml:4:" in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("accepted", "message"),
    [
        ("[9, 6]", "accepted[1]: expected at most 5, as drafted, got 6"),
        ("[9, 5, 1]", "accepted: 3 positions, drafted has 2"),
        ("[9]", "accepted: 1 positions, drafted has 2"),
    ],
)
def test_more_accepted_than_drafted_is_refused(accepted, message):
    """By position, at its place: a share above 1 is none."""
    file = FILE.format("num_reqs: [1], counts: [1]") + f"drafted: [9, 5]\naccepted: {accepted}\n"
    with pytest.raises(InvalidDocument) as raised:
        codec.loads(file, Traffic, "a.yaml")
    assert str(raised.value).startswith("a.yaml:6:")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "numbers", [{}, {"num_reqs": 0}, {"num_reqs": 2, "query_len": 4}, {"num_reqs": 2, "query_len": 4, "num_tokens": 9}]
)
def test_impossible_batches_cannot_be_made(numbers):
    with pytest.raises(InvalidValue):
        Traffic(sources=(), batches=(TrafficCount(role=Role.TARGET, count=1, **numbers),))


@given(traffics(), st.randoms())
def test_order_of_batches_means_nothing(traffic, random):
    """Equal traffic has equal digests."""
    shuffled = list(traffic.batches)
    random.shuffle(shuffled)
    again = Traffic(sources=traffic.sources, batches=tuple(shuffled))
    assert digest(again) == digest(Traffic(sources=traffic.sources, batches=traffic.batches))


def test_a_traffic_file_is_known_by_its_batches():
    """It is no spec, and no plan."""
    document = codec.Document.parse(FILE.format("num_reqs: [1], counts: [1]"), "a.yaml")
    assert document.kind is Traffic
    assert (document.is_plan, document.is_observation, document.is_traffic) == (False, False, True)
    with pytest.raises(InvalidDocument, match="this is traffic, not a spec"):
        document.load(Spec)
