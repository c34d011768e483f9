"""launch --auto with a program that poses as vLLM: five starts, planted faults, and damaged folders."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capture_planner import codec
from capture_planner.measuring.workers import read_workers
from capture_planner.records._base import digest, replace
from capture_planner.records.plan import Plan
from capture_planner_tuner.auto import start
from capture_planner_tuner.auto.decisions import TuneProposal, graphs_of
from capture_planner_tuner.auto.start import JournalFolder, _with_graphs
from capture_planner_tuner.cli import launch as auto
from capture_planner_tuner.journal import Event, JournalRecord
from support.auto_engine import PosedEngine, promised, served
from support.commands import Run

ROOT = Path(__file__).parents[3]
DENSE = codec.load_plan(ROOT / "plans" / "locked" / "llama-3.1-8b.h100.yaml")
GOOD, OTHER, BAD = promised(DENSE, 5.0, graphs=20), promised(DENSE, 4.0, graphs=24), promised(DENSE, 2.0, graphs=16)
SERVE = ("vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--max-num-seqs", "256")


def stem(plan: Plan) -> str:
    """Return what a plan's file is called."""
    return digest(plan).partition(":")[2]


class Loop:
    """Starts of one engine on one folder."""

    def __init__(self, call: Run, folder: Path, engine: PosedEngine) -> None:
        self.call, self.folder, self.engine = call, folder, engine
        self.proposals: list[Plan | None] = []

    def tuner(self, folder: JournalFolder, run: int, seconds: float) -> TuneProposal | None:
        """Propose the next plan of the list; none: nothing better is found."""
        plan = self.proposals.pop(0) if self.proposals else None
        if plan is None:
            return TuneProposal(reason="no table of sizes is faster")
        folder.keep(plan)
        return TuneProposal(
            reason="the mean step takes less time", plan=digest(plan), graphs=graphs_of(plan), promised=True
        )

    def start(self, *proposals: Plan, words: tuple[str, ...] = SERVE, code: int = 0) -> list[str]:
        """Start the engine; return our lines."""
        self.proposals = list(proposals)
        ran = self.call("launch", "--auto", str(self.folder), "--", *words)
        assert ran.code == code, ran.err
        return [line.removeprefix("auto: ") for line in ran.err.splitlines() if line.startswith("auto: ")]

    @property
    def ran(self) -> list[object]:
        """What each call of the engine ran under."""
        return [each["plan"] for each in self.engine.calls]

    @property
    def journal(self) -> tuple[JournalRecord, ...]:
        """The records of the journal."""
        return JournalFolder(self.folder).read().journal


@pytest.fixture
def loop(tmp_path: Path, call: Run, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """Return a folder with an engine that serves decodes of 10 ms by itself, and as promised under good plans."""
    engine = PosedEngine(tmp_path / "engine")
    monkeypatch.setenv("PATH", engine.path)
    engine.observes("itself", served(DENSE, 10.0, by_itself=True))
    for plan, milliseconds in ((GOOD, 5.1), (OTHER, 4.1), (BAD, 9.0)):
        engine.observes(stem(plan), served(plan, milliseconds))
    found = Loop(call, tmp_path / "auto", engine)
    monkeypatch.setattr(auto, "tuned", found.tuner)
    return found


def test_five_starts_with_a_load_that_changes(loop: Loop) -> None:
    """Observed, tuned, kept, tuned for the new load, and a plan that breaks its promise is put aside."""
    first = loop.start()
    assert first[0] == "observed: nothing"
    assert first[1] == "decided: observe: nothing was observed yet"
    assert first[2].startswith("runs: the engine by itself, observed into ")
    second = loop.start(GOOD)
    assert second[1] == "decided: apply: the mean step takes less time"
    assert "20 graphs" in second[2] or "graphs" in second[2]
    assert "5.00 ms a step promised, 10.00 without it" in second[2]
    loop.engine.observes(stem(GOOD), served(GOOD, 5.2, reqs=200))
    third = loop.start()
    assert "promise kept" in third[0]
    assert third[1] == "decided: keep: no table of sizes is faster"
    fourth = loop.start(BAD)
    assert fourth[1].startswith("decided: apply")
    fifth = loop.start(OTHER)
    assert "promise broken" in fifth[0]
    assert (
        "decided: keep: the plan of run 4 is put aside: it broke its promise: the mean step takes 9.00 ms" in fifth[1]
    )
    assert loop.ran == ["itself", stem(GOOD), stem(GOOD), stem(BAD), stem(GOOD)]
    assert len(first) == len(second) == len(third) == len(fourth) == len(fifth) == 3
    assert all(each["profile"] == "1" for each in loop.engine.calls)
    assert loop.start(BAD)[1].startswith("decided: keep: the proposed plan is one that was put aside")
    decisions = [each.decision for each in loop.journal if each.decision is not Event.END]
    assert decisions[:7] == [
        *(Event.OBSERVE, Event.APPLY, Event.CHECK, Event.KEEP, Event.CHECK, Event.APPLY, Event.PUT_ASIDE)
    ]


def test_plan_under_which_the_engine_crashes_is_put_aside(loop: Loop) -> None:
    """The same call starts the engine once more, by itself, and passes its exit code on."""
    loop.start()
    loop.engine.behave(**{stem(GOOD): {"crash": 1}, "itself": {"code": 7}})
    lines = loop.start(GOOD, code=7)
    assert loop.ran == ["itself", stem(GOOD), "itself"]
    assert any("is put aside: the engine ended with exit code 1 before it had captured" in line for line in lines)
    assert lines[-1].startswith("runs: the engine by itself")
    assert loop.start(GOOD, code=7)[1].startswith("decided: observe: the proposed plan is one that was put aside")
    assert loop.ran[-1] == "itself"


def test_plan_of_runs_whose_end_nobody_wrote_down_stays(loop: Loop) -> None:
    """As where the host is lost each time: they had captured, also those that are not read any more."""
    journal = loop.folder / "journal.jsonl"
    for _ in range(start.LATEST_RUNS + 4):
        loop.start(GOOD)
        kept = [each for each in loop.journal if each.decision not in (Event.END, Event.CHECK)]
        journal.write_text("".join(map(start.line_of, kept)), "utf-8")
    assert loop.ran == ["itself", *[stem(GOOD)] * (start.LATEST_RUNS + 3)]


@pytest.mark.parametrize("code", [126, 127])
@pytest.mark.parametrize("wrapped", [False, True], ids=["program", "script"])
def test_program_that_is_not_started_blames_no_plan(loop: Loop, code: int, wrapped: bool) -> None:
    """However often it is missing, or no program, or a script around it says so."""
    loop.start()
    loop.start(GOOD)
    program, aside = loop.engine.home / "bin" / "vllm", loop.engine.home / "aside"
    program.rename(aside)
    if wrapped or code == 126:
        program.write_text(f"#!/bin/sh\nexit {code}\n", "utf-8")
        program.chmod(0o755 if wrapped else 0o644)
    for _ in range(2):
        ran = loop.call("launch", "--auto", str(loop.folder), "--", *SERVE)
        assert ran.code == code
        assert ("activate its environment first" in ran.err) is not wrapped
        end = loop.journal[-1]
        assert (end.decision, end.exit_code, end.captured) == (Event.END, code, False)
    aside.rename(program)
    loop.start()
    assert loop.ran == ["itself", stem(GOOD), stem(GOOD)]


def test_exit_code_of_an_engine_that_fails_by_itself_is_passed_on(loop: Loop) -> None:
    """It is not started twice."""
    loop.engine.behave(itself={"crash": 3})
    loop.start(code=3)
    assert loop.ran == ["itself"]


def test_flags_of_the_plan_are_added(loop: Loop) -> None:
    """As launch does for a plan; those that contradict it give way, which the second line and the journal say."""
    words = (*SERVE, "--cudagraph-capture-sizes", "1", "2")
    loop.start(words=words)
    lines = loop.start(GOOD, words=words)
    reason = (
        "the mean step takes less time; --cudagraph-capture-sizes gives way to the plan: the plugin sets the plan's"
    )
    assert lines[1].startswith(f"decided: apply: {reason}")
    assert next(each for each in loop.journal if each.decision is Event.APPLY).reason.startswith(reason)
    given = loop.engine.calls[-1]["words"]
    assert isinstance(given, list)
    assert "--cudagraph-capture-sizes" not in given
    assert "--max-num-batched-tokens" in given


def test_tensor_parallel_workers_count_once(loop: Loop) -> None:
    """Each writes its own observation; their steps are the same ones."""
    loop.engine.observes("itself", served(DENSE, 10.0, by_itself=True), ranks=2)
    loop.start()
    loop.start()
    assert "run 1 by itself, 5000 steps" in loop.start()[0] or loop.ran == ["itself"] * 3


def test_other_flags_are_observed_anew(loop: Loop) -> None:
    """A port is no other deployment."""
    loop.start()
    loop.start(GOOD, words=(*SERVE, "--port", "8001", "--api-key", "secret"))
    assert loop.ran[-1] == stem(GOOD)
    assert "secret" not in (loop.folder / "journal.jsonl").read_text("utf-8")
    lines = loop.start(words=(*SERVE, "--max-model-len", "4096"))
    assert loop.ran[-1] == "itself"
    assert "another deployment (the command line changed)" in lines[1]


def test_a_flag_in_another_spelling_is_the_same_deployment(loop: Loop) -> None:
    """As the engine reads it, also where the journal is of an earlier release."""
    spellings = (SERVE, (*SERVE[:3], "--max-num-seqs=256"), (*SERVE[:3], "--max_num_seqs", "256"))
    loop.start(words=spellings[0])
    loop.start(GOOD, words=spellings[1])
    loop.start(words=spellings[2])
    assert loop.ran == ["itself", stem(GOOD), stem(GOOD)]
    journal = loop.folder / "journal.jsonl"
    journal.write_text(journal.read_text("utf-8").replace('"--max-num-seqs", "256"', '"--max-num-seqs=256"'), "utf-8")
    loop.start()
    assert loop.ran[-1] == stem(GOOD)
    assert loop.start(words=(*SERVE[:3], "--max-num-seqs=255"))[1].startswith("decided: observe")


@pytest.mark.parametrize(
    "flags",
    [
        ("--port", "8001"),
        ("--port=8001",),
        ("--api_key=secret",),
        ("--disable-log-requests",),
        ("--host", "::", "--uds=x"),
    ],
)
def test_a_model_behind_flags_without_graphs_is_part_of_the_deployment(flags: tuple[str, ...]) -> None:
    """A plan of another model must not be taken for its own."""
    words = ("vllm", "serve", *flags, "Qwen/Qwen3-8B", "--served-model-name", "a", "b")
    assert [*_with_graphs(words)] == ["vllm", "serve", "Qwen/Qwen3-8B"]


def test_damage_is_skipped_with_a_line(loop: Loop) -> None:
    """Torn lines, observations and plans never keep an engine from starting; new records begin on a new line."""
    loop.start()
    loop.start(GOOD)
    journal = loop.folder / "journal.jsonl"
    journal.write_bytes(b"\xff\xfe\n[1]\n" + journal.read_bytes() + b'{"version": 1, "ti')
    (loop.folder / "runs" / "1" / "vllm.rank0.1.yaml").write_text("engine: [", "utf-8")
    lines = loop.start()
    assert sum(": skipped: " in line for line in lines) == 4
    assert loop.ran[-1] == stem(GOOD)
    (loop.folder / "plans" / f"{stem(GOOD)}.yaml").write_text("version: 1", "utf-8")
    lines = loop.start()
    assert any("plans/" in line and "skipped" in line for line in lines)
    assert loop.ran[-1] == "itself"
    assert len(loop.journal) > 8


def test_folder_without_write_access_is_only_read(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plan that is known runs, and nothing is observed; a crash under it still ends in an engine."""
    loop.start()
    loop.start(GOOD)
    before = {path: path.stat().st_mtime_ns for path in loop.folder.rglob("*")}

    def refused(path: object, flags: int, mode: int = 0o777) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(start.os, "open", refused)
    lines = loop.start(OTHER)
    assert "cannot be written (Permission denied): it is only read" in lines[0]
    assert (loop.ran[-1], loop.engine.calls[-1]["observe"]) == (stem(GOOD), None)
    loop.engine.behave(**{stem(GOOD): {"crash": 1}})
    loop.start()
    assert loop.ran[-2:] == [stem(GOOD), "itself"]
    assert {path: path.stat().st_mtime_ns for path in loop.folder.rglob("*")} == before


def test_full_disk_is_one_line(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known runs."""
    loop.start()
    loop.start(GOOD)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JournalFolder, "append", full)
    lines = loop.start()
    assert sum("nothing more is written: No space left on device" in line for line in lines) == 1
    assert loop.ran[-1] == stem(GOOD)


def test_our_own_error_is_one_line(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, the engine starts by itself."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(start, "decide", broken)
    assert loop.start() == [
        "an error of capture-planner, ZeroDivisionError: division by zero; the engine runs by itself"
    ]
    assert loop.ran == ["itself"]


def test_tuning_that_fails_or_takes_too_long_keeps_what_is_known(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start does not wait for it."""
    loop.start()
    monkeypatch.setattr(auto, "tuned", lambda *_: None)
    assert "tuning did not end in time" in loop.start()[1]

    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(auto, "tuned", broken)
    assert "tuning failed: ValueError: no" in loop.start()[1]


def test_tuning_is_a_process_that_is_stopped(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors are reasons; what it leaves behind is removed."""
    loop.start()
    folder = JournalFolder(loop.folder)
    monkeypatch.undo()
    assert auto.tuned(folder, 1, 0.01) is None
    failed = auto.tuned(folder, 77, 60.0)
    assert failed is not None
    assert failed.plan is None
    assert "77" in failed.reason
    assert not [path for path in loop.folder.iterdir() if path.name.startswith(".tuning")]


def test_dry_run_writes_nothing(loop: Loop) -> None:
    """It prints the variables and the command line, as with a plan."""
    loop.start()
    loop.start(GOOD)
    before = sorted(loop.folder.rglob("*"))
    ran = loop.call("launch", "--auto", str(loop.folder), "--dry-run", "--", *SERVE)
    assert f"CAPTURE_PLANNER_PLAN={loop.folder}/plans/{stem(GOOD)}.yaml" in ran.out
    assert ran.out.splitlines()[-1].startswith("vllm serve ")
    assert (sorted(loop.folder.rglob("*")), len(loop.engine.calls)) == (before, 2)


def test_script_is_started_with_variables_alone(loop: Loop, tmp_path: Path) -> None:
    """Its flags are not known."""
    script = (sys.executable, str(loop.engine.home / "bin" / "vllm"), "x")
    loop.start(words=script)
    loop.start(GOOD, words=script)
    assert loop.ran == ["itself", stem(GOOD)]
    assert loop.engine.calls[-1]["words"] == ["x"]


def test_engine_without_a_plugin_runs_as_it_is(loop: Loop) -> None:
    """Its program is not there, which is the one error left."""
    ran = loop.call("launch", "--auto", str(loop.folder), "--", "trtllm-serve", "serve", "m")
    assert "tensorrt-llm has no plugin that observes or runs plans; it runs by itself" in ran.err
    assert "trtllm-serve: No such file or directory" in ran.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--auto", "x"), "the engine's command is missing"),
        (("--auto", "x", "--", "A=1"), "the engine's command is missing"),
        (("--auto", "x", "--observe", "y", "--", *SERVE), "--observe goes without --auto"),
        (
            ("--auto", "x", "--strict", "--", *SERVE),
            "--strict goes without --auto, which starts the engine in any case",
        ),
        (("--auto", "x", "plan.yaml", "--", *SERVE), "plan.yaml is no command; --auto takes no PLAN"),
        (("--tune-seconds", "5", "--observe", "y", "--", *SERVE), "--tune-seconds goes with --auto"),
        (("--auto", "--", "vllm", "serve", "m"), "--auto needs a FOLDER"),
    ],
)
def test_words_that_do_not_go_together_are_refused(call: Run, words: tuple[str, ...], error: str) -> None:
    """Before anything runs."""
    ran = call("launch", *words)
    assert ran.code == 1
    assert error in ran.err


def test_journal_is_a_table(loop: Loop) -> None:
    """With every decision, and in JSON every field."""
    loop.start()
    loop.start(GOOD)
    loop.start()
    shown = loop.call("journal", str(loop.folder))
    assert shown.code == 0
    for text in ("observe", "apply", "keep", "check", "by itself", "promised 5.00 ms a step, 10.00 without it"):
        assert text in " ".join(shown.out.split())
    data = loop.call("journal", str(loop.folder), "--format", "json").data
    assert [codec.structure(each, JournalRecord) for each in data["records"]] == list(loop.journal)
    missing = loop.call("journal", str(loop.folder / "none"))
    assert "no such folder" in missing.err
    other = loop.call("journal", str(loop.folder / "runs"))
    assert (other.code, "has no journal; name the folder of launch --auto" in other.err) == (1, True)


def test_compare_finds_the_plan_in_the_folder(loop: Loop) -> None:
    """Kept or broken, with exit code 2; the class that broke it is named."""
    loop.start()
    loop.start(GOOD)
    loop.start()
    loop.start(BAD)
    runs = [str(loop.folder / "runs" / str(number)) for number in (1, 2, 4)]
    kept = loop.call("compare", runs[0], runs[1])
    assert kept.code == 0, kept.err
    assert "kept" in kept.out.splitlines()[0]
    broken = loop.call("compare", runs[0], runs[2], "--format", "json")
    promise = broken.document(2)["promise"]
    assert promise["verdict"] == "broken"
    assert "decodes of 1 for 1 to 256 requests" in promise["reason"]
    assert promise["before"]["measured_ms"] == 10.0


def test_compare_takes_no_other_engine_for_the_one_without_the_plan(loop: Loop, tmp_path: Path) -> None:
    """Another deployment, or the plan itself, as A is a note; the verdict on B stays."""
    loop.start()
    loop.start(GOOD)
    before, after = (loop.folder / "runs" / str(number) for number in (1, 2))
    other = tmp_path / "other.yaml"
    codec.write(other, codec.dumps(replace(read_workers(before), model="another", device=None)))
    kept = loop.call("compare", str(before), str(after), "--format", "json").data["promise"]
    for a, reason in ((after, "A ran under B's plan, too"), (other, "A is another deployment than B (device, model)")):
        ran = loop.call("compare", str(a), str(after), "--format", "json")
        assert f"note: {reason}: the promise is checked by B alone" in " ".join(ran.err.split())
        assert ran.data["promise"] == {**kept, "before": None}


def environment_of(loop: Loop) -> dict[str, str]:
    """Return the environment of a launch in a process of its own."""
    return {**os.environ, "PATH": loop.engine.path, "PYTHONPATH": os.pathsep.join(sys.path)}


def launched(loop: Loop) -> subprocess.Popen[str]:
    """Start launch --auto in a process of its own, and wait until its engine is up."""
    (loop.engine.home / "up").unlink(missing_ok=True)
    program = (
        "from capture_planner.cli import main; from capture_planner_tuner.cli import launch; "
        "launch.tuned = lambda *_: None; main()"
    )
    words = [sys.executable, "-c", program, "launch", "--auto", str(loop.folder), "--", *SERVE]
    process = subprocess.Popen(words, env=environment_of(loop), stderr=subprocess.PIPE, text=True)
    while not (loop.engine.home / "up").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return process


def test_second_launch_reads_while_the_first_one_runs(loop: Loop) -> None:
    """It runs the best plan that is known, and writes nothing."""
    loop.start()
    loop.start(GOOD)
    loop.engine.behave(**{stem(GOOD): {"wait": 60}})
    first = launched(loop)
    try:
        loop.engine.behave()
        before = (loop.folder / "journal.jsonl").read_bytes()
        lines = loop.start(OTHER)
        assert "another launch runs on it: it is only read" in lines[0]
        assert (loop.ran[-1], loop.engine.calls[-1]["observe"]) == (stem(GOOD), None)
        assert (loop.folder / "journal.jsonl").read_bytes() == before
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate()


def test_sigterm_ends_the_engine_and_blames_no_plan(loop: Loop) -> None:
    """The engine gets the signal; it is not started again, and its plan stays."""
    loop.start()
    loop.engine.behave(**{stem(GOOD): {"wait": 60, "silent": True}})
    JournalFolder(loop.folder).keep(GOOD)
    loop.start(code=0)
    records = loop.journal
    start = next(each for each in records if each.decision is Event.OBSERVE)
    line = {"run": 3, "decision": "apply", "plan": digest(GOOD), "graphs": graphs_of(GOOD)}
    with (loop.folder / "journal.jsonl").open("a", encoding="utf-8") as journal:
        data = {**codec.to_data(start), **line}
        journal.write(json.dumps(data) + "\n")
    process = launched(loop)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert loop.ran[-1] == stem(GOOD)
    end = loop.journal[-1]
    assert (end.decision, end.interrupted, end.captured) == (Event.END, True, False)
