"""Fixtures of the backends' tests: machines, layers, entries, and a fake FlashInfer."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from capture_planner import codec
from capture_planner.modes import GraphMode
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment

ENVIRONMENTS = Path(__file__).parents[2] / "plans" / "environments"

PACKAGES = {
    "torch": "2.13.0",
    "flashinfer-python": "0.7.2.post1",
    "flash-attn": "2.8.3",
    "flash-attn-3": "3.0.0",
    "flash-attn-4": "4.0.0b36",
}


@pytest.fixture(scope="session")
def committed() -> Callable[[str], Environment]:
    """Load an environment of ``plans/environments``."""
    return lambda name: codec.load_environment(ENVIRONMENTS / f"{name}.yaml")


@pytest.fixture(scope="session")
def machine() -> Callable[..., Environment]:
    """Make an environment: a capability, or None for a CPU, and packages, by default all of them."""

    def make(capability: str | None, packages: dict[str, str] = PACKAGES) -> Environment:
        cuda = capability is not None
        device = Device(
            kind=DeviceKind.CUDA if cuda else DeviceKind.CPU,
            name="GPU" if cuda else "x86-64",
            capability=capability,
            memory=80 << 30,
            multiprocessors=132 if cuda else None,
        )
        return Environment(name="test", device=device, packages=packages)

    return make


@pytest.fixture(scope="session")
def layers() -> Callable[..., Attention]:
    """Make a group of Llama-like layers; keywords change it."""

    def make(**changes: object) -> Attention:
        shape = {
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "max_model_len": 8192,
            "max_query_len": 1,
        }
        return Attention(**shape | changes)

    return make


@pytest.fixture(scope="session")
def graph() -> Callable[..., Entry]:
    """Make a full uniform graph; keywords change it."""

    def make(num_reqs: int, query_len: int = 1, **changes: object) -> Entry:
        shape = {
            "mode": GraphMode.FULL,
            "num_tokens": num_reqs * query_len,
            "num_reqs": num_reqs,
            "query_len": query_len,
        }
        return Entry(**shape | changes)

    return make


@pytest.fixture(scope="session")
def imports() -> Callable[[str], set[str]]:
    """Import a module in a fresh interpreter; return the top-level modules that it brought along."""

    def run(module: str) -> set[str]:
        code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    return run


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the stand-in where FlashInfer would be imported from."""
    from support.flashinfer_standin import standin

    made: Any = standin()
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", made.decode)
    return made
