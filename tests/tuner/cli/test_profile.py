"""The command ``profile``: a tiny model on a CPU end to end, and an engine's figures without measuring."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from capture_planner import codec
from capture_planner.codec.shipped import find_environment, find_profile
from capture_planner.errors import RunError
from capture_planner.measuring.fits import predict
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.environment import DeviceKind
from capture_planner.records.observation import EagerCost
from capture_planner_runner.bench import staircase
from support.commands import PLAN, SPEC, Run, spec_for
from support.observing import observation_of
from support.tuning import profile

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TINY = spec_for(2)


@pytest.fixture
def run(executing: Callable[[str, str], Run]) -> Run:
    """Return a function that calls ``profile``, in a folder with the plan of a tiny spec."""
    return executing("profile", TINY)


def test_a_plan_is_profiled_shown_and_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family of graphs and eager passes has its curve, graphs their costs, and the file reads back.

    The time to load and to compile the model is not in ``--seconds``.
    """
    monkeypatch.setattr(staircase, "MOST", 1)  # a busy machine never settles, and the search has to end
    profiling = importlib.import_module("capture_planner_runner.bench.profiling")
    assembled, runner = [], profiling.Rig.runner
    monkeypatch.setattr(profiling.Rig, "runner", lambda rig, plan: assembled.append(plan) or runner(rig, plan))
    monkeypatch.setattr(profiling, "monotonic", lambda: monotonic() + 1000.0 * bool(assembled))
    ran = run("plan.yaml", "--seconds", "60", "-o", "profile.yaml", "--context", "5")
    assert ran.code == 0, ran.err
    assert "what graphs cost" in ran.out
    profile, plan = codec.load_profile("profile.yaml"), codec.load_plan("plan.yaml")
    curves = {curve.key: curve for curve in profile.curves}
    for role in plan.roles:
        for entry in role.entries:
            curve = curves[role.role, entry.mode, entry.query_len, entry.draft_steps]
            assert entry.num_tokens in curve.tokens
    assert curves[Role.TARGET, GraphMode.NONE, None, None].tokens == (1, 8, 12)
    assert {cost.key for cost in profile.graphs} == {key for key in curves if key[1] is not GraphMode.NONE}
    for curve in profile.curves:
        assert list(curve.milliseconds) == sorted(curve.milliseconds)
    assert profile.device.kind is DeviceKind.CPU
    assert profile.command.startswith("capture-planner profile plan.yaml --seconds 60")
    assert profile.step_milliseconds >= 0
    assert not any("time was over" in note for note in profile.notes)
    assert predict(profile, plan).seconds > 0


def test_a_spec_is_profiled_up_to_its_limits(run: Run) -> None:
    """Decodes up to the requests that the limits admit, at ends that no list of sizes has to name."""
    data = run("spec.yaml", "--seconds", "0.5", "--environment", "cpu", "--format", "json").data
    decodes = [curve for curve in data["curves"] if (curve["role"], curve.get("mode")) == ("target", "FULL")]
    assert [curve["tokens"][-1] for curve in decodes] == [6]


def test_an_interruption_keeps_what_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with exit code 130 and a file of the sizes so far, whose notes say that it was interrupted."""
    profiling = importlib.import_module("capture_planner_runner.bench.profiling")
    real, calls = profiling.steady, []

    def steady(*arguments: object) -> object:
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(profiling, "steady", steady)
    ran = run("plan.yaml", "--seconds", "5", "-o", "part.yaml")
    assert ran.code == 130
    profile = codec.load_profile("part.yaml")
    assert sum(len(curve.tokens) for curve in profile.curves) == 3
    assert any(note.startswith("interrupted") for note in profile.notes)


def test_a_graph_that_breaks_costs_no_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sizes cannot be captured together, each is by itself, and the notes have the reason."""
    profiling = importlib.import_module("capture_planner_runner.bench.profiling")
    real = profiling.plan_with

    def alone(plan: object, backends: object, graphs: list[object]) -> object:
        if len(graphs) > 1:
            raise RunError("no room")
        return real(plan, backends, graphs)

    monkeypatch.setattr(staircase, "MOST", 1)
    monkeypatch.setattr(profiling, "plan_with", alone)
    data = run("plan.yaml", "--seconds", "1", "--format", "json").data
    assert sum(len(curve["tokens"]) for curve in data["curves"]) > 2
    assert any("together: RunError: no room" in note for note in data["notes"])


def test_a_model_with_experts_is_profiled(run: Run) -> None:
    """Graphs hold a mixture of experts: how many tokens an expert has is nowhere read on the host."""
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ).save_pretrained("experts")
    data = run("plan.yaml", "--model", "experts", "--seconds", "0.5", "--format", "json").data
    assert any(curve["mode"] == "FULL" for curve in data["curves"])
    assert any("Qwen3MoeForCausalLM" in note for note in data["notes"])


def test_an_observation_is_taken_without_measuring(run: Run, tmp_path: Path) -> None:
    """Of a plan or spec that names model and device; options of measuring are refused, and files of another kind."""
    plan = codec.load_plan(PLAN_PATH)
    observation = observation_of(plan)
    target, *others = observation.roles
    eager = (EagerCost(num_reqs=1, num_tokens=1024, milliseconds=40.0),)
    timed = replace(observation, device="NVIDIA H200", roles=(replace(target, eager=eager), *others))
    codec.write("observation.yaml", codec.dumps(timed))
    of_spec = run(str(SPEC_PATH), "--from", "observation.yaml", "--format", "json").data
    assert of_spec["device"]["name"] == "NVIDIA H200"
    assert any("served" in note for note in of_spec["notes"]) is (timed.model != plan.model.name)
    other = run(str(PLAN_PATH), "--from", "observation.yaml")
    assert other.code == 1
    assert f"observed on NVIDIA H200, and {PLAN_PATH} is of {plan.environment.device.name}" in other.err
    codec.write("observation.yaml", codec.dumps(replace(timed, device=plan.environment.device.name)))
    of_plan = run(str(PLAN_PATH), "--from", "observation.yaml", "--format", "json").data
    assert of_plan["curves"] == of_spec["curves"]
    assert of_plan["device"]["name"] == plan.environment.device.name
    refused = run(str(PLAN_PATH), "--from", "observation.yaml", "--seconds", "3")
    assert (refused.code, "--seconds goes with measuring" in refused.err) == (1, True)
    assert "this is a spec, not an observation" in run(str(PLAN_PATH), "--from", "spec.yaml").err


def test_the_nearest_profile_is_of_the_same_device() -> None:
    """The same model first, then the nearest size; none for another device."""
    known = profile()
    one = replace(known, model=replace(known.model, name="tiny", num_layers=1))
    large = replace(one, model=replace(one.model, name="large", num_layers=50))
    profiles = {"one": one, "large": large}
    cpu = replace(find_environment("cpu"), device=one.device)
    middle = replace(one.model, name="middle", num_layers=2)
    found = {model.name: find_profile(cpu, model, profiles) for model in (one.model, large.model, middle)}
    assert {name: near and (near.name, near.factor) for name, near in found.items()} == {
        "tiny": ("one", 1.0),
        "large": ("large", 1.0),
        "middle": ("one", 2.0),
    }
    assert found["middle"] is not None
    assert found["middle"].distance.endswith("a factor of 2.0 in size")
    assert find_profile(find_environment("h100"), one.model, profiles) is None


ROOT = Path(__file__).parents[3]
PLAN_PATH, SPEC_PATH = ROOT / PLAN, ROOT / SPEC
