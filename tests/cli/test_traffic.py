"""``traffic`` on the command line: what it prints, writes and refuses."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import pytest

from capture_planner import codec
from support import log_lines
from support.commands import SPEC, Run
from support.tuning import profile

LINES = [
    log_lines.vllm_iteration(0, 1, (1, 512), (12, 48)),
    log_lines.vllm_iteration(0, 2, (0, 0), (12, 48)),
    log_lines.vllm_iteration(0, 3, (0, 0), (12, 48)),
    "Engine 000: Iteration(4): 0 context requ",
]


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "vllm.log"
    path.write_text("\n".join(LINES) + "\n")
    return str(path)


def test_json_has_every_shape_once_with_null_for_what_is_not_known(run: Run, log: str, tmp_path: Path) -> None:
    """The contract of the JSON, for one role."""
    result = run("traffic", log, "--format", "json")
    data = result.data
    assert (data["steps"], data["skipped"], data["seconds"]) == (3, 1, 0.02943)
    assert data["batches"] == [
        {"role": "target", "num_reqs": 12, "num_tokens": 48, "query_len": 4, "count": 2},
        {"role": "target", "num_reqs": 13, "num_tokens": 560, "query_len": None, "count": 1},
    ]
    assert f"skipped: {log}:4: " in result.err


def test_the_file_is_shown_as_the_sources_are(run: Run, log: str, tmp_path: Path) -> None:
    """``show`` reads what ``traffic`` wrote, and says the same."""
    output = tmp_path / "traffic.yaml"
    made = run("traffic", log, "-o", str(output))
    shown = run("show", str(output))
    assert (made.code, shown.code) == (0, 0)
    assert made.out == f"{shown.out}written to {output}\n"
    assert "decode 12 4 48 2 66.7%" in " ".join(shown.out.split())
    assert codec.load_traffic(output).steps == 3
    assert run("show", str(output), "--format", "json").data == codec.to_data(codec.load_traffic(output))


def test_a_spec_adds_the_passes_of_the_drafter(run: Run, log: str) -> None:
    """K is 3: a draft prefill, and two draft decodes."""
    data = run("traffic", log, "--spec", SPEC, "--format", "json").data
    steps = dict.fromkeys(("target", "draft_prefill", "draft_decode"), 0)
    for batch in data["batches"]:
        steps[batch["role"]] += batch["count"]
    assert steps == {"target": 3, "draft_prefill": 3, "draft_decode": 6}


def test_a_trace_without_limits_names_its_assumption_first(run: Run, tmp_path: Path) -> None:
    """On the screen and in the JSON."""
    trace = tmp_path / "t.csv"
    trace.write_text("t,in_len,out_len\n0,100,5\n")
    assert "(assumed limits" in run("traffic", str(trace)).out.splitlines()[0]
    assert run("traffic", str(trace), "--format", "json").data["notes"][0].startswith("assumed limits")
    limits = ("--max-num-reqs", "8", "--max-num-tokens", "64")
    assert run("traffic", str(trace), *limits, "--format", "json").data["steps"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--part", "0.5"), "'0.5' is not FIRST:LAST."),
        (("--part", "0.7:0.2"), "the first one below the second"),
        (("--max-num-reqs", "8"), "Give both --max-num-reqs and --max-num-tokens, or --spec."),
        (("--spec", SPEC, "--max-num-reqs", "8"), "--spec has the limits"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    run: Run, log: str, arguments: tuple[str, ...], message: str
) -> None:
    result = run("traffic", log, *arguments)
    assert (result.code, message in result.err) == (1, True)


def test_the_output_is_no_source(run: Run, log: str) -> None:
    """It would be lost."""
    result = run("traffic", log, "-o", log)
    assert (result.code, "is also the file of SOURCE" in result.err) == (1, True)


def test_a_file_of_no_known_format_is_an_error_with_the_formats(run: Run, tmp_path: Path) -> None:
    """No traceback, and each format with a line of it."""
    other = tmp_path / "other.log"
    other.write_text("nothing\n")
    result = run("traffic", str(other))
    assert result.code == 1
    assert "no batches in a known format" in result.err
    assert "SGLang decode lines: Decode batch, #running-req" in result.err
    assert run("traffic", str(tmp_path / "absent")).code == 1


def test_traffic_is_not_taken_for_a_spec(run: Run, log: str, tmp_path: Path) -> None:
    """And a spec is not taken for traffic."""
    output = tmp_path / "traffic.yaml"
    run("traffic", log, "-o", str(output))
    result = run("plan", str(output))
    assert (result.code, "this is traffic, not a spec" in result.err) == (1, True)


def test_progress_is_on_standard_error(run: Run, log: str) -> None:
    """Where it is asked for; standard output stays JSON."""
    result = run("traffic", log, "--progress", "--format", "json")
    assert result.data["steps"] == 3
    assert "reading" in result.err


@pytest.mark.parametrize("zipped", [False, True])
def test_a_pipe_is_read_as_the_file_is(run: Run, log: str, tmp_path: Path, zipped: bool) -> None:
    """As the shell's ``<(zcat vllm.log.gz)`` gives it: once, and from its beginning."""
    pipe, content = tmp_path / "pipe", Path(log).read_bytes()
    os.mkfifo(pipe)
    writer = threading.Thread(
        target=pipe.write_bytes, args=(gzip.compress(content) if zipped else content,), daemon=True
    )
    writer.start()
    data = run("traffic", str(pipe), "--format", "json").data
    writer.join(10)
    same = run("traffic", log, "--format", "json").data
    assert all(data[key] == same[key] for key in ("steps", "skipped", "batches"))


TRACE = "t,in_len,out_len\n0,600,40\n0.2,90,60\n0.4,700,30\n"


def test_a_trace_runs_by_a_profile(run: Run, tmp_path: Path) -> None:
    """By default at its times, which change the batches; with a constant where it is given."""
    trace, costs = tmp_path / "trace.csv", tmp_path / "profile.yaml"
    trace.write_text(TRACE)
    costs.write_text(codec.dumps(profile()), "utf-8")
    limits = ("--max-num-reqs", "8", "--max-num-tokens", "512")
    by_profile = run("traffic", str(trace), *limits, "--profile", str(costs), "--format", "json").data
    given = run("traffic", str(trace), *limits, "--profile", str(costs), "--step-ms", "7", "--format", "json").data
    plain = run("traffic", str(trace), *limits, "--format", "json").data
    assert any(f"each step takes what {costs} says of graphs of every size" in note for note in by_profile["notes"])
    assert any("every step takes 7 ms" in note for note in given["notes"])
    assert any("every step takes 20 ms" in note for note in plain["notes"])
    assert by_profile["batches"] != plain["batches"]
    assert by_profile["seconds"] < plain["seconds"]


def test_accepted_drafts_shorten_a_trace(run: Run, tmp_path: Path) -> None:
    """K is 3 in the spec, which says nothing of acceptance."""
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    none, some = (
        run("traffic", str(trace), "--spec", SPEC, *more, "--format", "json").data
        for more in ((), ("--acceptance", "0.8,0.6,0.4"))
    )
    steps = [sum(b["count"] for b in data["batches"] if b["role"] == "target") for data in (none, some)]
    assert steps[1] < 0.6 * steps[0]
    assert any("no draft is accepted" in note for note in none["notes"])


def test_lines_are_shown_where_they_are_not_steps(run: Run, tmp_path: Path) -> None:
    """As JSON, and as a row."""
    path = tmp_path / "sglang.log"
    path.write_text(log_lines.sglang_decode(3, "") + "\n")
    assert run("traffic", str(path), "--format", "json").data["lines"] == 1
    ran = run("traffic", str(path))
    assert "1: what the target's steps rest on" in ran.out
    assert "note: the traffic has no prompts" in ran.out
