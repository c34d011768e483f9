"""The files that a spec names: read from its folder, and missed with their place in the spec."""

import pytest

from capture_planner import codec
from capture_planner.errors import InvalidDocument
from capture_planner.modes import GraphMode, Role
from capture_planner.records.environment import Device, DeviceKind
from capture_planner.records.model import Model
from capture_planner.records.profile import CostCurve, Profile
from capture_planner.records.traffic import Traffic, TrafficCount

SPEC = """\
version: 1
model: {name: m, num_layers: 4, num_heads: 8, num_kv_heads: 2, head_dim: 64, max_model_len: 4096}
limits: {max_num_reqs: 32, max_num_tokens: 512}
backend: flash_attention
sizes: {policy: measured, traffic: data/traffic.yaml, profile: profile.yaml}
budget: {max_graphs: 6}
"""


@pytest.fixture
def spec(tmp_path):
    """A spec's file, with the traffic in a folder next to it."""
    model = Model(name="m", num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=4096)
    curves = [
        CostCurve(role=Role.TARGET, mode=mode, tokens=(1, 8, 64, 512), milliseconds=(1.0, 1.5, 2.0, 6.0))
        for mode in (GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE)
    ]
    device = Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=80 << 30, multiprocessors=132)
    profile = Profile(source="a test", date="2026-11-22T13:00:00Z", device=device, model=model, curves=tuple(curves))
    line = TrafficCount(role=Role.TARGET, num_reqs=8, num_tokens=8, query_len=1, past_prompt=True, count=90_000)
    (tmp_path / "data").mkdir()
    codec.write(tmp_path / "data" / "traffic.yaml", codec.dumps(Traffic(sources=("a test",), batches=(line,))))
    codec.write(tmp_path / "profile.yaml", codec.dumps(profile))
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC, encoding="utf-8")
    return path


def test_command_plans_by_the_files_that_a_spec_names(spec, run):
    """With a forecast whose digests are those of the files."""
    result = run("plan", str(spec), "-e", "h100", "-o", str(spec.parent / "plan.yaml"))
    assert result.code == 0, result.err
    plan = codec.load_plan(spec.parent / "plan.yaml")
    assert plan.forecast is not None
    assert plan.num_graphs <= 6
    assert plan.forecast.mean_step_ms == pytest.approx(1.5)
    assert codec.load_measurements(spec).traffic.steps == 90_000


@pytest.mark.parametrize(("name", "line"), [("profile.yaml", "sizes.profile"), ("data/traffic.yaml", "sizes.traffic")])
def test_missing_file_has_its_place_in_the_spec(spec, name, line):
    """And what writes it."""
    (spec.parent / name).unlink()
    with pytest.raises(InvalidDocument, match=f":5:[0-9]+: {line}: no such file"):
        codec.load_measurements(spec)


def test_spec_without_files_has_no_measurements(spec, run):
    """The planner then says what the policy needs."""
    spec.write_text(SPEC.replace(", traffic: data/traffic.yaml, profile: profile.yaml", ""), encoding="utf-8")
    assert codec.load_measurements(spec) is None
    result = run("plan", str(spec), "-e", "h100")
    assert result.code == 1
    assert "needs a traffic and a profile" in result.err


def test_one_file_of_the_two_is_not_enough(spec):
    """Both are named, or neither is."""
    spec.write_text(SPEC.replace(", profile: profile.yaml", ""), encoding="utf-8")
    with pytest.raises(InvalidDocument, match="measured sizes need a profile"):
        codec.load_measurements(spec)
