"""Processes on several GPUs: each sees one of those that this process sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible() -> tuple[str, ...]:
    """Return the devices that this process sees, as the environment names them; none without a GPU."""
    names = os.environ.get(VISIBLE)
    if names is not None:
        return tuple(name.strip() for name in names.split(",") if name.strip())
    return tuple(map(str, range(torch.cuda.device_count())))


@contextmanager
def only(device: str | None) -> Iterator[None]:
    """Let processes that are started meanwhile see one device; None: all of them."""
    before = os.environ.get(VISIBLE)
    if device is not None:
        os.environ[VISIBLE] = device
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = before
