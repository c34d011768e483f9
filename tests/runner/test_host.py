"""This machine against the one that was planned for. CUDA is taken away, or given, by name."""

import functools
import re
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.records._base import replace
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner_runner import host

VERSIONS = {name: metadata.version(name) for name in ("torch", "numpy", "attrs")}
CPU = Device(kind=DeviceKind.CPU, name="x86-64", memory=1 << 30)
H100 = Device(
    kind=DeviceKind.CUDA, name="NVIDIA H100 80GB HBM3", capability="9.0", memory=80 << 30, multiprocessors=132
)
DRIVER = "580.95.05"


class NVMLError(Exception):
    """What NVML raises."""


def pretend(patch, device, count=1, name=None):
    """Give this machine CUDA devices, the first as described, or none."""
    patch.setattr(torch.cuda, "is_available", lambda: device is not None)
    patch.setattr(torch.cuda, "device_count", lambda: count if device else 0)
    if device is None:
        return
    major, minor = device.sm
    properties = SimpleNamespace(
        name=name or device.name,
        major=major,
        minor=minor,
        total_memory=device.memory,
        multi_processor_count=device.multiprocessors,
    )
    # By index alone: without one it would be the current device, which a caller may have changed.
    patch.setattr(torch.cuda, "get_device_properties", {0: properties}.__getitem__)
    patch.setattr(torch.cuda, "get_device_name", {0: properties.name}.__getitem__)
    patch.setattr(torch.version, "cuda", "13.0")


@pytest.fixture
def cuda(monkeypatch):
    """Call it with a device to have it here, or with None to have none."""
    return functools.partial(pretend, monkeypatch)


@pytest.fixture
def nvml(monkeypatch):
    """Let NVML say which driver there is, raise, or not be installed (None)."""
    ended = []

    def give(answer):
        def version():
            if isinstance(answer, Exception):
                raise answer
            return answer

        module = SimpleNamespace(
            NVMLError=NVMLError,
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: ended.append(True),
            nvmlSystemGetDriverVersion=version,
        )
        monkeypatch.setitem(sys.modules, "pynvml", None if answer is None else module)
        return ended

    give(DRIVER)
    return give


@given(st.dictionaries(st.sampled_from((*VERSIONS, "no-such-package")), st.sampled_from(("here", "here+cu130", "1.0"))))
def test_each_package_that_differs_is_named_once(chosen):
    """Local labels do not count; what is planned for and missing does."""
    planned = {
        name: version.replace("here", VERSIONS.get(name, "1.0").partition("+")[0]) for name, version in chosen.items()
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
    environment = Environment(name="e", device=H100, driver="1", packages={"no-such-package": "1"})
    assert host.differences(environment) == (
        "the plan is for NVIDIA H100 80GB HBM3, and this machine has no CUDA device",
    )
    assert host.remarks(environment) == ()


GPUS = st.builds(
    Device,
    kind=st.just(DeviceKind.CUDA),
    name=st.sampled_from((H100.name, "NVIDIA H200", "NVIDIA H100 80GB HBM3 MIG 3g.40gb")),
    capability=st.sampled_from(("9.0", "10.3")),
    memory=st.integers(1, 200 << 30),
    multiprocessors=st.sampled_from((132, 114, 60)),
)


@given(GPUS, GPUS)
def test_every_fact_of_the_device_that_differs_is_named(planned, here):
    """And nothing else is: a device is itself; one with more memory, all else equal, is good enough."""
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, here)
        said = host.differences(Environment(name="e", device=planned))
        assert host.differences(host.this_environment("here")) == ()
    expected = [
        (planned.capability != here.capability, f"and this is {here.capability}"),
        (planned.name != here.name, f"and this is {here.name}"),
        (planned.multiprocessors != here.multiprocessors, f"this device has {here.multiprocessors}"),
        (20 * here.memory < 19 * planned.memory, f"this device has {here.memory / (1 << 30):.1f}"),
    ]
    wanted = [words for differs, words in expected if differs]
    assert len(said) == len(wanted)
    assert all(sentence.endswith(words) for sentence, words in zip(said, wanted, strict=True))


def test_a_device_and_its_packages_are_compared_together(cuda):
    """An H100's plan on an H200: the same capability, and yet another machine."""
    cuda(replace(H100, name="NVIDIA H200", memory=141 << 30))
    environment = Environment(name="e", device=H100, packages={"no-such-package": "1"})
    assert host.differences(environment) == (
        "the plan is for NVIDIA H100 80GB HBM3, and this is NVIDIA H200",
        "no-such-package 1 was planned for and is not installed",
    )


@pytest.mark.parametrize(
    ("driver", "runtime", "found", "remarks"),
    [
        (DRIVER, "13.0", DRIVER, ()),
        (None, None, DRIVER, ()),
        (DRIVER, "13.0", None, (f"driver {DRIVER} was planned for, and an unknown one is here",)),
        ("570.1", "13.0", DRIVER, (f"driver 570.1 was planned for, and {DRIVER} is here",)),
        (DRIVER, "12.8", DRIVER, ("CUDA 12.8 was planned for, and 13.0 is here",)),
    ],
)
def test_a_driver_is_remarked_and_not_refused(cuda, nvml, driver, runtime, found, remarks):
    """It decides nothing that is planned, and changes under everybody."""
    cuda(H100)
    nvml(found)
    environment = Environment(name="e", device=H100, driver=driver, cuda=runtime)
    assert host.differences(environment) == ()
    assert host.remarks(environment) == remarks


@pytest.mark.parametrize("answer", [DRIVER, DRIVER.encode()])
def test_this_machine_is_what_cuda_and_nvml_say(cuda, nvml, answer):
    """The first device as CUDA sees it, and the driver; the file comes back equal."""
    cuda(H100)
    ended = nvml(answer)
    found = host.this_environment("here")
    assert (found.name, found.device, found.driver, found.cuda) == ("here", H100, DRIVER, "13.0")
    assert found.packages["torch"] == VERSIONS["torch"].partition("+")[0]
    assert ended, "NVML is shut down"
    assert host.notes() == ()
    assert codec.loads(codec.dumps(found), Environment) == found


def test_a_name_that_no_file_holds_is_written_without_what_is_odd(cuda, nvml):
    """A trade mark is no part of what a device is."""
    cuda(H100, name="NVIDIA(R) B300 " + "x" * 200)
    assert host.this_environment("here").device.name.startswith("NVIDIA R B300 xxx")


@pytest.mark.parametrize(
    ("answer", "says"), [(None, "pip install nvidia-ml-py"), (NVMLError("no driver"), "does not answer: no driver")]
)
def test_a_driver_that_is_not_known_is_noted(cuda, nvml, answer, says):
    """Why, and what to do; everything else is there."""
    cuda(H100)
    nvml(answer)
    found = host.this_environment("here")
    assert (found.driver, found.device) == (None, H100)
    (note,) = host.notes()
    assert note.startswith("the driver's version is not known")
    assert re.search(says, note)


def test_the_first_of_several_devices_is_described_and_that_is_said(cuda, nvml):
    """Which of them is first, CUDA_VISIBLE_DEVICES says."""
    cuda(H100, count=8)
    (note,) = host.notes()
    assert note.startswith(f"this machine has 8 CUDA devices, and the first is described: {H100.name};")
    assert "CUDA_VISIBLE_DEVICES" in note


def test_a_machine_without_a_gpu_is_its_processor(cuda):
    """Nothing needs noting: no driver is looked for."""
    cuda(None)
    found = host.this_environment("here")
    assert (found.device.kind, found.driver, found.cuda) == (DeviceKind.CPU, None, None)
    assert host.notes() == ()


def test_processor_of_a_machine_with_a_gpu_is_described_without_gpu(cuda):
    """What a plan for the CPU of such a machine is made for."""
    cuda(H100)
    environment = host.this_environment("here", gpu=False)
    assert (environment.device.kind, environment.driver, environment.cuda) == (DeviceKind.CPU, None, None)


def test_a_plan_runs_on_the_kind_of_device_that_it_is_for(monkeypatch):
    """CPU on the processor, CUDA on the current device, by its index: of each rank its own."""
    environment = Environment(name="e", device=H100)
    assert host.device_of(Environment(name="e", device=CPU)) == torch.device("cpu")
    assert host.device_of(environment) == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert host.device_of(environment) == torch.device("cuda:1")


@pytest.mark.parametrize("device", [None, H100])
def test_a_report_names_the_machine_and_its_versions(cuda, nvml, device):
    """Every fact is a text; CUDA and the driver are among them where they are."""
    cuda(device)
    facts = host.facts()
    assert {"device", "python", "torch", "threads"} <= set(facts)
    assert {"cuda", "driver"} & set(facts) == ({"cuda", "driver"} if device else set())
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert all(isinstance(fact, str) and fact for fact in facts.values())
    if device is not None:
        assert (facts["device"], facts["driver"]) == (H100.name, DRIVER)
