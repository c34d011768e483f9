"""This machine, and what differs from the one that a plan was made for."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from capture_planner.environment import Device, DeviceKind, Environment

PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn", "flash-attn-3", "flash-attn-4")
"""The packages that decide what a backend can do."""


def this_environment(name: str) -> Environment:
    """Return the facts of this machine: its first CUDA device, or its processor."""
    packages = {package: version for package in PACKAGES if (version := _installed(package)) is not None}
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        device = Device(kind=DeviceKind.CPU, name=platform.machine(), memory=memory)
        return Environment(name=name, device=device, packages=_public(packages))
    found = torch.cuda.get_device_properties(0)
    return Environment(
        name=name,
        device=Device(
            kind=DeviceKind.CUDA,
            name=found.name,
            capability=f"{found.major}.{found.minor}",
            memory=found.total_memory,
            multiprocessors=found.multi_processor_count,
        ),
        driver=_driver(),
        cuda=torch.version.cuda,
        packages=_public(packages),
    )


def _public(packages: dict[str, str]) -> dict[str, str]:
    """Leave out local labels: 2.11.0+cu130 is 2.11.0."""
    return {name: version.partition("+")[0] for name, version in packages.items()}


def _driver() -> str | None:
    """Return the version of the device driver, or None where NVML's Python package is missing."""
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return None
    pynvml.nvmlInit()
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    return str(version if isinstance(version, str) else version.decode())


def device_of(environment: Environment) -> torch.device:
    """Return the device that a plan of this environment runs on."""
    return torch.device(environment.device.kind.value)


def facts() -> dict[str, str]:
    """Return this machine and its versions, for a report."""
    found = {
        "device": _device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return found


def _device_name() -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return platform.processor() or platform.machine()


def differences(environment: Environment) -> tuple[str, ...]:
    """Return, in sentences, how this machine differs from the one that was planned for.

    Versions are compared up to a local label: 2.13.0+cpu is 2.13.0.
    """
    found = []
    device = environment.device
    if device.kind is DeviceKind.CUDA:
        if not torch.cuda.is_available():
            return (f"the plan is for {device.name}, and this machine has no CUDA device",)
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) != device.sm:
            found.append(
                f"the plan is for compute capability {device.capability}, and this is {major}.{minor}"
            )
    for name, planned in environment.packages.items():
        installed = _installed(name)
        if installed is None:
            found.append(f"{name} {planned} was planned for and is not installed")
        elif installed.partition("+")[0] != planned.partition("+")[0]:
            found.append(f"{name} {planned} was planned for and {installed} is installed")
    return tuple(found)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
