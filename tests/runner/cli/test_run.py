"""The command ``run``: its options, and the report of a run that was interrupted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from capture_planner_runner.cli.run import run as command
from support import forks
from support.commands import Run, spec_for

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent.parent.parent
SPEC = spec_for(3)
FEW = ("--requests", "3", "--prompt-tokens", "1:9", "--output-tokens", "2:6")


@pytest.fixture
def run(executing: Callable[[str, str], Run]) -> Run:
    """Return a function that calls ``run``, in a folder with the plan of ``SPEC``."""
    return executing("run", SPEC)


def run_json(run: Run, *arguments: str) -> Any:
    """Run the plan, and return its report as data."""
    return run("plan.yaml", "--format", "json", *arguments).data


# Reports ---------------------------------------------------------------------------------------


def test_a_plan_runs(run: Run) -> None:
    """Everything is captured and served, and the sections of the report come in their order."""
    ran = run("plan.yaml", *FEW, "--no-progress")
    assert (ran.code, ran.err) == (0, "")
    titles = re.findall(r"^([A-Z][a-z]+(?: [a-z]+)*)$", ran.out, re.M)
    assert titles == [
        "Run of tiny",
        "Captured",
        "Served from",
        "Fallbacks",
        "Graphs used",
        "Memory",
        "Memory by graph",
        "Steps",
        "Acceptance",
        "Latency",
    ]
    assert "requests: 3 finished, 0 cut off" in ran.out


def test_json_is_one_document_with_the_documented_keys(run: Run) -> None:
    """docs/howto/run-a-plan.md lists the keys; nothing else is on the standard output."""
    page = (ROOT / "docs" / "howto" / "run-a-plan.md").read_text("utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page.partition("| key |")[2], re.M)
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    data = run_json(run, *FEW, "--check", "tokens")
    assert set(data) == documented
    assert data["differing"] == []
    assert data["comparison"] is None
    assert len(data["captured"]["entries"]) == data["captured"]["planned"] == data["captured"]["graphs"]
    assert {request["name"] for request in data["requests"]} == {f"request-{i}" for i in range(3)}


def test_html_is_a_page_of_the_same_run(run: Run) -> None:
    """``--html`` writes beside what is printed."""
    ran = run("plan.yaml", *FEW, "--html", "run.html", "--format", "json", "--warm-up")
    assert ran.data["throughput"]["finished"] == 3
    assert ran.data["warm_up"]["ran"] == ran.data["warm_up"]["shapes"]
    assert ran.err == "written to run.html\n"
    page = Path("run.html").read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "Served from" in page


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("nowhere/run.html", "--html nowhere/run.html: no such folder"),
        (".", "--html . is a folder; name a file"),
        ("/proc/x", "--html /proc/x cannot be written: "),
        ("dangling", "--html dangling cannot be written: "),
        ("loop", "--html loop cannot be written: "),
        ("plan.yaml", "--html plan.yaml is also the file of PLAN|SPEC; name another"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_a_model_is_made(run: Run, file: str, says: str) -> None:
    """What ran for an hour would else have nowhere to go; the plan itself is not overwritten."""
    Path("dangling").symlink_to("nowhere/run.html")
    Path("loop").symlink_to("loop")
    before = Path("plan.yaml").read_text("utf-8")
    refused = run("plan.yaml", "--html", file)
    assert (refused.code, refused.out) == (1, "")
    assert says in refused.err
    assert Path("plan.yaml").read_text("utf-8") == before


def test_a_spec_is_planned_for_this_machine(run: Run) -> None:
    """Without ``--environment`` that is a CPU, and a note says so; with one nothing needs saying."""
    alone = run("spec.yaml", *FEW, "--eager", "--format", "json")
    named = run("spec.yaml", *FEW, "--eager", "--format", "json", "--environment", "cpu")
    assert alone.err == "note: no --environment given; using cpu\n"
    assert named.err == ""
    assert alone.data["spec"] == named.data["spec"]
    assert alone.data["environment"] == named.data["environment"] == "cpu"


# Requests --------------------------------------------------------------------------------------


def test_generated_requests_follow_their_options(run: Run) -> None:
    """Lengths are within their ranges, and a seed decides them and the answers."""
    options = ("--eager", "--requests", "4", "--prompt-tokens", "2:5", "--output-tokens", "3", "--rate", "50")
    first, again, other = (run_json(run, *options, "--step-time", "0.5", "--seed", seed)["requests"] for seed in "778")
    assert [request["tokens"] for request in first] == [request["tokens"] for request in again]
    assert [request["tokens"] for request in first] != [request["tokens"] for request in other]
    for request in first + other:
        assert 2 <= request["prompt_tokens"] <= 5
        assert request["output_tokens"] == len(request["tokens"]) == 3


@pytest.mark.parametrize("speed", ["1", "1000"])
def test_a_trace_is_played(run: Run, speed: str) -> None:
    """The shipped trace, cut to the model: names are lines; played fast, its requests meet."""
    shutil.copytree(ROOT / "plans" / "traffic", "traffic")
    trace = ("--trace", "traffic/short_chat.csv", "--requests", "4", "--clip")
    data = run_json(run, *trace, "--speed", speed, "--drafter", "copy", "--eager")
    assert {r["name"].partition(":")[0] for r in data["requests"]} == {"short_chat.csv"}
    assert data["throughput"]["finished"] == 4
    together = max(step["num_reqs"] for step in data["steps"])
    assert together == 3 if speed == "1000" else together < 3


def test_prompts_are_read_and_answered_as_text(run: Run) -> None:
    """Each answer is as long as was asked for, by the option or by the line."""
    words = [f"w{index}" for index in range(64)]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    Path("tokenizer").mkdir()
    made.save("tokenizer/tokenizer.json")
    Path("tokenizer/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    Path("prompts.jsonl").write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w4", "max_new_tokens": 2}\n')
    prompts = ("--prompts", "prompts.jsonl", "--tokenizer", "tokenizer", "--output-tokens", "5", "--eager")
    found = {r["name"]: r for r in run_json(run, *prompts)["requests"]}
    assert [found[f"prompts.jsonl:{n}"]["prompt_tokens"] for n in (1, 2)] == [3, 1]
    assert [found[f"prompts.jsonl:{n}"]["output_tokens"] for n in (1, 2)] == [5, 2]
    for request in found.values():
        assert request["text"].split() == [words[token] for token in request["tokens"]]


def test_a_request_that_is_too_long_is_refused_or_cut(run: Run) -> None:
    """``--clip`` serves what is refused without it."""
    long = ("--requests", "2", "--prompt-tokens", "80", "--output-tokens", "4")
    refused = run("plan.yaml", *long)
    assert (refused.code, refused.out) == (1, "")
    assert "request-0: 80 prompt tokens and 4 output tokens are more than max_model_len, 64" in refused.err
    assert "--clip" in refused.err
    for request in run_json(run, *long, "--clip", "--eager")["requests"]:
        assert request["prompt_tokens"] + request["output_tokens"] == 64


# Models and drafters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "accepted"),
    [(("copy",), "all"), (("miss",), "none"), (("chance", "--chance", "0.5"), "some"), (("random",), None)],
)
def test_what_a_drafter_proposes_changes_no_token(run: Run, drafter: tuple[str, ...], accepted: str) -> None:
    """Each is verified; how many drafts are right is what its name says."""
    lengths = ("--eager", "--requests", "3", "--prompt-tokens", "1:9", "--output-tokens", "16")
    ran = run("plan.yaml", *lengths, "--check", "tokens", "--format", "json", "--drafter", *drafter)
    assert ran.err.startswith("verified: 3 requests, every token and row is within the noise of exact runs\n")
    # What is drafted past the end of an answer is no answer of the target.
    rate = ran.data["acceptance"]["rate"]
    assert {"all": rate > 0.8, "none": rate == 0, "some": 0 < rate < 0.8, None: True}[accepted]


def test_a_model_and_a_drafter_are_configurations(run: Run) -> None:
    """Both get random weights; a model with other numbers than the plan's is refused, by each number."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "num_hidden_layers": 1,
    }
    for name, layers in (("model", 1), ("head", 1), ("deep", 2)):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    ran = run("plan.yaml", *FEW, "--model", "model", "--drafter", "head", "--check", "tokens", "--format", "json")
    assert ran.data["differing"] == []
    assert "of model, random weights" in ran.data["model"]
    assert "of head, random weights" in ran.data["model"]
    refused = run("plan.yaml", *FEW, "--model", "deep")
    assert refused.code == 1
    assert "model.num_layers: the plan says 1" in refused.err


# Memory, checks and exit codes -----------------------------------------------------------------


def test_the_cache_has_the_pages_that_were_asked_for(run: Run) -> None:
    """Keys and values of both layers, with the null page; too few pages are refused."""
    data = run_json(run, *FEW, "--eager", "--pages", "20", "--page-size", "4", "--threads", "2")
    assert data["captured"]["kv_cache"] == 2 * 2 * (20 + 1) * 4 * 16 * 4
    assert data["host"]["threads"] == "2"
    refused = run("plan.yaml", "--requests", "1", "--pages", "1")
    assert refused.code == 1
    assert "the KV cache has 1; give it more (--pages)" in refused.err


def test_a_graph_that_does_not_fit_is_left_out_and_listed(run: Run) -> None:
    """Every batch is served all the same, eager, with the reason; enough memory leaves nothing out."""
    data = run_json(run, *FEW, "--graph-memory", "1KiB")
    assert data["captured"]["graphs"] == 0
    assert data["captured"]["dropped"] == data["captured"]["planned"]
    assert {(entry["reason"], bool(entry["message"])) for entry in data["captured"]["entries"]} == {("memory", True)}
    assert {fallback["reason"] for fallback in data["fallbacks"]} == {"memory"}
    assert data["throughput"]["finished"] == 3
    shown = run("plan.yaml", *FEW, "--graph-memory", "1KiB").out
    for kind in ("target PIECEWISE", "target FULL", "draft_prefill PIECEWISE", "draft_decode FULL"):
        assert f"not captured: {kind}" in shown
    assert run_json(run, *FEW, "--graph-memory", "1GiB", "--strict")["captured"]["dropped"] == 0


def test_strict_stops_where_a_graph_does_not_fit(run: Run) -> None:
    """The largest PIECEWISE graph of the target is the first, and is named."""
    ran = run("plan.yaml", *FEW, "--graph-memory", "1KiB", "--strict")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: target: PIECEWISE 12 tokens does not fit into memory: ")


def test_neither_eager_forwards_nor_missing_guards_change_an_answer(run: Run) -> None:
    """With ``--eager`` all forwards are so because of their mode; ``--check none`` replays without guards."""
    eager, captured, trusted = (run_json(run, *FEW, *option) for option in (("--eager",), (), ("--check", "none")))
    assert eager["captured"]["entries"] == []
    assert {forward["reason"] for forward in eager["forwards"]} == {"mode"}
    assert {forward["reason"] for forward in captured["forwards"]} == {None}
    answers = {r["name"]: r["tokens"] for r in captured["requests"]}
    for data in (eager, trusted):
        assert {r["name"]: r["tokens"] for r in data["requests"]} == answers


@pytest.mark.parametrize("compiling", ["--compile", "--no-compile"])
def test_answers_survive_every_check(run: Run, compiling: str) -> None:
    """Spoiled, checked and compiled: the tokens are those of plain decoding, and the exit code is 0."""
    ran = run("plan.yaml", *FEW, "--check", "padding,indices,tokens", compiling)
    assert ran.code == 0
    assert "verified: 3 requests, every token and row is within the noise of exact runs\n" in ran.out
    assert bool(re.search(r"^ *compiled", ran.out, re.M)) == (compiling == "--compile")


def test_a_difference_is_named_and_exits_with_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that replays nothing leaves old outputs, and verification sees it."""
    from capture_planner_runner.graphs.recorded import RecordedGraph

    monkeypatch.setattr(RecordedGraph, "replay", lambda self: None)
    ran = run("plan.yaml", *FEW, "--check", "tokens", "--format", "json")
    data = ran.document(2)
    assert data["differing"]
    assert re.search(r"not verified: \d of 3 requests\n  request-", ran.err)
    assert data["verification"]["faults"]
    assert set(data["differing"]) <= {request["name"] for request in data["requests"]}


def test_synthetic_acceptance_is_reported_by_position(run: Run) -> None:
    """What was asked for next to what was drawn; the tokens are another model's, and the verdict says so."""
    data = run_json(run, *FEW, "--acceptance", "1,0", "--check", "tensors", "--no-warm-up")
    (first, second), acceptance = data["acceptance"]["positions"], data["acceptance"]
    assert acceptance["synthetic"] == [1.0, 0.0]
    assert (first["accepted"], second["accepted"]) == (first["drafted"], 0)
    assert acceptance["accepted"] == first["drafted"] > 0
    assert any("the tokens are not the model's" in line for line in data["verdict"])
    assert data["comparison"]["difference"] is None


def test_synthetic_draft_lengths_are_a_fact_of_the_run(run: Run) -> None:
    """Every step proposes its first draft and none its second; only proposed drafts count."""
    data = run_json(run, *FEW, "--proposals", "1,0", "--no-warm-up")
    assert data["host"]["draft lengths"] == "synthetic: 1, 0"
    drafted = [position["drafted"] for position in data["acceptance"]["positions"]]
    assert drafted[0] > 0
    assert not any(drafted[1:])


# Interruption ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "calls"), [("capture", 1), ("capture", 4), ("run", 1), ("run", 9)])
def test_an_interruption_anywhere_ends_in_a_report(
    run: Run, monkeypatch: pytest.MonkeyPatch, method: str, calls: int
) -> None:
    """While graphs are captured or requests served: what was done so far is reported, exit code 130."""
    from capture_planner_runner.execution.role import RoleRun

    left, inner = calls, getattr(RoleRun, method)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return inner(*arguments, **options)

    monkeypatch.setattr(RoleRun, method, interrupted)
    data = run("plan.yaml", *FEW, "--format", "json").document(130)
    assert data["interrupted"]
    if method == "capture":
        assert data["captured"]["graphs"] == calls - 1
    else:
        assert len(data["forwards"]) == calls - 1
        assert data["throughput"]["finished"] + data["throughput"]["cut_off"] == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_in_a_complete_report(run: Run, number: signal.Signals, code: int) -> None:
    """The signal itself, in a process of its own, once it serves: of Ctrl-C, and of ``docker stop``."""
    process = forks.command(
        "run", "plan.yaml", "--requests", "5000", "--prompt-tokens", "1", "--progress", "--format", "json"
    )
    while "capture" not in process.errors():
        assert process.code is None, process.err
        sleep(0.01)
    os.kill(process.pid, number)
    assert forks.wait([process], 60)
    assert process.code == code, process.err
    assert "Traceback" not in process.err
    data = json.loads(process.out)
    assert data["interrupted"]
    assert data["captured"]["graphs"] == data["captured"]["planned"]


# Options ---------------------------------------------------------------------------------------


def test_every_option_of_run_has_a_test() -> None:
    """A new option needs a test."""
    text = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_run*.py"))
    options = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    tried = set(re.findall(r'"(--?[\w-]+)"', text))
    assert {name for name in options if name.startswith("--")} <= tried
