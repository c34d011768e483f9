"""This machine, and what differs from the one that a plan was made for."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from capture_planner.environment import DeviceKind, Environment


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
