"""The campaign of ``benchmarks/gpu_equality.py``, on a CPU: what it serves, what it counts, how it ends."""

from __future__ import annotations

import json
import random
import sys

import gpu_equality
import pytest
import torch
from _deployments import CASES, CYCLE, DRAFTS, MODES, Deployment, missing, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def run(monkeypatch, tmp_path, *arguments):
    """Run the script; return its exit code and what it wrote."""
    output = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpu_equality.py", "--device", "cpu", *arguments, "--output", str(output)])
    code = gpu_equality.main()
    return code, json.loads(output.read_text(encoding="utf-8"))


def test_campaign_cycle_has_every_k_in_every_mode():
    """On every backend, whatever is drawn beside them."""
    for case in CASES.values():
        specs = [tiny(case, index, random.Random(index)) for index in range(CYCLE)]
        seen = {(spec.speculative.num_tokens if spec.speculative else 0, spec.mode) for spec in specs}
        assert seen == {(k, mode) for k in DRAFTS for mode in MODES}


def test_campaign_counts_what_it_serves_and_skips_missing_backends(monkeypatch, tmp_path):
    """Steps of all deployments are counted; a backend that is not there is skipped with its reason."""
    monkeypatch.setattr(gpu_equality, "CYCLE", 4)
    arguments = ("--backends", "reference", "triton", "--tiny-only", "--steps", "1", "--requests", "2")
    code, found = run(monkeypatch, tmp_path, *arguments)
    assert code == 0
    served, skipped = found["results"]
    assert served["deployments"] == 4
    assert served["requests"] == 4 * 2
    assert served["steps"] > 0
    assert served["faults"] == []
    assert set(served["from graphs"]) >= {"target FULL", "target PIECEWISE", "draft_decode FULL"}
    assert [pools["saved"] > 0 for pools in served["shared against dedicated pools"]] == [True]
    assert "interpreter" in skipped["skipped"]


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"reference"}))
def test_gpu_backends_are_missing_on_the_cpu_of_a_machine_with_a_gpu(monkeypatch, name):
    """The GPU next to it changes nothing: a plan for the CPU is made for the processor."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert missing(CASES[name], torch.device("cpu")) is not None


def test_campaign_fails_if_tokens_differ(monkeypatch, tmp_path):
    """A graph that gives other tokens than its kernels is a fault of the backend, in the results."""
    serve = Deployment.serve

    def wrong(self, plan, *arguments, **options):
        found = serve(self, plan, *arguments, **options)
        if options.get("poison"):
            name = min(found.tokens)
            found.tokens[name] = (*found.tokens[name][:-1], -1)
        return found

    monkeypatch.setattr(Deployment, "serve", wrong)
    code, found = run(monkeypatch, tmp_path, "--short", "--backends", "reference")
    assert code == 1
    assert found["results"][0]["faults"] == ["1 request with other tokens than the same kernels"]


def test_campaign_continues_after_a_broken_backend(monkeypatch, tmp_path):
    """Its error is in the results."""
    monkeypatch.setattr(gpu_equality, "missing", lambda case, device: None)
    code, found = run(monkeypatch, tmp_path, "--short", "--backends", "flashinfer", "reference")
    broken, served = found["results"]
    assert code == 1
    assert broken["faults"]
    assert served["faults"] == []


def test_campaign_fails_if_no_backend_is_served(monkeypatch, tmp_path):
    """On a machine without the backends that were asked for."""
    code, _ = run(monkeypatch, tmp_path, "--short", "--backends", "flashinfer")
    assert code == 1
