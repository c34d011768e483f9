"""The GPU as torch shows it: all that observing needs of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs


def event() -> Any:
    """Return a CUDA event with timing."""
    import torch

    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def free_memory() -> int:
    """Return the free memory of the device, in bytes."""
    import torch

    return int(torch.cuda.mem_get_info()[0])


def settle() -> None:
    """Wait for the device, and give the allocator's cache back, which would count as memory of graphs."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@attrs.frozen
class Machine:
    """The names of the device and of what runs it, as an ``Observation`` has them."""

    device: str | None
    driver: str | None
    torch: str


def machine() -> Machine:
    """Return what this process runs on."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return Machine(device=name, driver=_driver(), torch=str(torch.__version__))


def _driver() -> str | None:
    """Return the version of the NVIDIA driver where the kernel says it."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text(encoding="ascii").strip() if path.exists() else None
