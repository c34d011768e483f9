"""``run --check tensors``: what it says where nothing differs, and where something does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commands import Run

pytest.importorskip("torch")
pytest.importorskip("transformers")

SPEC = """\
version: 1
model: {name: tiny, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16, hidden_size: 32,
        vocab_size: 64, max_model_len: 64, dtype: float32}
limits: {max_num_reqs: 3, max_num_tokens: 12}
mode: FULL_AND_PIECEWISE
backend: reference
speculative: {method: eagle, num_tokens: 2}
sizes: {policy: explicit, num_tokens: [4, 12], num_reqs: [2, 3]}
"""
FEW = ("plan.yaml", "--requests", "3", "--prompt-tokens", "1:9", "--output-tokens", "2:6", "--check", "tensors")


@pytest.fixture
def run(executing: Callable[[str, str], Run]) -> Run:
    """Return a function that calls ``run``, in a folder with the plan of ``SPEC``."""
    return executing("run", SPEC)


def by_value(text: str, title: str = "First wrong tensor") -> dict[str, str]:
    """Return the rows of a section of the report, by their first cell."""
    lines = text.partition(f"{title}\n")[2].partition("\n\n")[0].splitlines()
    cells = (re.split(" {2,}", line.strip(), maxsplit=1) for line in lines)
    return {row[0]: row[-1] for row in cells}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference backend scale what attention in a FULL graph of the target is, from layer 1 on."""
    from capture_planner_reference.executor import ReferenceExecutor

    attend = ReferenceExecutor.attend

    def scaled(self: Any, layer: int, query: Any, out: Any, scoring: Any, metadata: Any) -> None:
        attend(self, layer, query, out, scoring, metadata)
        if metadata.is_full and layer == 1:
            out.mul_(2)

    monkeypatch.setattr(ReferenceExecutor, "attend", scaled)


@pytest.mark.parametrize("drafter", ["copy", "random"])
def test_a_run_without_a_difference_counts_what_was_compared(run: Run, drafter: str) -> None:
    """All graphs agree: exit code 0, the errors by kind of tensor, and what no graph served."""
    ran = run(*FEW[:-1], "tensors,tokens", "--drafter", drafter, "--format", "json")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    found = data["comparison"]
    assert found["difference"] is None
    assert sum(found["compared"].values()) == sum(
        forward["repeats"] for forward in data["forwards"] if forward["entry"]
    )
    assert {seen["tensor"] for seen in found["largest"]} >= {"queries", "key cache", "attention", "hidden"}
    assert all(seen["error"] <= seen["tolerance"] for seen in found["largest"])
    assert "each the same from its graph and eager" in ran.err


def test_the_text_of_a_run_without_a_difference_says_so(run: Run) -> None:
    """In a section of its own, and without a wrong tensor."""
    text = run(*FEW).out
    assert "Comparison\n" in text
    assert "compared with eager, and the same" in text
    assert "First wrong tensor" not in text


def test_a_difference_stops_the_run_with_its_place(run: Run, broken: None) -> None:
    """Exit code 2; layer, tensor, entry, padding and metadata as text, and on the page."""
    ran = run(*FEW, "--html", "run.html")
    assert ran.code == 2
    seen = by_value(ran.out)
    assert ran.out.startswith("DIFFERENT: ")
    assert seen["where"] == "layer 1, attention"
    assert seen["after"] == "layer 1, value cache"
    assert seen["entry"].startswith("FULL ")
    assert float(seen["graph"]) == pytest.approx(2 * float(seen["eager"]), rel=1e-3)
    assert seen["largest error"].startswith("1, and 0.0001 is allowed")
    assert "request-" in seen["requests"]
    metadata = by_value(ran.out, "Metadata of that forward")
    assert {"field", "input_ids", "slot_mapping", "block_table", "seq_lens"} <= set(metadata)
    page = Path("run.html").read_text("utf-8")
    assert "First wrong tensor" in page
    assert "DIFFERENT: " in page


def test_a_difference_is_complete_as_data(run: Run, broken: None) -> None:
    """Every value of every field, real and padded; one document on the standard output."""
    ran = run(*FEW, "--format", "json")
    assert ran.code == 2
    assert "different from eager, after" in ran.err
    told = json.loads(ran.out)["comparison"]["difference"]
    assert (told["role"], told["layer"], told["tensor"]) == ("target", 1, "attention")
    assert told["entry"]["mode"] == "FULL"
    assert told["error"] == pytest.approx(1, rel=1e-3)
    assert len(told["requests"]) == told["num_reqs"]
    fields = {field["name"]: field for field in told["fields"]}
    assert len(fields["slot_mapping"]["real"]) == told["num_tokens"]
    assert len(fields["slot_mapping"]["padding"]) == told["padded_tokens"]
    assert len(fields["seq_lens"]["real"]) == told["num_reqs"]
    assert len(fields["seq_lens"]["padding"]) == told["padded_reqs"]
    assert fields["all.max_query_len"]["real"] == told["entry"]["query_len"]


def test_a_comparison_needs_graphs(run: Run) -> None:
    """Eager has nothing to be compared with."""
    ran = run(*FEW, "--eager")
    assert (ran.code, ran.out) == (1, "")
    assert "--check tensors goes with graphs, so without --eager" in " ".join(ran.err.split())


def test_where_no_graph_fits_all_is_counted_as_eager(run: Run) -> None:
    """Nothing is compared, nothing differs, and the report says that."""
    ran = run(*FEW, "--graph-memory", "1KiB", "--format", "json")
    assert ran.code == 0
    data = json.loads(ran.out)
    assert data["comparison"]["compared"] == {}
    assert sum(data["comparison"]["eager"].values()) == sum(f["repeats"] for f in data["forwards"])
