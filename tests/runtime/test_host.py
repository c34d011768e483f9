"""This machine against the one that was planned for. CUDA is taken away, or given, by name."""

from importlib import metadata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.environment import Device, DeviceKind, Environment
from capture_planner.runtime import host

VERSIONS = {name: metadata.version(name) for name in ("torch", "numpy", "attrs")}
CPU = Device(kind=DeviceKind.CPU, name="x86-64", memory=1 << 30)
H100 = Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=80 << 30, multiprocessors=132)


@pytest.fixture
def cuda(monkeypatch):
    """Give this machine a CUDA device of a capability, or none."""

    def give(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU of a test")

    return give


@given(
    st.dictionaries(
        st.sampled_from((*VERSIONS, "no-such-package")), st.sampled_from(("here", "here+cu130", "1.0"))
    )
)
def test_each_package_that_differs_is_named_once(chosen):
    """Local labels do not count; what is planned for and missing does."""
    planned = {
        name: version.replace("here", VERSIONS.get(name, "1.0").partition("+")[0])
        for name, version in chosen.items()
    }
    environment = Environment(name="e", device=CPU, packages=planned)
    wrong = []
    for name, version in sorted(planned.items()):
        if name not in VERSIONS:
            wrong.append(f"{name} {version} was planned for and is not installed")
        elif version == "1.0":
            wrong.append(f"{name} 1.0 was planned for and {VERSIONS[name]} is installed")
    assert list(host.differences(environment)) == wrong


def test_a_plan_for_a_gpu_names_the_gpu_that_is_missing(cuda):
    """Without a device nothing else is of interest."""
    cuda(None)
    environment = Environment(name="e", device=H100, packages={"no-such-package": "1"})
    assert host.differences(environment) == ("the plan is for H100, and this machine has no CUDA device",)


def test_another_compute_capability_is_a_difference(cuda):
    """And the same one is none; packages are compared as well."""
    environment = Environment(name="e", device=H100, packages={"no-such-package": "1"})
    missing = "no-such-package 1 was planned for and is not installed"
    cuda((9, 0))
    assert host.differences(environment) == (missing,)
    cuda((10, 3))
    said = "the plan is for compute capability 9.0, and this is 10.3"
    assert host.differences(environment) == (said, missing)


def test_a_plan_runs_on_the_kind_of_device_that_it_is_for():
    """CPU on the processor, CUDA on the current device."""
    assert host.device_of(Environment(name="e", device=CPU)) == torch.device("cpu")
    assert host.device_of(Environment(name="e", device=H100)) == torch.device("cuda")


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_a_report_names_the_machine_and_its_versions(cuda, capability):
    """Every fact is a text; CUDA is among them where it is."""
    cuda(capability)
    facts = host.facts()
    assert {"device", "python", "torch", "threads"} <= set(facts)
    assert ("cuda" in facts) is (capability is not None)
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert all(isinstance(fact, str) and fact for fact in facts.values())
    if capability is not None:
        assert facts["device"] == "GPU of a test"
