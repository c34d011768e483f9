"""The facts of this machine, and its differences from the one that a plan was made for."""

from __future__ import annotations

import gc
import os
import platform
import re
from importlib import metadata

import torch

from capture_planner.records.environment import Device, DeviceKind, Environment

PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn", "flash-attn-3", "flash-attn-4", "vllm")
"""Packages that decide what a backend can do."""

GIBI = 1 << 30

LEAST_MEMORY = 0.95
"""A device with less than this share of the planned memory is another one; drivers keep a little back."""


def this_environment(name: str, *, gpu: bool = True) -> Environment:
    """Return the facts of this machine: its first CUDA device, or its processor. ``notes`` says more.

    ``gpu``: False describes the processor, also where there is a CUDA device.
    """
    versions = {package: installed_version(package) for package in PACKAGES}
    # Without local labels: 2.11.0+cu130 is 2.11.0.
    packages = {package: version.partition("+")[0] for package, version in versions.items() if version is not None}
    if not (gpu and torch.cuda.is_available()):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        device = Device(kind=DeviceKind.CPU, name=platform.machine(), memory=memory)
        return Environment(name=name, device=device, packages=packages)
    return Environment(
        name=name, device=_cuda_device(), driver=_driver()[0], cuda=torch.version.cuda, packages=packages
    )


def gpu_environment() -> Environment | None:
    """Return the facts of this machine where it has a GPU."""
    return this_environment("here") if torch.cuda.is_available() else None


def give_back(device: torch.device) -> None:
    """Wait for a CUDA device, and give it back what no tensor owns and what garbage holds; a CPU keeps both."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def notes() -> tuple[str, ...]:
    """Return, in sentences, what ``this_environment`` could not find out here, or had to choose."""
    if not torch.cuda.is_available():
        return ()
    found = []
    count = torch.cuda.device_count()
    if count > 1:
        found.append(
            f"this machine has {count} CUDA devices, and the first is described: "
            f"{_cuda_device().name}; CUDA_VISIBLE_DEVICES chooses another"
        )
    _, unknown = _driver()
    return (*found, unknown) if unknown else tuple(found)


def _cuda_device() -> Device:
    """Return the first device that CUDA sees: where it is a slice of a GPU, the slice."""
    found = torch.cuda.get_device_properties(0)
    return Device(
        kind=DeviceKind.CUDA,
        # The name of a device in an environment has no other characters, and at most 128.
        name=" ".join(re.sub(r"[^A-Za-z0-9._/+-]+", " ", found.name).split())[:128],
        capability=f"{found.major}.{found.minor}",
        memory=found.total_memory,
        multiprocessors=found.multi_processor_count,
    )


def _driver() -> tuple[str | None, str]:
    """Return the version of the device driver, or None and a sentence that says why it is not known.

    NVML is asked nothing else: it counts GPUs in another order than CUDA, which may see fewer.
    """
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return None, (
            "the driver's version is not known, since nvidia-ml-py is not installed; "
            "install it with: pip install nvidia-ml-py"
        )
    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return None, f"the driver's version is not known, since NVML does not answer: {error}"
    return str(version if isinstance(version, str) else version.decode()), ""


def device_of(environment: Environment) -> torch.device:
    """Return the device that a plan of this environment runs on: the current one of its kind, at first the first."""
    if environment.device.kind is not DeviceKind.CUDA:
        return torch.device("cpu")
    # Asking torch for the current device would initialize CUDA, which the fork of ranks does not survive.
    is_ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device() if is_ready else 0)


def facts() -> dict[str, str]:
    """Return this machine and its versions, for a report."""
    found = {
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        found["device"] = str(torch.cuda.get_device_name(0))
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = _driver()[0] or "unknown"
    return found


def differences(environment: Environment) -> tuple[str, ...]:
    """Return, in sentences, how this machine differs from the one that was planned for.

    What is here decides support, sizes, splits and workspaces: kind of device, compute capability, name,
    multiprocessors, memory (less of it), and versions of packages, up to a local label: 2.13.0+cpu is
    2.13.0. ``remarks`` has what differs and decides nothing.
    """
    found = []
    planned = environment.device
    if planned.kind is DeviceKind.CUDA:
        # Nothing else can be compared without a device.
        if not torch.cuda.is_available():
            return (f"the plan is for {planned.name}, and this machine has no CUDA device",)
        here = _cuda_device()
        if here.capability != planned.capability:
            found.append(f"the plan is for compute capability {planned.capability}, and this is {here.capability}")
        if here.name != planned.name:
            found.append(f"the plan is for {planned.name}, and this is {here.name}")
        if here.multiprocessors != planned.multiprocessors:
            count = f"{planned.multiprocessors} multiprocessors"
            found.append(f"the plan is for {count}, and this device has {here.multiprocessors}")
        if here.memory < LEAST_MEMORY * planned.memory:
            memory = f"{planned.memory / GIBI:.1f} GiB of memory"
            found.append(f"the plan is for {memory}, and this device has {here.memory / GIBI:.1f}")
    for name, version in environment.packages.items():
        installed = installed_version(name)
        if installed is None:
            found.append(f"{name} {version} was planned for and is not installed")
        elif installed.partition("+")[0] != version.partition("+")[0]:
            found.append(f"{name} {version} was planned for and {installed} is installed")
    return tuple(found)


def remarks(environment: Environment) -> tuple[str, ...]:
    """Return, in sentences, what differs here and is no reason to refuse: driver and CUDA runtime."""
    if environment.device.kind is not DeviceKind.CUDA or not torch.cuda.is_available():
        return ()
    here = (("driver", environment.driver, _driver()[0]), ("CUDA", environment.cuda, torch.version.cuda))
    return tuple(
        f"{what} {planned} was planned for, and {found or 'an unknown one'} is here"
        for what, planned, found in here
        if planned is not None and planned != found
    )


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
