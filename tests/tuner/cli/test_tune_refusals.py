"""tune: what is refused or assumed, and what it says of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from capture_planner import codec
from capture_planner.cli.common import Output
from capture_planner.errors import CapturePlannerError
from capture_planner.records._base import replace
from support import log_lines
from support.commands import Run
from support.tuning import MODEL, profile, vllm_log

FLAGS = ("vllm", MODEL.name, "--max-num-seqs", "12", "--max-num-batched-tokens", "64")
EAGLE = ("--speculative-config", '{"method":"eagle3","model":"my/drafter","num_speculative_tokens":3}')
LOAD = ("--traffic", "vllm.log", "--profile", "profile.yaml")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a log of vLLM and a profile."""
    monkeypatch.chdir(tmp_path)
    Path("vllm.log").write_text(vllm_log(3600, (3, 5, 9, 11), longest=48), "utf-8")
    Path("profile.yaml").write_text(codec.dumps(profile()), "utf-8")


def tuned(call: Run, *words: str, code: int = 0) -> Any:
    """Return the JSON that tune prints."""
    return call("tune", *words, "--format", "json").document(code)


REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "Missing argument"),
    "no traffic": (FLAGS, "Missing option '--traffic'"),
    "two files": (("a.yaml", "b.yaml", *LOAD), "expected one SPEC or OBSERVATION"),
    "profile without a role": ((*FLAGS, *EAGLE, *LOAD), "profile.yaml: the profile has no"),
    "missing log": ((*FLAGS, "--traffic", "gone.log", "--profile", "profile.yaml"), "gone.log: cannot be read"),
    "objective": ((*FLAGS, *LOAD, "--objective", "median"), "must be mean, token, regret, or a percentile"),
    "flag of the engine": ((*FLAGS, *LOAD, "--max-num-seqs", "none"), "--max-num-seqs"),
    "folder with other files": ((*FLAGS, *LOAD, "-o", "."), "has other files"),
    "page without a folder": ((*FLAGS, *LOAD, "--html", "gone/page.html"), "no such folder"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_is_wrong(call: Run, name: str) -> None:
    """Exit code 1 and one line, before anything is written."""
    words, text = REFUSALS[name]
    ran = call("tune", *words)
    assert ran.code == 1
    assert text in ran.err


def test_unknown_roles_in_traffic_have_their_place(call: Run) -> None:
    """File, line and column, and the roles that exist."""
    assert call("traffic", "vllm.log", "-o", "traffic.yaml").code == 0
    text = Path("traffic.yaml").read_text("utf-8")
    Path("traffic.yaml").write_text(text.replace("role: target", "role: drafter", 1), "utf-8")
    ran = call("tune", *FLAGS, "--traffic", "traffic.yaml", "--profile", "profile.yaml")
    assert ran.code == 1
    assert "traffic.yaml:" in ran.err
    assert "draft_prefill" in ran.err


def test_what_is_read_is_not_overwritten_by_the_page(call: Run) -> None:
    """The profile, a log or the observation in the place of the page's file."""
    for file in ("profile.yaml", "vllm.log"):
        before = Path(file).read_bytes()
        ran = call("tune", *FLAGS, *LOAD, "--html", file)
        assert (ran.code, "is also the file of " in ran.err) == (1, True)
        assert Path(file).read_bytes() == before


def test_traffic_of_a_pipe_is_read_once(call: Run) -> None:
    """It cannot be read in two parts, so nothing is held out."""
    os.mkfifo("pipe")
    writer = threading.Thread(target=Path("pipe").write_bytes, args=(Path("vllm.log").read_bytes(),), daemon=True)
    writer.start()
    steps = tuned(call, *FLAGS, "--traffic", "pipe", "--profile", "profile.yaml")["steps"]
    writer.join(10)
    assert (steps["judged"], steps["held_out"]) == (3600, False)


def test_folders_that_cannot_be_made_are_named(call: Run) -> None:
    """Such as one whose name is too long for the file system."""
    ran = call("tune", *FLAGS, *LOAD, "-o", "x" * 300)
    assert ran.code == 1
    assert f"--output {'x' * 300} cannot be made: " in ran.err


def test_lines_that_cannot_be_read_are_counted(call: Run) -> None:
    """In both parts of a log; ``traffic`` shows them."""
    log = Path("vllm.log").read_text("utf-8").splitlines()
    Path("vllm.log").write_text("\n".join(["Engine 000: Iteration(1", *log, "Engine 000: Iteration(2"]) + "\n", "utf-8")
    assert (
        "2 lines of the traffic could not be read; `capture-planner traffic` shows some"
        in (tuned(call, *FLAGS, *LOAD)["notes"])
    )


def test_costs_of_other_ranks_or_another_model_are_an_estimate(call: Run) -> None:
    """A profile of one GPU for a model that two share, or of another model of this shape: nothing is promised."""
    data = tuned(call, *FLAGS, "-tp", "2", *LOAD, "-o", "ranks")
    assert data["assumptions"] == [
        "the costs of profile.yaml were measured with 1 tensor-parallel rank, and this has 2"
    ]
    Path("profile.yaml").write_text(codec.dumps(profile(model=replace(MODEL, name="my/model"))), "utf-8")
    other = tuned(call, *FLAGS, *LOAD, "-o", "model")
    assert "a model of the same shape" in other["assumptions"][0]
    for each in (data, other):
        assert (each["verdict"], each["estimate"]) == ("change", True)
        assert each["needed"].startswith("this is an estimate by the costs of another deployment; for a promise, ")
    assert [codec.load_plan(f"{each}/plan.yaml").promise for each in ("ranks", "model")] == [None, None]


def test_decodes_of_another_number_of_drafts_promise_nothing(call: Run) -> None:
    """They count with their tokens, and will not run here."""
    Path("vllm.log").write_text(vllm_log(3600, (3, 5, 9), width=4, longest=20), "utf-8")
    data = tuned(call, *FLAGS, *LOAD, "--query-len", "4", "-o", "other")
    assert (data["verdict"], data["estimate"]) == ("change", False)
    assert any(note.startswith("nothing is promised: too many decodes have a query length") for note in data["notes"])
    assert codec.load_plan("other/plan.yaml").promise is None
    lines = vllm_log(3600, (3, 5, 9, 11), longest=48).splitlines()
    few = log_lines.vllm_iteration(0, 0, (0, 0), (3, 12))
    Path("vllm.log").write_text("\n".join([*lines, few]) + "\n", "utf-8")
    tuned(call, *FLAGS, *LOAD, "-o", "own")
    assert codec.load_plan("own/plan.yaml").promise is not None


def test_the_folder_is_there_before_anyone_reads_the_report(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader such as head may be gone by then, and the command ends."""

    def gone(*_: object, **__: object) -> None:
        raise CapturePlannerError("gone")

    monkeypatch.setattr(Output, "show", gone)
    assert "gone" in call("tune", *FLAGS, *LOAD, "-o", "early").err
    assert codec.load_plan("early/plan.yaml").num_graphs


def test_figures_beyond_all_that_is_real_have_their_place(call: Run) -> None:
    """A time that no arithmetic on it survives."""
    text = Path("profile.yaml").read_text("utf-8").replace("seconds: 0.05", "seconds: 1.0e+306", 1)
    Path("profile.yaml").write_text(text, "utf-8")
    ran = call("tune", *FLAGS, *LOAD)
    assert ran.code == 1
    assert "profile.yaml:" in ran.err
    assert "seconds: must be at most 1e+12" in ran.err


def test_a_device_without_a_profile_is_estimated_by_the_nearest(call: Run) -> None:
    """By another model on another device nothing is promised: said first, with how far the times may be off."""
    data = tuned(call, *FLAGS, "--traffic", "vllm.log", "-e", "h100")
    assert data["estimate"] is True
    assert "CAPTURE_PLANNER_PROFILE=1" in data["needed"]
    assert data["verdict"] in ("change", "keep")
    assert "NVIDIA H200" in data["assumptions"][0]
    assert "off by up to 15%" in data["assumptions"][0]
    ran = call("tune", *FLAGS, "--traffic", "vllm.log", "-e", "h100", "-o", "guess")
    assert ran.out.splitlines()[1].strip().startswith("this is an estimate")
    assert "(an estimate)" in ran.out.splitlines()[0]
    if data["verdict"] == "change":
        assert codec.load_plan("guess/plan.yaml").promise is None


def test_plans_by_costs_of_another_device_say_so(call: Run) -> None:
    """Each command that plans a spec with measured sizes: a profile of an H200 for a plan of an H100."""
    assert call("tune", *FLAGS, *LOAD, "-o", "tuned").code == 0
    says = "note: the costs of profile.yaml were measured on NVIDIA H200, and this is NVIDIA H100 80GB HBM3"
    for command in ("plan", "show", "check"):
        assert says in call(command, "tuned/spec.yaml", "-e", "h100").err
        assert "the costs of" not in call(command, "tuned/spec.yaml", "-e", "h200").err


def test_command_lines_without_an_engine_say_what_lacks(call: Run) -> None:
    """As they are pasted: an interpreter first, or the model."""
    for words in (("python", "-m", "vllm.entrypoints.openai.api_server"), (MODEL.name, "--max-num-seqs", "12")):
        ran = call("tune", *words, *LOAD)
        assert (ran.code, "name it first: one of sglang, tensorrt-llm, vllm" in ran.err) == (1, True)
