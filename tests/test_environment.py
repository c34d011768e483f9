"""Environments: a machine as data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.environment import Device, DeviceKind, Environment
from capture_planner.errors import InvalidValue

CPU = Device(kind=DeviceKind.CPU, name="x86", memory=1 << 30)


def test_a_gpu_needs_its_capability_and_size():
    """Both are named at once."""
    with pytest.raises(InvalidValue) as caught:
        Device(kind=DeviceKind.CUDA, name="g", memory=1)
    assert [p.path for p in caught.value.problems] == [("capability",), ("multiprocessors",)]


@pytest.mark.parametrize(("text", "numbers"), [("9.0", (9, 0)), ("12.1", (12, 1))])
def test_a_capability_is_two_numbers(text, numbers):
    """Not a float: 12.1 is above 9.0."""
    gpu = Device(kind=DeviceKind.CUDA, name="g", capability=text, memory=1, multiprocessors=1)
    assert gpu.sm == numbers
    assert CPU.sm == (0, 0)


@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=4), st.sampled_from(["", ".post1", "rc1", "+cu130"])
)
def test_a_package_version_is_its_leading_numbers(numbers, suffix):
    """What follows them does not count."""
    text = ".".join(map(str, numbers)) + suffix
    machine = Environment(name="m", device=CPU, packages={"torch": text})
    assert machine.package("torch") == tuple(numbers)
    assert machine.package("absent") is None


def test_packages_are_a_copy():
    """A frozen value does not change when the mapping that it was made of does."""
    packages = {"torch": "2"}
    machine = Environment(name="m", device=CPU, packages=packages)
    packages["torch"] = "3"
    assert machine.packages == {"torch": "2"}
    assert hash(machine) == hash(Environment(name="m", device=CPU, packages={}))
