"""The command ``run``: LoRA adapters, dumps of graphs, and progress by rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capture_planner.errors import RunError
from support.commands import Run, spec_for
from support.timelines import assert_timeline_of

pytest.importorskip("torch")
pytest.importorskip("transformers")

launch = pytest.importorskip("capture_planner_runner.launch.launch")

SPEC = spec_for(3)
LAZY = "capture: {policy: lazy, memory: 64MiB, seconds_per_minute: 600}\n"
FEW = ("--requests", "3", "--prompt-tokens", "1:9", "--output-tokens", "2:6")
SOME = ("--requests", "8", "--prompt-tokens", "1:9", "--output-tokens", "2:6")


@pytest.fixture
def run(executing: Callable[[str, str], Run]) -> Run:
    """Return a function that calls ``run``, in a folder with the plan of ``SPEC``."""
    return executing("run", SPEC)


def test_a_plan_with_lora_runs_with_adapters_or_says_that_it_has_none(run: Run) -> None:
    """Graphs are dispatched by the number of active adapters, tokens are verified, and the report has both."""
    Path("lora.yaml").write_text(SPEC + "lora: {max_active: 2, specialize: true}\n", "utf-8")
    without = run("lora.yaml", *FEW, "--eager")
    assert "the plan has LoRA and the run had no adapters" in " ".join(without.out.split())
    data = run("lora.yaml", "--adapters", "3", "--format", "json", *SOME, "--check", "tokens").data
    assert len(data["adapters"]) == 3
    assert data["differing"] == []
    assert {request["adapter"] for request in data["requests"]} > {0}
    active = {f["active_loras"]: f["entry"]["active_loras"] for f in data["forwards"] if f["role"] == "target"}
    assert max(active) > 1
    assert all(graph >= count for count, graph in active.items())
    ran = run("lora.yaml", "--adapters", "3", "--eager", *SOME)
    assert re.search(r"^Adapters$\n +3 adapters, at most 2 at once: random adapter 1", ran.out, re.M)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("none",), "--adapters none: no such folder; give folders, or one number."),
        (("2", "3"), "--adapters 2: no such folder"),
        (("0",), "--adapters 0: expected 1 to 1024."),
        ((".",), "the plan has no LoRA; plan with lora: {max_active: N}"),
    ],
)
def test_adapters_that_a_run_cannot_have_are_refused(run: Run, given: tuple[str, ...], said: str) -> None:
    """In a line, with exit code 1 or 2."""
    ran = run("plan.yaml", *FEW, *(word for one in given for word in ("--adapters", one)))
    assert ran.code in (1, 2)
    assert said in " ".join(ran.err.split())


@pytest.mark.parametrize("more", [(), ("--eager",)])
def test_a_timeline_has_each_row_of_the_report_at_its_time(run: Run, more: tuple[str, ...]) -> None:
    """Each forward lies inside its step, no two events overlap, and durations equal the report's."""
    Path("lazy.yaml").write_text(f"{SPEC}{LAZY}", "utf-8")
    report = run("lazy.yaml", "--format", "json", *FEW, *more, "--timeline", "timeline.json").data
    assert_timeline_of(json.loads(Path("timeline.json").read_text("utf-8")), report)


def test_the_graphs_of_a_run_are_dumped(run: Run) -> None:
    """A file each; not without graphs."""
    data = run("plan.yaml", "--format", "json", *FEW, "--dump-graphs", "graphs").data
    files = list(Path("graphs").iterdir())
    assert len(files) == data["captured"]["graphs"] > 0
    assert all("aten." in file.read_text("utf-8") for file in files)
    refused = run("plan.yaml", *FEW, "--eager", "--dump-graphs", "graphs")
    assert (refused.code, "--dump-graphs goes with captures" in refused.err) == (1, True)


def test_a_dump_that_fails_after_serving_costs_no_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of first uses are dumped last: an error and an exit code, and all that was served."""
    Path("lazy.yaml").write_text(f"{SPEC}{LAZY}", "utf-8")
    dumps = []

    def full_at_the_second(graphs: Any, folder: Path) -> list[Path]:
        dumps.append(folder)
        if len(dumps) > 1:
            raise RunError(f"{folder}: no space left")
        return []

    monkeypatch.setattr(launch, "dump_graphs", full_at_the_second)
    ran = run("lazy.yaml", "--format", "json", *FEW, "--dump-graphs", "graphs")
    assert ran.document(1)["throughput"]["finished"] == 3
    assert ran.err.splitlines()[-1] == "error: graphs: no space left"
    assert len(dumps) == 2


@pytest.mark.parametrize(("rank", "shown"), [(None, True), ("0", True), ("1", False)])
def test_the_first_rank_alone_shows_progress(
    run: Run, monkeypatch: pytest.MonkeyPatch, rank: str | None, shown: bool
) -> None:
    """On the standard error stream; it names the mode and the role whose graphs are captured."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    ran = run("plan.yaml", *FEW, "--progress")
    assert ran.code == 0
    assert ("Capturing recorded graphs (FULL," in " ".join(ran.err.split())) == ("serve" in ran.err) == shown
    assert "capture " not in ran.out
