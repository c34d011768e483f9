"""The campaign of vLLM's attention backends: portions, processes, and the findings that end only their own."""

import json
import sys
from pathlib import Path

import attrs
import pytest

from capture_planner.conformance import SearchProfile, under_test
from capture_planner.conformance.failure import Check, Failure
from support.files import module_at

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ONE = SearchProfile(name="one", examples=1, steps=2)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = module_at(BENCHMARKS / "vllm_backends.py")
    # On the reference backend, in this process.
    monkeypatch.setattr(module, "subject", lambda name: under_test("reference"))
    monkeypatch.setattr(module, "_missing", lambda name: None)
    monkeypatch.setattr(module, "alone", lambda device, act, *rest: act(*rest))
    monkeypatch.setattr(module, "PORTION", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return module


def run(script, monkeypatch, tmp_path, *words):
    target = tmp_path / "found.json"
    given = ["vllm_backends.py", "--examples", "3", "--steps", "3", "--no-audits", "--output", str(target), *words]
    monkeypatch.setattr(sys, "argv", given)
    return script.main(), json.loads(target.read_text("utf-8"))["results"]


def test_portions_add_up(script, monkeypatch, tmp_path):
    code, (result,) = run(script, monkeypatch, tmp_path, "--backends", "vllm_flash_attn")
    assert (code, result["passed"], result["scenes"], sorted(result["seeds"])) == (0, True, 3, [0, 1])


def test_finding_ends_its_portion_and_a_broken_process_is_named(script, monkeypatch, tmp_path):
    """The first finding alone is minimized; rows as vLLM leaves them are no failure of the campaign."""
    minimized = []

    def conform(under, options):
        minimized.append(options.shrink)
        if options.seed == 7:
            raise RuntimeError("an illegal access")
        failure = Failure(check=Check.WRITTEN, message="row 3")
        return attrs.evolve(outcome, failures=(failure,) if options.seed < 8 else ())

    outcome = script.conform(under_test("reference"), script.SuiteOptions(audits=False, profile=ONE))
    monkeypatch.setattr(script, "conform", conform)
    words = ("--seed", "6", "--examples", "5", "--backends", "vllm_triton_attn")
    code, (result,) = run(script, monkeypatch, tmp_path, *words)
    assert code == 1
    assert minimized == [True, False, False]
    assert [each["check"] for each in result["findings"]] == ["written"]
    assert result["broke"] == ["RuntimeError: an illegal access"]
    assert run(script, monkeypatch, tmp_path, "--backends", "vllm_triton_attn as is")[0] == 0
