"""The benchmark's tiny form runs here, without graphs, and measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers_in_process as module


@pytest.mark.thorough
@pytest.mark.skipif(module.torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_tiny_benchmark_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens, no capture, every step counted, and a file with where it was measured."""
    file = tmp_path / "result.json"
    monkeypatch.setattr("sys.argv", ["transformers_in_process.py", "--tiny", "--rounds", "1", "--output", str(file)])
    assert module.main() == 0
    result = json.loads(file.read_text("utf-8"))
    targets = result["targets"]
    assert targets["no capture while serving"]
    assert targets["greedy tokens in float32 equal those of an eager run"]
    (only,) = result["results"]["rounds"]
    planned = only[module.PLANNED]
    assert sum(planned["eager_steps"].values()) == sum(phase["steps"] for phase in planned["phases"].values())
    assert {"command", "hardware", "packages"} <= set(result["provenance"])


def test_varied_load_has_other_lengths_and_arrivals() -> None:
    """Half of the requests are there at once; the same number again arrives at later steps."""
    scale = module.tiny()
    load = module.varied(scale, 0)
    assert sum(request.step == 0 for request in load) == scale.requests // 2
    assert len(load) == scale.requests // 2 + scale.requests
    assert len({len(request.prompt) for request in load}) > 1
    assert all(len(request.prompt) + request.output <= 4 * scale.length for request in load)
