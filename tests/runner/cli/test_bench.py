"""The command ``bench``: every option, what it refuses, and what it writes."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from capture_planner.errors import RunError
from capture_planner_runner.cli.bench import FIGURES
from capture_planner_runner.cli.bench import bench as command
from support.commands import Run, spec_for

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent.parent.parent
SPEC = spec_for(2)
LOAD = ("--load-requests", "3", "--prompt-tokens", "5", "--output-tokens", "6")


@pytest.fixture
def run(executing: Callable[[str, str], Run]) -> Run:
    """Return a function that calls ``bench``, in a folder with the plan of ``SPEC``."""
    return executing("bench", SPEC)


def test_a_plan_is_measured_printed_and_written(run: Run) -> None:
    """Tables on the screen, the same record as JSON and as a page; nothing broke."""
    ran = run("plan.yaml", "--quick", *LOAD, "--output", "bench.json", "--html", "bench.html")
    assert (ran.code, ran.err) == (0, "")
    titles = re.findall(r"^([A-Z][a-z]+(?: [a-z]+)?)$", ran.out, re.M)
    assert titles == [
        "Targets",
        "Decode",
        "Preparation",
        "Draft chain",
        "Throughput",
        "Capture",
        "Pools",
        "Measured with",
    ]
    assert "3 requests of 5 + 6 tokens" in ran.out
    assert ran.out.endswith("written to bench.html\nwritten to bench.json\n")
    data = json.loads(Path("bench.json").read_text("utf-8"))
    assert [row["num_reqs"] for row in data["decode"]] == [1, 2]
    assert data["throughput"]["num_requests"] == 3
    assert [absent["figure"] for absent in data["absent"]] == ["chain"]
    assert data["pools"]["differing"] == []
    assert data["facts"]["command"].startswith("capture-planner bench plan.yaml --quick")
    page = Path("bench.html").read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert 'id="figure-decode"' in page


def test_json_is_one_document_with_the_documented_keys(run: Run) -> None:
    """docs/howto/measure-a-plan.md lists the keys; with ``--only`` the others are empty."""
    text = (ROOT / "docs" / "howto" / "measure-a-plan.md").read_text("utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text.partition("| key |")[2], re.M)
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    data = run("plan.yaml", "--only", "preparation", "--quick", "--format", "json").data
    assert set(data) == documented
    assert set(FIGURES) <= documented
    assert data["preparation"]
    assert "captured" not in data["facts"]
    assert not any(data[name] for name in FIGURES if name != "preparation")


def test_every_figure_is_explained() -> None:
    """The figures of the command are those of the record, and the page has a row for each."""
    from capture_planner_runner.bench.record import FIGURES as MEASURED

    assert FIGURES == MEASURED
    text = (ROOT / "docs" / "howto" / "measure-a-plan.md").read_text("utf-8")
    for name in FIGURES:
        assert f"| `{name}` |" in text


def test_a_spec_is_planned_for_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``--environment`` that is a CPU where there is no GPU, and a note says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("spec.yaml").write_text(SPEC.replace("speculative: {method: eagle, num_tokens: 2}\n", ""), "utf-8")
    only = ("--only", "decode", "--requests", "1", "--quick", "--format", "json")
    alone = run("spec.yaml", *only)
    named = run(
        "spec.yaml", *only, "--environment", "cpu", "--seed", "3", "--page-size", "4", "--pages", "40", "--compile"
    )
    assert alone.err == "note: no --environment given; using cpu\n"
    assert named.err == ""
    assert alone.data["spec"] == named.data["spec"]
    assert [row["num_reqs"] for row in named.data["decode"]] == [1]
    assert (named.data["page_size"], alone.data["page_size"]) == (4, 16)
    assert named.data["facts"]["seed"] == "3"
    assert "compiled" in named.data["facts"]
    assert "compiled" not in alone.data["facts"]


def test_a_lazy_plan_says_that_all_is_captured_at_start(run: Run) -> None:
    """In the facts of the record."""
    Path("lazy.yaml").write_text(f"{SPEC}capture: {{policy: lazy, memory: 1MiB, seconds_per_minute: 1}}\n", "utf-8")
    only = ("--only", "preparation", "--quick", "--format", "json")
    says = run("lazy.yaml", *only).data["facts"]["captured"]
    assert re.fullmatch(r"all at start; run captures \d+ graphs on first use", says)


def test_a_model_of_ones_own_is_measured(run: Run) -> None:
    """Its configuration; one of another shape than the plan's is refused."""
    from transformers import LlamaConfig

    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    for name, layers in (("right", 1), ("wrong", 2)):
        LlamaConfig(**shape, intermediate_size=40, num_hidden_layers=layers).save_pretrained(name)
    only = ("--only", "decode", "--requests", "1", "--quick", "--no-compile")
    assert "of right, random weights" in run("plan.yaml", *only, "--model", "right").out
    wrong = run("plan.yaml", *only, "--model", "wrong/config.json")
    assert wrong.code == 1
    assert "model.num_layers: the plan says 1" in wrong.err


def test_progress_is_shown_where_it_is_wanted(run: Run) -> None:
    """On the standard error stream, by figure."""
    assert "capture" in run("plan.yaml", "--only", "capture", "--quick", "--progress").err


def break_figure(monkeypatch: pytest.MonkeyPatch, figure: str, error: BaseException) -> None:
    """Let ``figure`` end in an error."""

    def broken(*given: object) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("capture_planner_runner.bench.measure"), figure, broken)


def test_what_broke_ends_in_exit_code_1_and_a_whole_record(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure says why it is not there, and the others are."""
    break_figure(monkeypatch, "decode", RunError("the request r0 was lost"))
    ran = run("plan.yaml", "--only", "decode,capture", "--output", "bench.json", "--quick")
    assert ran.code == 1
    assert "decode broke: RunError: the request r0 was lost" in " ".join(ran.out.split())
    data = json.loads(Path("bench.json").read_text("utf-8"))
    assert data["capture"]["graphs"] > 0
    assert {(absent["figure"], absent["failed"]) for absent in data["absent"]} == {("decode", True)}


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_interruption_ends_in_exit_code_130_and_a_whole_record(
    run: Run, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Tables, JSON and page are written as ever, and say that it was interrupted."""
    break_figure(monkeypatch, "capture", KeyboardInterrupt())
    files = ("--output", "bench.json", "--html", "bench.html")
    only = ("--only", "decode,capture,pools", "--requests", "1", "--quick")
    ran = run("plan.yaml", *only, *files, "--format", form)
    assert ran.code == 130
    data = json.loads(Path("bench.json").read_text("utf-8"))
    assert data["interrupted"]
    assert data["decode"]
    assert [absent["figure"] for absent in data["absent"]] == ["capture", "pools"]
    assert "INTERRUPTED: the bench was stopped" in Path("bench.html").read_text("utf-8")
    if form == "json":
        assert json.loads(ran.out) == data
    else:
        assert "interrupted: the bench was stopped" in ran.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan.yaml", "--only", "speed"), "'speed' is not a figure; choose from decode, preparation"),
        (("plan.yaml", "--requests", "1,x"), "'1,x' is not a comma-separated list"),
        (("plan.yaml", "--requests", "0"), "each number must be from 1"),
        (("plan.yaml", "--output", "nowhere/b.json"), "--output nowhere/b.json: no such folder"),
        (("plan.yaml", "--html", "."), "--html . is a folder; name a file"),
        (("plan.yaml", "--output", "/proc/x"), "--output /proc/x cannot be written: "),
        (("plan.yaml", "--output", "dangling"), "--output dangling cannot be written: "),
        (("plan.yaml", "--html", "loop"), "--html loop cannot be written: "),
        (("plan.yaml", "--output", "b", "--html", "./b"), "--html b is also the file of --output"),
        (("plan.yaml", "--html", "plan.yaml"), "--html plan.yaml is also the file of PLAN|SPEC"),
        (("plan.yaml", "--pages", "1"), "decode of 1 request needs 4 pages of 16 tokens, but --pages is 1"),
        (("plan.yaml", "--requests", "1,3"), "--requests names 3, but the plan is for at most 2 requests"),
        (("plan.yaml", "--prompt-tokens", "64"), "--prompt-tokens 64: too long for a model of 64 tokens"),
        (("plan.yaml", "--only", "decode", "--load-requests", "3"), "--load-requests goes with throughput"),
        (("plan.yaml", "--only", "decode", "--no-compare"), "--no-compare goes with throughput"),
        (("plan.yaml", "--environment", "cpu"), "--environment goes with a spec"),
        (("plan.yaml", "--threads", "100000"), "--threads"),
        (("nowhere.yaml",), "nowhere.yaml"),
        (("none.yaml", "-e", "cpu"), "the plan has no graph that serves a decode of 1, 2 requests"),
        (("h100.yaml",), "this machine has no CUDA device"),
    ],
)
def test_what_cannot_be_measured_is_refused(run: Run, arguments: tuple[str, ...], says: str) -> None:
    """In a sentence, before anything is measured."""
    Path("dangling").symlink_to("nowhere/b.json")
    Path("loop").symlink_to("loop")
    Path("none.yaml").write_text(SPEC.replace("FULL_AND_PIECEWISE", "NONE"), "utf-8")
    source = ROOT / "plans" / "locked" / "llama-3.1-8b.h100.yaml"
    Path("h100.yaml").write_text(source.read_text("utf-8"), "utf-8")
    if arguments[0] == "h100.yaml" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    ran = run(*arguments)
    assert (ran.code, ran.out) == (1, "")
    assert says in ran.err
    assert not Path("b").exists()


def test_a_device_can_be_written_to(run: Run) -> None:
    """What is no regular file is left where it is; a trial leaves nothing behind."""
    before = set(Path().iterdir())
    files = ("--output", os.devnull, "--html", "b.html")
    ran = run("plan.yaml", "--only", "capture", "--quick", *files, "--no-progress")
    assert (ran.code, "capture" in ran.err) == (0, False)
    assert set(Path().iterdir()) - before == {Path("b.html")}


def test_the_lint_and_the_environment_are_asked_as_in_run(run: Run) -> None:
    """A plan for other versions is refused, and measured where that is asked for."""
    text = Path("plan.yaml").read_text("utf-8")
    assert "environment:" in text
    Path("other.yaml").write_text(
        re.sub(r"(environment:\n(?:  .*\n)*?  name: cpu\n)", r"\1  packages: {torch: 0.0.1}\n", text), "utf-8"
    )
    only = ("--only", "decode", "--requests", "1", "--quick", "--compare")
    refused = run("other.yaml", *only)
    assert refused.code == 1
    assert "torch 0.0.1 was planned for" in refused.err
    assert run("other.yaml", *only, "--any-environment", "--any-plan").code == 0


def test_synthetic_acceptance_is_a_fact_of_the_record(run: Run) -> None:
    """Every figure that serves draws it, and shares that no run can have are refused before anything is measured."""
    only = ("--only", "preparation", "--quick", "--format", "json", "--acceptance")
    assert run("plan.yaml", *only, "1,0.5").data["facts"]["acceptance"] == "synthetic: 1, 0.5"
    refused = run("plan.yaml", *only, "0.5,1")
    assert refused.code == 1
    assert "share 1 is 1, expected 0 to 0.5" in refused.err


def test_every_option_is_tried_here() -> None:
    """A new option needs a test."""
    text = Path(__file__).read_text("utf-8")
    options = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    tried = set(re.findall(r'"(--?[\w-]+)"', text))
    assert {name for name in options if name.startswith("--")} <= tried
