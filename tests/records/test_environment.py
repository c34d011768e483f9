"""Environments: a machine as data, and the command that writes this one's."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.errors import InvalidValue
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner_runner.cli.environment import environment as command

CPU = Device(kind=DeviceKind.CPU, name="x86", memory=1 << 30)


def test_cuda_device_requires_capability_and_multiprocessors():
    """Both are named at once."""
    with pytest.raises(InvalidValue) as caught:
        Device(kind=DeviceKind.CUDA, name="g", memory=1)
    assert [p.path for p in caught.value.problems] == [("capability",), ("multiprocessors",)]


@pytest.mark.parametrize(("text", "numbers"), [("9.0", (9, 0)), ("12.1", (12, 1))])
def test_capability_is_parsed_into_two_numbers(text, numbers):
    """Not a float: 12.1 is above 9.0."""
    gpu = Device(kind=DeviceKind.CUDA, name="g", capability=text, memory=1, multiprocessors=1)
    assert gpu.sm == numbers
    assert CPU.sm == (0, 0)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=4), st.sampled_from(["", ".post1", "rc1", "+cu130"]))
def test_package_version_is_its_leading_numbers(numbers, suffix):
    """What follows them does not count."""
    text = ".".join(map(str, numbers)) + suffix
    machine = Environment(name="m", device=CPU, packages={"torch": text})
    assert machine.package("torch") == tuple(numbers)
    assert machine.package("absent") is None


def test_environment_copies_packages():
    """A frozen value does not change when the mapping that it was made of does."""
    packages = {"torch": "2"}
    machine = Environment(name="m", device=CPU, packages=packages)
    packages["torch"] = "3"
    assert machine.packages == {"torch": "2"}
    assert hash(machine) == hash(Environment(name="m", device=CPU, packages={}))


@pytest.fixture
def ran(monkeypatch):
    """Run the command, in a world with some notes."""
    host = pytest.importorskip("capture_planner_runner.host")
    monkeypatch.setattr(host, "notes", lambda: ("there are two", "the driver is not known"))

    def run(*arguments):
        result = CliRunner().invoke(command, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        notes = result.stderr.splitlines()[:2]
        assert notes == ["note: there are two", "note: the driver is not known"]
        return result

    return run


def test_environment_command_prints_this_machine(ran):
    """The standard output is the file, and nothing else is: a plan for it is not refused here."""
    host = pytest.importorskip("capture_planner_runner.host")
    here = codec.loads(ran("--name", "my box").stdout, Environment)
    assert here == host.this_environment("my box")
    assert host.differences(here) == ()
    assert codec.loads(json.dumps(json.loads(ran("--format", "json").stdout)), Environment).name == "here"


def test_environment_command_writes_a_file(ran, tmp_path):
    """Whole, with its name; what is printed says where."""
    path = tmp_path / "here.yaml"
    result = ran("-o", str(path), "--name", "box")
    assert result.stdout == f"written to {path}\n"
    assert codec.load_environment(path).name == "box"
