"""``explain``: one batch, all of them, and those of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capture_planner.codec import load_plan
from support.commands import PLAN, SPEC, TINY, Run


def test_explain_a_batch(run: Run) -> None:
    ran = run("explain", PLAN, "--num-reqs", "100", "--query-len", "4")
    assert ran.code == 0
    assert ran.out.startswith("target: 100 requests, 400 tokens, 4 each -> FULL\n")
    assert "has room for" in ran.out


def test_explain_as_json(run: Run) -> None:
    data = run("explain", PLAN, "--num-reqs", "100", "--query-len", "4", "--format", "json").data
    own = {"batch", "mode", "entry", "padded_tokens", "padded_reqs", "reason", "message", "rejected"}
    assert set(data) == {"assumptions", *own}
    assert data["batch"]["num_tokens"] == 400
    assert data["mode"] == "FULL"
    assert data["entry"]["num_tokens"] == 400 + data["padded_tokens"]
    assert data["entry"]["num_reqs"] == 100 + data["padded_reqs"]
    assert data["reason"] is None
    assert data["rejected"]
    for rejected in data["rejected"]:
        assert set(rejected) == {"entry", "rejection", "message"}


@pytest.mark.parametrize(
    ("arguments", "mode", "reason"),
    [
        (["--num-reqs", "8", "--query-len", "4", "--prompt"], "PIECEWISE", None),
        (["--num-reqs", "8", "--num-tokens", "40"], "PIECEWISE", None),
        (["--num-reqs", "8", "--num-tokens", "8000"], "NONE", "sizes"),
        (["--num-reqs", "300", "--query-len", "4"], "NONE", "not_admissible"),
        (["--num-reqs", "8", "--query-len", "1", "--role", "draft_decode"], "FULL", None),
        (["--num-reqs", "8", "--query-len", "4", "--active-loras", "2"], "NONE", "not_admissible"),
    ],
)
def test_explain_says_the_mode_or_the_reason(run: Run, arguments: list[str], mode: str, reason: str | None) -> None:
    data = run("explain", PLAN, *arguments, "--format", "json").data
    assert (data["mode"], data["reason"]) == (mode, reason)
    assert ("eager" if mode == "NONE" else mode) in run("explain", PLAN, *arguments).out


def test_explain_a_decode_of_varying_lengths(run: Run, tmp_path: Path) -> None:
    """As a varying plan answers it, from flags and from a line; contradictions of flags are errors."""
    spec = Path(SPEC).read_text("utf-8")
    file = tmp_path / "varying.yaml"
    text = spec.replace("num_tokens: 3", "num_tokens: 3\n  varying_decodes: [target]")
    file.write_text(text.replace("backend: flashinfer", "backend: flash_attention"), "utf-8")
    batch = ["--num-reqs", "100", "--num-tokens", "250", "--environment", "h100"]
    ran = run("explain", str(file), *batch, "--max-query-len", "4")
    assert ran.out.startswith("target: 100 requests, 250 tokens, up to 4 each -> FULL\n")
    assert "the nearest full graph for decodes of up to 4 tokens each, padded by" in ran.out
    line = {"role": "target", "num_reqs": 100, "num_tokens": 250, "max_query_len": 4}
    asked = ("--batches", "-", "--environment", "h100")
    answer = json.loads(run("explain", str(file), *asked, stdin=json.dumps(line).encode()).out)
    assert (answer["mode"], answer["query_len"], answer["max_query_len"]) == ("FULL", None, 4)
    for wrong in (["--max-query-len", "2"], ["--max-query-len", "4", "--prompt"]):
        assert run("explain", str(file), *batch, *wrong).code == 1


def test_explain_names_prompts_and_adapters(run: Run) -> None:
    plan = "plans/locked/llama-3.1-8b-lora8.a100.yaml"
    out = run("explain", plan, "--num-reqs", "8", "--query-len", "1", "--prompt", "--active-loras", "3").out
    assert "prompts among them, 3 active LoRA" in out


def test_coverage(run: Run) -> None:
    ran = run("explain", PLAN, "--coverage")
    assert ran.code == 0
    assert ran.out.split()[:2] == ["role", "batches"]
    assert "1 to 256 requests of 4" in ran.out
    assert "eager (sizes)" in ran.out


def test_coverage_marks_what_is_captured_on_first_use(run: Run, folder: Path) -> None:
    """In a column, whose numbers add up to the plan's; other plans have none."""
    text = Path(TINY).read_text("utf-8")
    Path("lazy.yaml").write_text(f"{text}capture: {{policy: lazy, memory: 64MiB, seconds_per_minute: 1}}\n", "utf-8")
    head, *rows = run("explain", "lazy.yaml", "-e", "cpu", "--coverage").out.splitlines()
    end = head.index("on first use") + len("on first use")
    lazy = [int(row[:end].split()[-1]) for row in rows if row.startswith(("target", "draft"))]
    run("plan", "lazy.yaml", "-o", "lazy.cpu.yaml")
    assert sum(lazy) == load_plan("lazy.cpu.yaml").num_lazy > 0
    assert "on first use" not in run("explain", TINY, "-e", "cpu", "--coverage").out


def test_coverage_as_json(run: Run) -> None:
    data = run("explain", PLAN, "--coverage", "--format", "json").data
    assert data["covered"] is True
    for cell in data["cells"]:
        assert set(cell) == {
            "role", "kind", "query_len", "varies", "draft_steps", "first", "last", "min_reqs", "max_reqs", "min_loras",
            "max_loras", "mode", "entry", "reason", "share_padded", "worst_ratio",
        }  # fmt: skip
        assert (cell["entry"] is None) == (cell["reason"] is not None)


BATCHES = [
    {"role": "target", "num_reqs": 3, "num_tokens": 12, "query_len": 4, "past_prompt": True},
    {"role": "target", "num_reqs": 3, "num_tokens": 12, "query_len": None, "past_prompt": False},
    {"role": "draft_decode", "num_reqs": 3, "num_tokens": 3, "query_len": 1, "active_loras": 0},
    {"role": "target", "num_reqs": 300, "num_tokens": 8000},
]


def test_batches_answer_a_line_for_a_line(run: Run) -> None:
    lines = "\n".join(json.dumps(batch) for batch in BATCHES).encode()
    Path("batches.jsonl").write_bytes(lines)
    ran = run("explain", PLAN, "--batches", "batches.jsonl")
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 0
    assert [answer["mode"] for answer in answers] == ["FULL", "PIECEWISE", "FULL", "NONE"]
    for answer in answers:
        assert list(answer) == [
            "mode",
            "num_tokens",
            "num_reqs",
            "query_len",
            "max_query_len",
            "active_loras",
            "reason",
        ]
    assert answers[-1] == {
        "mode": "NONE",
        "num_tokens": 8000,
        "num_reqs": 300,
        "query_len": None,
        "max_query_len": None,
        "active_loras": 0,
        "reason": "not_admissible",
    }
    assert run("explain", PLAN, "--batches", "-", stdin=lines).out == ran.out


def test_empty_lines_are_left_out(run: Run) -> None:
    lines = f"\n{json.dumps(BATCHES[0])}\n  \n".encode()
    assert len(run("explain", PLAN, "--batches", "-", stdin=lines).out.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a mapping"),
        ('{"role": "target", "num_reqs": 1}', "num_tokens: is missing"),
        ('{"role": "drafter", "num_reqs": 1, "num_tokens": 1}', "role: expected one of target"),
        ('{"role": "target", "num_reqs": "1", "num_tokens": 1}', "num_reqs: expected an integer"),
        ('{"role": "target", "num_reqs": 1, "num_tokens": -1}', "num_tokens: must be at least 0"),
        ('{"role": "target", "num_reqs": true, "num_tokens": 1}', "num_reqs: expected an integer"),
        ('{"role": "target", "num_reqs": 1, "num_tokens": 1, "past_prompt": 1}', "past_prompt: expected"),
        ('{"role": "target", "num_reqs": 1, "num_tokens": 1, "lora": 1}', "lora: unknown key"),
        ("[" * 5000, "not JSON"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_answered(run: Run, line: str, says: str) -> None:
    good = json.dumps(BATCHES[0])
    Path("batches.jsonl").write_text(f"{good}\n\n{line}\n{good}\n{line}\n", "utf-8")
    ran = run("explain", PLAN, "--batches", "batches.jsonl")
    assert (ran.code, ran.out) == (1, "")
    first, second = ran.err.splitlines()
    assert first.startswith(f"error: batches.jsonl:3: {says}")
    assert second.startswith(f"error: batches.jsonl:5: {says}")


def test_bytes_that_are_not_text(run: Run) -> None:
    ran = run("explain", PLAN, "--batches", "-", stdin=b'{"role": "\xff"}\n')
    assert ran.code == 1
    assert ":1: not JSON" in ran.err


@pytest.mark.parametrize(
    "command",
    [
        ("explain", SPEC, "--num-reqs", "4", "--query-len", "1"),
        ("explain", SPEC, "--coverage"),
        ("check", SPEC),
        ("diff", SPEC, SPEC),
        ("ranks", SPEC),
        ("export", "plans/specs/llama-3.1-8b.yaml", "--to", "vllm"),
    ],
)
def test_a_machine_that_was_not_named_comes_first(run: Run, command: tuple[str, ...]) -> None:
    """The first line of an answer, and a list in its JSON; a named machine leaves nothing to assume."""
    assumption = "no --environment given; using h100"
    assert run(*command).out.startswith(f"assumption: {assumption}\n")
    assert json.loads(run(*command, "--format", "json").out)["assumptions"] == [assumption]
    assert json.loads(run(*command, "--format", "json", "-e", "h100").out)["assumptions"] == []


def test_explain_of_an_engine_says_the_way(run: Run) -> None:
    """Its option is that of ``check``, which takes it."""
    ran = run("explain", "--engine", "vllm", "serve.sh")
    assert ran.code == 1
    assert "capture-planner engine vllm FLAGS --batches FILE" in ran.err
    assert "Did you mean" not in ran.err
