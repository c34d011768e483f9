"""``run`` on several ranks of one host: real processes, forked from this one, which has imported all they need."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from capture_planner.errors import RunError
from capture_planner_runner.ranks.watch import sentence
from capture_planner_runner.serving.serving import Serving
from support.commands import spec_for
from support.forks import Fork, command, wait
from support.timelines import assert_timeline_of, tracks_of

pytest.importorskip("transformers")

LONGEST = 60.0
SPEC = spec_for(3).replace("max_model_len: 64", "max_model_len: 128")
SPREAD = SPEC.replace("num_kv_heads: 1", "num_kv_heads: 2").replace("num_heads: 2,", "num_heads: 4,")
FEW = ("--prompt-tokens", "1:9", "--output-tokens", "2:6", "--format", "json")
MANY = ("--requests", "400", "--output-tokens", "100", "--prompt-tokens", "9", "--format", "json")
VERIFIED = ("--requests", "6", "--output-tokens", "2:20", "--check", "tokens")


def ranks_of(process: Fork, count: int) -> list[int]:
    """Wait until a command has started its ranks, and return the numbers of their processes."""
    until = monotonic() + LONGEST
    while monotonic() < until:
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                number, _, rest = entry.read_text().partition(" (")
            except OSError:
                continue
            if int(rest.rpartition(") ")[2].split()[1]) == process.pid:
                found.append(int(number))
        if len(found) == count:
            return sorted(found)
        sleep(0.05)
    raise AssertionError("the ranks did not start")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Return a folder with specs, which is the current one."""
    importlib.import_module("capture_planner_runner.models.huggingface")
    place, before = tmp_path_factory.mktemp("ranks"), Path.cwd()
    (place / "data.yaml").write_text(f"{SPEC}parallel: {{data: 2}}\n", "utf-8")
    (place / "tensor.yaml").write_text(f"{SPREAD}parallel: {{tensor: 2}}\n", "utf-8")
    os.chdir(place)
    yield place
    os.chdir(before)


@pytest.fixture(scope="module")
def reports(folder) -> dict[str, dict]:
    """Return the reports of a run with replicas, and of one whose model is spread."""
    few = ("--ranks", "2", "--requests", "5", *FEW)
    runs = {
        "data": command("run", "data.yaml", *few, "--rank-timeout", "50", "--timeline", "data.json"),
        "tensor": command("run", "tensor.yaml", *few, "--all-reduce", "auto"),
        "verified": command("run", "data.yaml", *few, *VERIFIED),
    }
    assert wait(list(runs.values()), LONGEST)
    for run in runs.values():
        assert run.code == 0, run.err
        assert run.err.count("note: no --environment given") == 1
    return {name: json.loads(run.out) for name, run in runs.items()}


def test_one_report_has_the_requests_of_all_replicas(reports):
    """Each request once, with its tokens; replicas take turns with them."""
    report = reports["data"]
    assert sorted(each["name"] for each in report["requests"]) == [f"request-{number}" for number in range(5)]
    assert all(len(each["tokens"]) == each["output_tokens"] > 0 for each in report["requests"])
    rows = report["ranks"]["rows"]
    assert [(row["rank"], row["data"], row["tensor"]) for row in rows] == [(0, 0, 0), (1, 1, 0)]
    assert sum(row["output_tokens"] for row in rows) == report["throughput"]["output_tokens"]
    assert rows[0]["steps"] + rows[0]["idle_steps"] == rows[1]["steps"] + rows[1]["idle_steps"]


def test_a_timeline_has_all_ranks(reports, folder):
    """On one clock, as they are on one host; the first rank's are the rows of the report."""
    document = json.loads((folder / "data.json").read_text("utf-8"))
    assert_timeline_of(document, reports["data"])
    ends = {rank: track[-1] for (rank, name), track in tracks_of(document).items() if name == "steps"}
    assert sorted(ends) == [0, 1]
    assert {each["args"]["name"] for each in document["traceEvents"] if each["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }


def test_agreements_are_counted_with_the_skew_of_ranks(reports):
    """Each has a rank that came last; what replicas submitted is there to be explained."""
    ranks = reports["data"]["ranks"]
    assert ranks["agreements"] == ranks["rows"][0]["steps"] + ranks["rows"][0]["idle_steps"]
    assert sum(row["last"] for row in ranks["rows"]) >= ranks["agreements"]
    assert ranks["skew"]["count"] == ranks["agreements"]
    assert sum(each["steps"] for each in ranks["vectors"] if each["role"] == "target") == ranks["agreements"]
    assert all(len(each["ranks"]) == 2 for each in ranks["vectors"])


def test_ranks_that_share_a_model_have_one_set_of_requests(reports):
    """Nothing is agreed on, and no request is there twice."""
    report = reports["tensor"]
    assert len(report["requests"]) == 5
    assert [row["tensor"] for row in report["ranks"]["rows"]] == [0, 1]
    assert {row["output_tokens"] for row in report["ranks"]["rows"]} == {report["throughput"]["output_tokens"]}
    assert report["ranks"]["agreements"] == 0


def test_replicas_are_verified_where_some_are_idle(reports):
    """Requests of different lengths: what a replica runs along with the other is none of its rows."""
    report = reports["verified"]
    assert any(row["idle_steps"] for row in report["ranks"]["rows"])
    assert report["verification"]["passed"]
    assert report["verification"]["requests"] == 3
    assert report["differing"] == []


@pytest.mark.parametrize(("rank", "error"), [(0, ValueError("odd")), (1, RunError("odd"))])
def test_an_error_of_any_rank_ends_in_a_report_and_the_error(rank, error, folder, monkeypatch):
    """On the first rank, too; what is no error of ours has its traceback."""
    complete = Serving._complete

    def failing(serving, step):
        if os.environ["RANK"] == str(rank) and step.index == 3:
            raise error
        complete(serving, step)

    monkeypatch.setattr(Serving, "_complete", failing)
    process = command("run", "data.yaml", "--ranks", "2", *MANY)
    assert wait([process], LONGEST)
    assert process.code == 1, process.err
    report = json.loads(process.out)
    assert (report["interrupted"], report["stage"]) == (True, "serving")
    assert report["fault"].startswith(f"rank {rank}")
    assert report["fault"].endswith(f"ended: {sentence(error)}")
    assert report["memory"]["chosen"] is not None
    assert sentence(error) in process.err
    assert ("Traceback" in process.err) == isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [(signal.SIGKILL, 1, "error: rank 1 ("), (signal.SIGINT, 130, "")],
    ids=["a rank is killed", "Ctrl-C"],
)
def test_a_run_that_is_stopped_reports_what_ran(number, code, says, folder):
    """A killed rank is named once by all; Ctrl-C, which comes to the command, ends all ranks."""
    dumped = folder / number.name
    process = command("run", "data.yaml", "--ranks", "2", "--dump-graphs", str(dumped), *MANY)
    ranks = ranks_of(process, 2)
    until = monotonic() + LONGEST
    # Graphs are written once all are captured, before anything is served.
    while not all((dumped / f"rank-{rank}").is_dir() for rank in range(2)) and monotonic() < until:
        sleep(0.05)
    os.kill(ranks[1] if number == signal.SIGKILL else process.pid, number)
    started = monotonic()
    assert wait([process], LONGEST)
    assert monotonic() - started < 30.0
    assert process.code == code, process.err
    assert process.err.count(says) == 1 or not says
    assert process.out, process.err
    assert json.loads(process.out)["interrupted"] is True
