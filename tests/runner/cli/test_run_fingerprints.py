"""``run --fingerprints`` and ``diff``: which graphs of a run are not those of another one."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from capture_planner.codec import load_plan
from capture_planner.records._base import replace
from support.commands import Run, spec_for

pytest.importorskip("torch")
pytest.importorskip("transformers")

LAZY = "capture: {policy: lazy, memory: 64MiB, seconds_per_minute: 600}\n"
FEW = ("--requests", "1", "--prompt-tokens", "1:4", "--output-tokens", "2", "--format", "json")


@pytest.fixture
def run(executing: Callable[[str, str], Run]) -> Run:
    """Return a function that calls ``run``, in a folder with a plan."""
    return executing("run", spec_for(2))


def test_a_lock_with_fingerprints_says_which_graphs_changed(run: Run, call: Run) -> None:
    """Nothing where nothing did; the graph and the kernel where one did; never an error of ``check``."""
    first = run("plan.yaml", *FEW, "--fingerprints", "locked.yaml")
    assert first.err == "written to locked.yaml\n"
    Path("first.json").write_text(first.out, "utf-8")
    plan = load_plan("locked.yaml")
    assert plan.fingerprints is not None
    captured = json.loads(first.out)["captured"]["entries"]
    assert len(plan.fingerprints.graphs) == len(captured) == plan.num_graphs
    again = run("locked.yaml", *FEW)
    assert (again.code, again.err) == (0, "")
    Path("again.json").write_text(again.out, "utf-8")
    assert call("check", "locked.yaml", "--spec", "spec.yaml").code == 0
    assert call("diff", "first.json", "again.json").out == "the graphs of both runs are the same\n"

    text = Path("locked.yaml").read_text("utf-8")
    Path("other.yaml").write_text(text.replace("aten.argmax.default", "aten.other"), "utf-8")
    other = run("other.yaml", *FEW)
    assert other.code == 0
    notes = other.err.splitlines()
    assert notes[0].startswith("note: the fingerprints in the plan are of ")
    assert all("aten.other (1x) replaced by aten.argmax.default (1x)" in note for note in notes[1:9])
    changed = call("diff", "locked.yaml", "other.yaml")
    assert changed.code == 2
    assert re.match(r"target FULL .*: aten.argmax.default \(1x\) replaced by aten.other \(1x\)\n", changed.out)


def test_a_lock_of_a_lazy_plan_keeps_the_graphs_that_were_not_used(run: Run, call: Run) -> None:
    """Runs of more and of fewer requests use other graphs: no note of a change, and no fingerprint is lost."""
    Path("spec.yaml").write_text(f"{spec_for(4)}{LAZY}", "utf-8")
    assert call("plan", "spec.yaml", "-e", "cpu", "-o", "lazy.yaml").code == 0
    locked = {}
    for file, lock, count in (
        ("lazy.yaml", "many.yaml", "4"),
        ("many.yaml", "few.yaml", "1"),
        ("few.yaml", "a.yaml", "3"),
    ):
        ran = run(file, "--requests", count, *FEW[2:], "--fingerprints", lock)
        assert (ran.code, ran.err) == (0, f"written to {lock}\n")
        fingerprints = load_plan(lock).fingerprints
        assert fingerprints is not None
        now = fingerprints.by_graph()
        assert now.items() >= locked.items()
        locked = now
    other = replace(fingerprints, device="another")
    assert other.updated(fingerprints) == fingerprints


def test_reports_of_runs_are_compared_graph_by_graph(run: Run, call: Run) -> None:
    """Changed, new and absent ones; and not with anything else."""
    data = json.loads(run("plan.yaml", *FEW).out)
    Path("old.json").write_text(json.dumps(data), "utf-8")
    entries = data["captured"]["entries"]
    entries[0]["fingerprint"]["nodes"] += 3
    entries[1]["entry"]["num_tokens"] += 1000
    Path("new.json").write_text(json.dumps(data), "utf-8")
    changed = call("diff", "old.json", "new.json", "--format", "json")
    assert changed.code == 2
    assert [change["what"] for change in json.loads(changed.out)["changes"]] == ["fingerprint", "added", "gone"]
    assert "3 nodes" not in changed.out
    mixed = call("diff", "old.json", "plan.yaml")
    assert mixed.code == 1
    assert "plan.yaml is no JSON report of run" in mixed.err
    for entry in entries:
        entry["fingerprint"] = None
    Path("new.json").write_text(json.dumps(data), "utf-8")
    unknown = call("diff", "old.json", "new.json")
    assert unknown.code == 1
    assert "new.json has no fingerprints of its graphs" in unknown.err
    entries[0]["entry"] = {"mode": "FULL"}
    Path("new.json").write_text(json.dumps(data), "utf-8")
    broken = call("diff", "old.json", "new.json")
    assert broken.code == 1
    assert "new.json: its captured.entries cannot be read" in broken.err


def test_fingerprints_need_captures(run: Run) -> None:
    """Without graphs there is nothing to write."""
    refused = run("plan.yaml", *FEW, "--eager", "--fingerprints", "locked.yaml")
    assert refused.code == 1
    assert "--fingerprints goes with captures, so without --eager" in refused.err
