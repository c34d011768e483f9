"""engine, check --engine, compare and export: what people type, what they read, and what is refused."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.cli.common import split_words
from capture_planner.codec import shipped as catalog
from capture_planner.engines import emulate, engines, find_engine
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from support import log_lines
from support.commands import Run

ROOT = Path(__file__).parent.parent.parent
PLAN = str(ROOT / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml")
SPEC = str(ROOT / "plans" / "specs" / "llama-3.1-8b.yaml")
TIERS = (
    '{"method":"eagle3","model":"x/y","num_speculative_tokens":2,'
    '"num_speculative_tokens_per_batch_size":[[1,16,2],[17,256,1]]}'
)
H100 = ("--environment", "h100")
FLAGS = {
    "vllm": ("--max-num-seqs", "64"),
    "sglang": ("--max-running-requests", "64", "--chunked-prefill-size", "1024"),
    "tensorrt-llm": ("--max_batch_size", "64"),
}


@pytest.mark.parametrize("name", engines())
def test_help_lists_the_flags_of_the_engine_that_is_named(call: Run, name: str) -> None:
    """Each flag that graphs can depend on, and none of another engine's; without a name, how to ask."""
    ran = call("engine", name, "--help")
    assert ran.code == 0
    assert f"Flags of {name} " in ran.out
    listed = {line.split()[0] for line in ran.out.partition("Flags of ")[2].splitlines() if line[2:3].strip()}
    assert set(find_engine(name).flags) <= listed
    assert f"engine {next(iter(engines()))} --help" in call("engine", "--help").out


@pytest.mark.parametrize("name", engines())
def test_the_document_has_what_it_promises(call: Run, name: str) -> None:
    """Sizes, graphs with their six keys, modes by role, decisions; the same as the library says."""
    data = call("engine", name, *FLAGS[name], *H100, "--format", "json").data
    emulated = emulate(name, FLAGS[name], catalog.find_environment("h100"))
    assert data["sizes"] == list(emulated.sizes)
    assert len(data["graphs"]) == len(emulated.graphs) > 0
    keys = {"role", "mode", "num_tokens", "num_reqs", "query_len", "active_loras"}
    assert all(keys <= set(graph) for graph in data["graphs"])
    assert data["mode"] == {role.value: mode.value for role, mode in emulated.modes.items()}
    assert all({"rule", "before", "after", "message"} <= set(decision) for decision in data["decisions"])


@pytest.mark.parametrize("name", engines())
def test_the_table_has_every_role_and_setting(call: Run, name: str) -> None:
    """For people: each role with its mode, what serves which batches, and the settings behind it."""
    ran = call("engine", name, *FLAGS[name], *H100)
    emulated = emulate(name, FLAGS[name], catalog.find_environment("h100"))
    assert ran.code == 0
    for role, mode in emulated.modes.items():
        assert f"{role} {mode.value}" in ran.out
    for setting in emulated.settings:
        assert setting.name in ran.out


@pytest.mark.parametrize("name", engines())
def test_lines_are_answered_as_the_dispatcher_would(call: Run, name: str, tmp_path: Path) -> None:
    """A line for each line, in order."""
    emulated = emulate(name, FLAGS[name], catalog.find_environment("h100"))
    batches = [
        Batch(role=Role.TARGET, num_reqs=n, num_tokens=n * q, query_len=q, past_prompt=past)
        for n in (1, 5, 33, 64, 65, 300)
        for q in (1, 2)
        for past in (True, False)
    ]
    keys = ("num_reqs", "num_tokens", "query_len", "past_prompt")
    lines = [json.dumps({"role": "target"} | {key: getattr(b, key) for key in keys}) for b in batches]
    file = tmp_path / "batches.jsonl"
    file.write_text("\n".join(lines), "utf-8")
    ran = call("engine", name, *FLAGS[name], *H100, "--batches", str(file))
    answers = [json.loads(line) for line in ran.out.splitlines()]
    for batch, answer in zip(batches, answers, strict=True):
        expected = emulated.dispatch(batch)
        assert answer["mode"] == expected.mode.value
        assert answer["reason"] == expected.reason
        if expected.entry is not None:
            assert answer["num_tokens"] == expected.entry.num_tokens


def test_short_flags_of_the_engine_are_left_as_they_are(call: Run) -> None:
    """-cc.x=y and -O0 are vLLM's, whatever letters ours begin with; ours may stand anywhere."""
    flags = ("--format", "json", "-cc.cudagraph_mode=FULL_DECODE_ONLY", "--max-num-seqs=16")
    data = call("engine", "vllm", *flags, *H100).data
    assert data["mode"] == {"target": "FULL_DECODE_ONLY"}
    assert call("engine", "vllm", "-O0", "--format=json", *H100).data["graphs"] == []


@pytest.mark.parametrize("command", [("engine", "vllm"), ("check", "--engine", "vllm")])
def test_short_environment_among_flags_is_ours(call: Run, command: tuple[str, ...]) -> None:
    """No engine has such a flag; one that sets a variable is the container's."""
    named = call(*command, "--max-num-seqs", "16", "--environment", "l40s", "--format", "json")
    assert call(*command, "--max-num-seqs", "16", "-e", "l40s", "--format", "json").data == named.data
    assert "no environment is named 'h9000'" in call(*command, "-e", "h9000").err
    front = ("docker", "run", "-e", "A=1", "-e", "HF_TOKEN", "vllm/vllm-openai", "--max-num-seqs", "16")
    data = call(*command, *front, *("--environment", "l40s", "--format", "json")).data
    assert {**data, "notes": []} == {**named.data, "notes": []}


@pytest.mark.parametrize(
    ("name", "front"),
    [
        ("vllm", "CUDA_VISIBLE_DEVICES=0,1 vllm serve"),
        ("vllm", "serve"),
        ("vllm", "/opt/bin/python3.12 -m vllm.entrypoints.openai.api_server"),
        ("sglang", "SGLANG_X=1 python3 -m sglang.launch_server"),
        ("sglang", "sglang serve"),
        ("tensorrt-llm", "TLLM_LOG_LEVEL=INFO trtllm-serve"),
        ("tensorrt-llm", "trtllm-serve serve"),
    ],
)
def test_a_whole_command_line_will_do(call: Run, name: str, front: str) -> None:
    """Variables and the program in front of the flags change nothing."""
    bare = call("engine", name, *FLAGS[name], *H100, "--format", "json").data
    data = call("engine", name, *front.split(), *FLAGS[name], *H100, "--format", "json").data
    assert {**data, "notes": []} == bare


def test_the_own_variables_of_an_engine_decide() -> None:
    """Those in front of its program count, others do not."""
    machine = catalog.find_environment("h100")
    words = ["CUDA_VISIBLE_DEVICES=1", "VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve", "m"]
    assert emulate("vllm", words, machine).command == ("VLLM_USE_V2_MODEL_RUNNER=0", "m")
    for name in engines():
        assert set(find_engine(name).limits) <= set(find_engine(name).flags)


OWN = {"--format": True, "--flag": False}
WORDS = st.sampled_from(["-e", "--x", "v", "-cc.mode=3", "--format", "--flag", "--format=a", "-O0", "--xy=--flag"])


@given(st.lists(WORDS), st.lists(WORDS))
def test_words_are_parted_and_none_is_lost(words: list[str], behind: list[str]) -> None:
    """Read from the left: an option of ours takes its value along, all else is theirs, and all behind --."""
    expected: tuple[list[str], list[str]] = ([], [])
    waits = False
    for word in words:
        ours = waits or word.partition("=")[0] in OWN
        expected[not ours].append(word)
        waits = not waits and word == "--format"
    if waits:
        words, expected[0][:] = [*words, "text"], [*expected[0], "text"]
    assert split_words([*words, "--", *behind], OWN) == (expected[0], [*expected[1], *behind])


def test_the_lint_of_flags_has_findings_and_an_exit_code(call: Run) -> None:
    """20 batches miss their graph; the flag that mends it is named, and mends it."""
    flags = ("--max-num-seqs", "256", "--speculative-config", TIERS)
    data = call("check", "--engine", "vllm", *flags, *H100, "--format", "json").document(2)
    missed = [f for f in data["findings"] if f["code"] == "EN002" and f["role"] == "target"]
    assert [finding["count"] for finding in missed] == [20]
    sizes = missed[0]["mend"].partition("--cudagraph-capture-sizes ")[2].partition(",")[0].split()
    mended = call("check", "--engine", "vllm", *flags, "--cudagraph-capture-sizes", *sizes, *H100)
    assert "EN002 compatible-graph-missed: target" not in mended.out
    assert "nothing to report" in call("check", "--engine", "vllm", *FLAGS["vllm"], *H100).out


def test_files_are_checked_as_before(call: Run) -> None:
    """Without --engine the words are files, and short options are ours."""
    assert call("check", PLAN).code == 0
    assert call("check", SPEC, "-e", "h100").code == 0
    assert "Missing argument" in call("check").err


@pytest.mark.parametrize("name", engines())
def test_a_plan_is_exported_and_the_engine_reads_it(call: Run, name: str, tmp_path: Path) -> None:
    """The flags that are printed are those that were emulated; the file is written where it is wanted."""
    file = tmp_path / "engine.yaml"
    data = call("export", PLAN, "--to", name, "--format", "json", "--output", str(file)).data
    assert file.read_text("utf-8") == data["file"]
    assert data["proof"]["batches"] > 0
    said = call("export", PLAN, "--to", name, "--strict")
    assert said.code == (0 if data["proof"]["exact"] else 2)
    for loss in data["losses"]:
        assert loss["name"] in said.out


T4 = str(ROOT / "plans" / "locked" / "llama-3.2-3b-eagle-t4.t4.yaml")
TINY = str(ROOT / "plans" / "locked" / "tiny-reference-cpu.cpu.yaml")


@pytest.mark.parametrize(
    ("name", "reason"), [("vllm", "it does not run on compute capability 7.5"), ("sglang", "needs SM80 to SM90")]
)
def test_a_backend_that_the_machine_cannot_run_is_not_exported(call: Run, name: str, reason: str) -> None:
    """The flags are without it, are proved, and are those that the engine takes on that machine."""
    data = call("export", T4, "--to", name, "--format", "json").data
    assert "--attention-backend" not in data["flags"]
    assert reason in {loss["name"]: loss["message"] for loss in data["losses"]}["backend"]
    assert data["proof"]["batches"] > 0
    assert data["unproved"] is None
    assert call("engine", name, *data["flags"], "--environment", "t4").code == 0
    said = call("export", T4, "--to", name)
    assert said.code == 0
    assert said.out.startswith("--model")
    assert "not proved" not in said.out


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("strict", [(), ("--strict",)])
def test_flags_are_written_where_nothing_can_be_proved(
    call: Run, name: str, strict: tuple[str, ...], tmp_path: Path
) -> None:
    """No GPU, no proof: flags and file all the same, the reason in text and JSON, and exit code 2."""
    file = tmp_path / "engine.yaml"
    data = call("export", TINY, "--to", name, "--format", "json", "-o", str(file), *strict).document(2)
    assert "--max" in " ".join(data["flags"])
    assert data["proof"] is None
    assert "cpu has no CUDA device" in data["unproved"]
    assert file.read_text("utf-8") == data["file"]
    said = call("export", TINY, "--to", name, *strict)
    assert said.code == 2
    assert said.out.startswith("--model")
    assert "not proved" in said.out
    assert "nothing of the plan is lost" not in said.out


CAN_BE = (
    "a plan, spec or observation file, or an engine's command line in quotes, starting with one of sglang, tensorrt"
)


@pytest.mark.parametrize(
    ("sides", "which", "says"),
    [
        (("foo --a", "vllm"), "A: foo --a", CAN_BE),
        (("", "vllm"), "A: ''", CAN_BE),
        (("vllm", " "), "B: ' '", CAN_BE),
        (("vllm", "vLLM --max-num-seqs 3"), "B: vLLM --max-num-seqs 3", "did you mean vllm?"),
        (("trtllm-serve", "vllm"), "A: trtllm-serve", "did you mean tensorrt-llm?"),
        (("vllm", "vllm --max-num-seqs x"), "B.--max-num-seqs", "give a whole number"),
        (("vllm 'open", "vllm"), 'A: "vllm \'open"', "quote it as a shell would"),
    ],
)
def test_a_side_that_is_none_is_named(call: Run, sides: tuple[str, str], which: str, says: str) -> None:
    """Which of both it was, and what it can be."""
    ran = call("compare", *sides, *H100)
    assert ran.code == 1
    assert f"{which}: " in ran.err
    assert says in " ".join(ran.err.split())


@pytest.mark.parametrize(
    "command", [("engine", "vllm"), ("check", "--engine", "sglang"), ("compare", "vllm", "vllm"), ("plan", SPEC)]
)
def test_an_empty_environment_is_none(call: Run, command: tuple[str, ...]) -> None:
    """It is not the default one."""
    ran = call(*command, "--environment", "")
    assert ran.code == 1
    assert "names no machine; shipped are a10, a100" in ran.err


def test_deployments_are_put_side_by_side(call: Run) -> None:
    """A plan and an engine; the engine runs on the plan's machine where no other is named."""
    ran = call("compare", PLAN, "vllm --max-num-seqs 256")
    assert (ran.code, ran.err) == (0, "")
    data = call("compare", SPEC, "tensorrt-llm --max_batch_size 64", *H100, "--format", "json").data
    assert data == call("compare", SPEC, "tensorrt-llm --max_batch_size 64", *H100, "--format", "json").data
    same = call("compare", PLAN, PLAN, "--format", "json").data
    assert not same["holes"]


def test_deployments_are_compared_by_what_tune_reads(call: Run, tmp_path: Path) -> None:
    """A log counts alike on both sides; a trace runs through the scheduler of each."""
    sides = ("vllm m --max-num-seqs 256 --max-num-batched-tokens 512", "vllm m --max-num-seqs 2")
    log, trace = tmp_path / "vllm.log", tmp_path / "trace.csv"
    log.write_text("".join(log_lines.vllm_iteration(0, n, (0, 0), (2, 2)) + "\n" for n in range(30)))
    trace.write_text("t,in_len,out_len\n" + "0,600,40\n" * 5)

    def steps(*sources: str) -> list[int]:
        data = call("compare", *sides, *H100, *(f"--traffic={each}" for each in sources), "--format", "json").data
        assert data["batches"] == "traffic"
        assert data["assumptions"]
        return [sum(pair[side]["batches"] for pair in data["families"] if pair[side]) for side in "ab"]

    assert steps(str(log)) == [30, 30]
    assert steps(str(log), str(log)) == [60, 60]
    one, other = steps(str(trace))
    assert one < other
    assert steps(str(log), str(trace)) == [30 + one, 30 + other]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("engine", "lmdeploy"), "no engine named 'lmdeploy' is installed; installed: sglang"),
        (("engine", "vllm", "--max-num-sequences", "3"), "--max-num-sequences"),
        (("engine", "vllm", "--max-num-seqs", "many"), "--max-num-seqs"),
        (("engine", "vllm", "-cc.cudagraph_capture_sizes=[1,2]", "-cc.max_cudagraph_capture_size=8"), "8"),
        (("engine", "sglang", "--cuda-graph-max-bs", "64"), "give --cuda-graph-max-bs-decode 64"),
        (("engine", "tensorrt-llm", "--max_batch", "64"), "--max_batch"),
        (("engine", "vllm", "--environment", "h9000"), "no environment is named 'h9000'"),
        (("engine", "vllm", "--format"), "'--format' requires an argument"),
        (("engine", "vllm", "VLLM_MLA_DISABLE=1"), "its effect on graphs is not emulated; leave it out"),
        (("engine", "vllm", "--cudagraph-capture-sizes", "0", "8"), "a graph of 0 tokens; give sizes from 1 on"),
        (("engine", "sglang", "--cuda-graph-bs-decode", "0", "8"), "every decode size to be positive, and has 0"),
        (
            ("engine", "vllm", "--max-num-seqs", "100000", "--max-num-batched-tokens", "1000000"),
            "--max-num-seqs: vllm may accept it, but capture-planner does not: must be at most 65536",
        ),
        (("check", "--engine", "vllm", "--format", "sarif"), "use text or json"),
        (("check", "--engine", "vllm", "--spec", SPEC), "--spec is for plans"),
        (("compare", PLAN, "vllm --nope"), "--nope"),
        (("compare", PLAN, "vllm 'open"), "quote it as a shell would"),
        (("compare", PLAN, "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("compare", PLAN, PLAN, "--traffic", "nowhere.csv"), "nowhere.csv"),
        (("export", PLAN, "--to", "vllm", "-o", "nowhere/x.yaml"), "no such folder"),
    ],
)
def test_what_cannot_be_done_is_refused(call: Run, arguments: tuple[str, ...], says: str) -> None:
    """In a sentence, with exit code 1, and no traceback."""
    ran = call(*arguments)
    assert ran.code == 1
    assert says in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


def test_a_locked_plan_is_not_written_over(call: Run, tmp_path: Path) -> None:
    """The file of --output is not the plan's."""
    file = tmp_path / "plan.yaml"
    file.write_text(Path(PLAN).read_text("utf-8"), "utf-8")
    assert call("export", str(file), "--to", "vllm", "-o", str(file)).code == 1
    assert codec.load_plan(file) == codec.load_plan(PLAN)


@pytest.mark.parametrize(
    ("name", "flag", "tokens"),
    [("vllm", "--model", "--max-num-batched-tokens"), ("sglang", "--model-path", "--chunked-prefill-size")],
)
def test_what_is_assumed_comes_first(call: Run, name: str, flag: str, tokens: str) -> None:
    """It is the first line of text and a list in JSON, in every command; nothing is left for standard error."""
    command = (name, flag, "some/model", tokens, "1024")
    shown = call("engine", *command, *H100, "--format", "json")
    (assumption,) = shown.data["assumptions"]
    assert shown.err == ""
    assert "folder with its config.json" in assumption
    checked = call("check", "--engine", *command, *H100, "--format", "json")
    assert (checked.err, list(json.loads(checked.out))) == ("", ["assumptions", "findings", "together"])
    assert json.loads(checked.out)["assumptions"] == [assumption]
    text = " ".join(call("engine", *command, *H100).out.split())
    assert text.startswith(f"assumption: {assumption}")
    # There the finding about it says it, once.
    text = " ".join(call("check", "--engine", *command, *H100).out.split())
    assert text.count(assumption.rpartition("; ")[0]) == 1
    sides = call("compare", " ".join(command), f"{name} {flag} Qwen/Qwen3-8B {tokens} 1024", *H100, "--format", "json")
    assert (sides.err, sides.data["assumptions"]) == ("", [f"A: {assumption}"])
    unnamed = call("engine", *command, "--format", "json")
    assert unnamed.data["assumptions"] == ["no --environment given; using h100", assumption]


@pytest.mark.parametrize("form", ["github", "sarif"])
def test_findings_of_a_pasted_line_are_annotations_of_its_file(call: Run, tmp_path: Path, form: str) -> None:
    """The line of a service that is kept in git is checked there."""
    script = tmp_path / "serve.sh"
    script.write_text(shlex.join(["vllm", "serve", *EAGLE, "--max-num-seqs", "256"]))
    ran = call("check", "--engine", "vllm", str(script), *H100, "--format", form)
    assert ran.code == 2
    if form == "github":
        assert f"::warning file={script},line=1,col=1,title=EN001 decodes-without-graph::target: decodes" in ran.out
    else:
        assert json.loads(ran.out)["runs"][0]["results"][0]["ruleId"] == "EN001"
    ran = call("check", "--engine", "vllm", *EAGLE, *H100, "--format", form)
    assert (ran.code, "is for files; name one with the line" in ran.err) == (1, True)


EAGLE = ("--model", "Qwen/Qwen3-8B", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
NEXTN = ("--model-path", "Qwen/Qwen3-8B", "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4",
         "--chunked-prefill-size", "1024")  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        ("vllm", *EAGLE, "--max-num-seqs", "256"),
        ("vllm", *EAGLE, "--max-num-seqs", "200", "--max-cudagraph-capture-size", "256"),
        ("sglang", *NEXTN, "--cuda-graph-max-bs-decode", "32", "--max-running-requests", "256"),
        # No sizes are multiples of 5 and reach every decode of the drafter.
        (
            "vllm",
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "-tp",
            "4",
            "--speculative-config.method",
            "qwen3_next_mtp",
            "--speculative-config.num_speculative_tokens",
            "4",
        ),
    ],
)
def test_fixes_are_one_line_that_was_proved(call: Run, command: tuple[str, ...]) -> None:
    """What ``check`` then finds of it is what it said to be left; text counts what it shows."""
    together = call("check", "--engine", *command, *H100, "--format", "json").document(2)["together"]
    ran = call("check", "--engine", *command, *H100)
    assert ran.out.rstrip().endswith(f": {ran.out.count('  fix: ')} findings")
    assert shlex.join(together["command"]) in ran.out
    again = json.loads(call("check", "--engine", command[0], *together["command"], *H100, "--format", "json").out)
    assert sorted({each["code"] for each in again["findings"]}) == together["left"]
    assert again["together"] is None


@pytest.mark.parametrize("command", [("vllm", "Qwen/Qwen3-8B"), ("vllm",), ("tensorrt-llm", "some/model")])
def test_nothing_is_said_where_nothing_is_assumed(call: Run, command: tuple[str, ...]) -> None:
    """A known model, the one that vLLM takes by itself, and an engine whose graphs no model decides."""
    ran = call("engine", *command, *H100, "--format", "json")
    assert (ran.err, ran.data["assumptions"]) == ("", [])
