"""The planted errors of ``benchmarks/verify_gpu.py``: every backend that runs still does with one planted."""

import inspect

import pytest
import torch
from _deployments import CASES, REGISTRY
from _verify_cases import RUNS, execute, infinite, spoiled_registry

from capture_planner.runtime.executor import RunnableBackend


@pytest.mark.parametrize("name", sorted(set(REGISTRY) & {case.backend for case in CASES.values()}))
def test_spoiled_backends_have_all_that_a_protocol_asks_for(name: str) -> None:
    """As ``isinstance`` looks it up since Python 3.12, without ``__getattr__``."""
    spoiled, inner = spoiled_registry(name, infinite(2))[name].backend, REGISTRY[name].backend
    members = [member for member in (*dir(RunnableBackend), "name") if not member.startswith("_")]
    assert set(members) >= {"name", "support", "padding", "refresh", "workspace", "reserve"}
    for member in members:
        assert inspect.getattr_static(spoiled, member, None) is not None, member
    assert getattr(spoiled, "packs_cache", False) == getattr(inner, "packs_cache", False)
    assert isinstance(spoiled, RunnableBackend)


def test_planted_nan_is_found_on_a_cpu() -> None:
    """The whole run, with the reference backend."""
    run = next(run for run in RUNS if run.name == "NaN in graphs")
    assert execute("reference", run, torch.device("cpu"))["right"]
