"""Numbers in reports: rounded for readers, and never to what they are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.report.writing import percent, seconds, size


@given(st.floats(0, 1) | st.integers(1, 10**6).flatmap(lambda n: st.sampled_from((1 / n, (n - 1) / n))))
def test_only_all_and_none_are_written_as_such(share):
    """99.96 % is not 100 %: a decode that ran eager must show."""
    text = percent(share)
    assert (text == "100%") == (share == 1)
    assert (text == "0%") == (share == 0)
    assert text not in ("100.0%", "0.0%")


@given(st.integers(0, 1 << 50), st.floats(1e-6, 1e6))
def test_written_numbers_keep_their_value(count, time):
    """Bytes and times, up to the digits that are shown."""
    shift = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}
    number, _, unit = size(count).replace(",", "").partition(" ")
    assert float(number) * (1 << shift.get(unit, 0)) == pytest.approx(count, rel=0.05)
    number, _, unit = seconds(time).replace(",", "").partition(" ")
    assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit] == pytest.approx(time, rel=0.05)
    assert seconds(0) == size(0) == "0"
