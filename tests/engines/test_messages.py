"""What a person reads who typed something wrong: where it is, what was wrong, and what to give."""

import contextlib
import json
import shlex

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, engines, find_engine
from capture_planner.engines.parsing import near
from capture_planner.errors import FlagError
from capture_planner_sglang.emulation import flags as sglang
from capture_planner_tensorrt_llm import flags as tensorrt_llm
from capture_planner_vllm.emulation import flags as vllm
from capture_planner_vllm.emulation.tables import flag_table

H100 = find_environment("h100")
SCHEDULE = "num_speculative_tokens_per_batch_size"
FRONT = {"vllm": ["m"], "sglang": [], "tensorrt-llm": []}
KNOWN = {
    "vllm": {name for entry in flag_table().values() for name in (*entry["names"], *entry.get("no", ()))},
    "sglang": set(sglang.sglang_parser()._option_string_actions),
    "tensorrt-llm": set(tensorrt_llm.ACCEPTED),
}
"""Every flag that each engine takes."""
OLD = {"vllm": vllm.HISTORY, "sglang": sglang.HISTORY, "tensorrt-llm": tensorrt_llm.HISTORY}
"""Flags of older releases and of other engines."""


def problems(engine, *words):
    """Return what is wrong with a command line."""
    with pytest.raises(FlagError) as error:
        emulate(engine, words, H100)
    return error.value.problems


def wrong(engine, *words):
    """Return what is wrong with a command line, if anything is."""
    with contextlib.suppress(FlagError):
        emulate(engine, words, H100)
        return ()
    return problems(engine, *words)


def drafts(**more):
    """Return a vLLM drafter as JSON."""
    return json.dumps({"method": "eagle3", "model": "x/y", "num_speculative_tokens": 2} | more)


WRONG = [
    ("vllm", "--max-num-sqs 4", "--max-num-sqs", "did you mean --max-num-seqs?"),
    ("vllm", "--max-num-seqs", "--max-num-seqs", "give its value"),
    ("vllm", "--max-num-seqs many", "--max-num-seqs", "give a whole number"),
    ("vllm", "--max-num-seqs 1e3", "--max-num-seqs", "give a whole number"),
    ("vllm", "--max-num-seqs -1", "--max-num-seqs", "give 1 or more"),
    ("vllm", "--max-num-seqs 0", "--max-num-seqs", "give 1 or more"),
    ("vllm", "--max-num-seqs 512 --max-num-batched-tokens 256", "--max-num-batched-tokens", "give 512"),
    ("vllm", "--cudagraph-capture-sizes 1,2,4", "--cudagraph-capture-sizes", "give them apart: 1 2 4"),
    ("vllm", "--cudagraph-capture-sizes [1,2,4]", "--cudagraph-capture-sizes", "give them apart: 1 2 4"),
    ("vllm", ["--cudagraph-capture-sizes", "1 2 4"], "--cudagraph-capture-sizes", "apart: 1 2 4"),
    ("vllm", ["--max-num-seqs", "6 4"], "--max-num-seqs", "give one number"),
    ("vllm", "m -cc.cudagraph_sizes=[1,2]", "cudagraph_sizes", 'give "cudagraph_capture_sizes": [1, 2]'),
    ("vllm", "--tp-size 2", "--tp-size", "give --tensor-parallel-size"),
    ("vllm", ["-sc", drafts(method="eagel3")], "method", "did you mean eagle3?"),
    ("vllm", ["-sc", drafts(num_speculative_tokens=0)], "num_speculative_tokens", "give 1 or more"),
    ("vllm", ["-sc", drafts(**{SCHEDULE: [[1, 16, 2], [32, 17, 1]]})], 1, "reversed"),
    ("vllm", ["-sc", drafts(**{SCHEDULE: [[1, 16, 2], [32, 17, 1]]})], 1, "write [17, 32, 1]"),
    ("vllm", ["-sc", drafts(**{SCHEDULE: [[1, 16, 2], [10, 20, 1]]})], 1, "which ends at 16; start it at 17"),
    ("vllm", ["-sc", drafts(**{SCHEDULE: [[10, 20, 1], [1, 16, 2]]})], 0, "which ends at 16; start it at 17"),
    ("vllm", ["-sc", drafts(**{SCHEDULE: [[2, 16, 2]]})], 0, "starts at 2; start it at 1"),
    ("vllm", ["-sc", drafts(**{SCHEDULE: [[1, 16, -2]]})], 0, "draft 0 or more"),
    ("vllm", ["-cc", '{"mode": 3'], "--compilation-config", "close its braces"),
    ("vllm", ["-cc", "{'mode': 3}"], "--compilation-config", "double quotes inside"),
    ("vllm", ["-cc", "{mode: 3}"], "--compilation-config", "character 2"),
    ("vllm", "-sc {method: eagle3}", "--speculative-config", "the shell takes it apart"),
    ("vllm", "--enforce-eager=true", "--enforce-eager", "without a value"),
    ("vllm", "m --enforce-eager true", "true", "a switch takes no value"),
    ("vllm", "m \u2013max-num-seqs 3", "\u2013max-num-seqs", "two plain dashes"),
    ("vllm", ["m", "--max-num-seqs 64"], "--max-num-seqs", "as two words"),
    ("vllm", ["--max-num-seqs = 64"], "--max-num-seqs", "without spaces around ="),
    ("vllm", "--max-num-seqs = 64", "--max-num-seqs", "without spaces around ="),
    ("vllm", "-cc.cudagraph_capture_sizes=1,2,4", "cudagraph_capture_sizes", "write [1, 2, 4]"),
    ("vllm", "m max-num-seqs 3", "max-num-seqs", "two plain dashes"),
    ("sglang", "--max-running-requets 4", "--max-running-requets", "did you mean --max-running-requests?"),
    ("sglang", "--max_running_requests 4", "--max_running_requests", "did you mean --max-running-requests?"),
    ("sglang", "--max-num-seqs 4", "--max-num-seqs", "give --max-running-requests"),
    ("sglang", "--cuda-graph-bs-decode 1,2,4", "--cuda-graph-bs-decode", "give them apart: 1 2 4"),
    ("sglang", "--cuda-graph-max-bs-decode 0", "--cuda-graph-max-bs-decode", "give 1 or more"),
    ("sglang", "--max-running-requests 0", "--max-running-requests", "give 1 or more"),
    ("sglang", "--max-running-requests 1.5", "--max-running-requests", "give a whole number"),
    ("sglang", "--attention-backend flash_infer", "--attention-backend", "did you mean flashinfer?"),
    ("sglang", "--speculative-algorithm EAGEL", "--speculative-algorithm", "did you mean EAGLE?"),
    ("sglang", ["--cuda-graph-config", '{"decode": '], "--cuda-graph-config", "close its braces"),
    ("sglang", ["--cuda-graph-config", '{"decod": {}}'], "--cuda-graph-config", "decode and prefill"),
    ("sglang", ["--cuda-graph-config", '{"decode": {"max_b": 3}}'], "--cuda-graph-config", "max_bs"),
    ("sglang", ["--cuda-graph-config", '{"decode": {"bs": "1"}}'], "--cuda-graph-config", "as in [1, 2, 4]"),
    ("sglang", ["--cuda-graph-config", '{"decode": {"bs": []}}'], "--cuda-graph-config", "leave bs out"),
    ("sglang", ["--speculative-algorithm", ""], "--speculative-algorithm", "'' is unknown"),
    ("sglang", "--device cpu", "--device", "give cuda"),
    ("sglang", "--page-size 0", "--page-size", "give 1 or more"),
    ("sglang", "--tp-size 0", "--tp-size", "give 1 or more"),
    ("sglang", "--tp-size 6 --attn-dp-size 4", "--attn-dp-size", "give a divisor of --tp-size 6"),
    ("sglang", "--speculative-algorithm EAGLE --speculative-num-steps 3", "--speculative-eagle-topk", "give"),
    ("sglang", "some/model", "some/model", "--model-path MODEL"),
    ("sglang", "--disable-cuda-graph=true", "--disable-cuda-graph", "without a value"),
    ("tensorrt-llm", "--max-batch-size 4", "--max-batch-size", "did you mean --max_batch_size?"),
    ("tensorrt-llm", "--tp 4", "--tp", "give --tp_size 4"),
    ("tensorrt-llm", "--max-num-seqs 4", "--max-num-seqs", "give --max_batch_size"),
    ("tensorrt-llm", "--cuda_graph_config {}", "--cuda_graph_config", "give --config FILE"),
    ("tensorrt-llm", "--max_batch_size", "--max_batch_size", "give its value"),
    ("tensorrt-llm", "--max_batch_size 1,2", "--max_batch_size", "give one number"),
    ("tensorrt-llm", "--max_batch_size = 64", "--max_batch_size", "without spaces around ="),
    ("tensorrt-llm", "--max_batch_size 0", "--max_batch_size", "give 1 to 65536"),
    ("tensorrt-llm", "--max_num_tokens 8k", "--max_num_tokens", "give a whole number"),
    ("tensorrt-llm", "--trust_remote_code=true", "--trust_remote_code", "without one"),
]


@pytest.mark.parametrize(("engine", "command", "where", "says"), WRONG)
def test_wrong_flag_has_one_problem_with_a_remedy(engine, command, where, says):
    """One problem: its path ends at the place, and text and remedy say what to do."""
    (problem,) = problems(engine, *(command.split() if isinstance(command, str) else command))
    assert problem.path[-1] == where
    assert says in str(problem)
    assert problem.remedy


FILES = [
    ("vllm", "max-num-seqs: 64\nmax-num-batched-toks: 3", 2, "did you mean --max-num-batched-tokens?"),
    ("vllm", "seed: 1\nmax_num_seqs: many", 2, "give a whole number"),
    ("vllm", "compilation-config:\n  mode: 3\n  cudagraph_mod: FULL", 3, "did you mean cudagraph_mode?"),
    ("vllm", "max-num-seqs: 512\nmax-num-batched-tokens: 256", 2, "give 512 or more"),
    ("vllm", "- a\n- b", 1, "flag: value on each line"),
    ("vllm", "max-num-seqs: 64\n  seed: [1,", 2, "not YAML"),
    ("sglang", "tp-size: 2\nmax-running-requets: 3", 2, "did you mean --max-running-requests?"),
    ("sglang", "tp-size: 2\ncuda-graph-bs-decode: 1,2,4", 2, "give them apart: 1 2 4"),
    ("sglang", "tp-size: 1\npage-size: 0", 2, "give 1 or more"),
    ("sglang", "- a\n- b", 1, "flag: value on each line"),
    ("sglang", "tp-size: 2\n  seed: [1,", 2, "not YAML"),
    ("tensorrt-llm", "max_seq_len: 8\nmax_batch_siz: 4", 2, "did you mean max_batch_size?"),
    ("tensorrt-llm", "cuda_graph_config:\n  enable_paddin: true", 2, "did you mean enable_padding?"),
    ("tensorrt-llm", "cuda_graph_config:\n  batch_sizes:\n  - 1\n  - x", 4, "give a whole number"),
    ("tensorrt-llm", "max_seq_len: 8\nmax_batch_size: 1e9", 2, "expected an integer, got '1e9'"),
    ("tensorrt-llm", "speculative_config:\n  decoding_type: eagle3", 2, "did you mean Eagle3?"),
    ("tensorrt-llm", "- a\n- b", 1, "option: value on each line"),
    ("tensorrt-llm", "max_seq_len: 8\n  a: [1,", 2, "not YAML"),
]


@pytest.mark.parametrize(("engine", "text", "line", "says"), FILES)
def test_wrong_file_value_has_its_line_and_flag(engine, text, line, says, tmp_path):
    """The file, the line and the flag that named it; nothing is printed beside the error."""
    file = tmp_path / "flags.yaml"
    for flag in ("--config", "--extra_llm_api_options") if engine == "tensorrt-llm" else ("--config",):
        file.write_text(text, "utf-8")
        (problem,) = problems(engine, *FRONT[engine], flag, str(file))[:1]
        assert (problem.file, problem.line) == (str(file), line)
        assert says in str(problem)
        assert problem.remedy
        if engine == "tensorrt-llm":
            assert problem.path[0] == flag


@pytest.mark.parametrize("engine", engines())
def test_missing_file_has_its_name_and_reason(engine, tmp_path):
    """Its name and the system's reason, without numbers of errors."""
    (problem,) = problems(engine, *FRONT[engine], "--config", str(tmp_path / "no.yaml"))
    assert problem.file == str(tmp_path / "no.yaml")
    assert "No such file" in problem.message
    assert "Errno" not in str(problem)


def test_wrong_flag_that_is_also_in_the_file_has_no_line(tmp_path):
    """A flag that stands in both is read from the command line, so that it has no line."""
    file = tmp_path / "flags.yaml"
    file.write_text("max-num-seqs: 8\ntensor-parallel-size: 2\n", "utf-8")
    for words in (["--max-num-seqs", "x"], ["-tp", "x"]):
        (problem,) = problems("vllm", "m", "--config", str(file), *words)
        assert problem.file is None


@given(st.sampled_from(sorted((e, f) for e in engines() for f in find_engine(e).flags if f[:2] == "--")), st.data())
def test_misspelled_flag_suggests_a_real_one(drawn, data):
    """Of a flag with a letter too few, twice, or two swapped, or the other dashes, a real one is named."""
    engine, flag = drawn
    at = data.draw(st.integers(2, len(flag) - 2))
    slip = data.draw(
        st.sampled_from(
            [
                flag[:at] + flag[at + 1 :],
                flag[:at] + flag[at] + flag[at:],
                flag[:at] + flag[at + 1] + flag[at] + flag[at + 2 :],
                "--" + flag[2:].translate(str.maketrans("-_", "_-")),
            ]
        )
    )
    begun = slip if engine == "tensorrt-llm" else slip.replace("_", "-") if engine == "vllm" else slip
    assume(not any(name == begun or name.startswith(begun) for name in KNOWN[engine]))
    found = near(slip, KNOWN[engine])
    assert found in KNOWN[engine]
    if slip.replace("_", "-") == flag.replace("_", "-"):
        assert found.replace("_", "-") == flag.replace("_", "-")
    problem, *_ = problems(engine, *FRONT[engine], f"{slip}=1")
    assert slip in OLD[engine].flags or problem.remedy == f"did you mean {found}?"


OLD_ROWS = sorted((engine, name) for engine, history in OLD.items() for name in history.flags)


@pytest.mark.parametrize("engine", OLD)
def test_flags_that_are_gone_have_a_remedy_that_the_engine_takes(engine):
    """What is given in place of an old or foreign flag is the engine's, with the value, and the old one is not."""
    for name, old in OLD[engine].flags.items():
        assert name not in KNOWN[engine]
        problem, *age = problems(engine, *FRONT[engine], name, "7")
        assert problem.path == (name,)
        assert [each.path for each in age] == [()] * (old.until is not None)
        new = problem.remedy.removeprefix("give ").partition(": ")[0]
        flags = [word.partition("=")[0].partition(".")[0] for word in new.split() if word.startswith("-")]
        assert new.startswith("leave it out") or (flags and set(flags) <= KNOWN[engine])


@given(st.sampled_from([row for row in OLD_ROWS if "FILE" not in OLD[row[0]].flags[row[1]].now]), st.integers(1, 64))
def test_a_remedy_followed_word_for_word_removes_the_problem(row, value):
    """The flag is gone from what is wrong with the line, whatever else is."""
    engine, name = row
    problem, *_ = problems(engine, *FRONT[engine], name, str(value))
    new = problem.remedy.removeprefix("give ").partition(": ")[0]
    words = [] if new.startswith("leave it out") else shlex.split(new)
    assert name not in words
    left = "".join(str(each) for each in wrong(engine, *FRONT[engine], *words))
    assert "has no such" not in left
    assert f"{name}:" not in left


GONE = [
    ("vllm", ["-O", '{"full_cuda_graph": true}'], ["""give --compilation-config '{"cudagraph_mode": "FULL"}'"""]),
    ("vllm", ["-O", "7"], ["""give --compilation-config '{"mode": 7}'"""]),
    ("vllm", ["--cuda-graph-sizes", "2048"], ["give --max-cudagraph-capture-size 2048"]),
    ("vllm", ["--cuda-graph-sizes", "1", "2"], ["give --cudagraph-capture-sizes 1 2"]),
    ("vllm", ["--cudagraph-mode", "FULL"], ["give -cc.cudagraph_mode=FULL"]),
    ("vllm", ["--max-model-seqs", "4"], ["give --max-num-seqs 4"]),
    ("vllm", ["-cc", '{"use_inductor": false}'], ['give "backend": "eager"']),
    ("vllm", ["-cc", '{"level": 3}'], ['give "mode": 3']),
    ("vllm", ["-cc", '{"full_cuda_graph": true}'], ['give "cudagraph_mode": "FULL"']),
    ("vllm", ["--task", "embed", "--enable-reasoning"], ["give --convert embed", "leave it out"]),
    ("vllm", ["VLLM_ATTENTION_BACKEND=FLASHINFER"], ["give --attention-backend FLASHINFER"]),
    ("sglang", ["--cuda-graph-bs", "1", "2"], ["give --cuda-graph-bs-decode 1 2"]),
    ("sglang", ["--cuda-graph-max-bs", "8"], ["give --cuda-graph-max-bs-decode 8"]),
    ("sglang", ["--speculative-draft", "x/y"], ["give --speculative-draft-model-path x/y"]),
    ("sglang", ["--enable-deepep-moe"], ["give --moe-a2a-backend deepep"]),
    ("sglang", ["--disable-piecewise-cuda-graph"], ["give --cuda-graph-backend-prefill disabled"]),
]


@pytest.mark.parametrize(("engine", "words", "remedies"), GONE)
def test_a_flag_of_an_older_release_keeps_its_meaning(engine, words, remedies):
    """The fix has its value, and all removed flags of a line are named at once."""
    variables = [word for word in words if word.startswith("VLLM_")]
    found = problems(engine, *variables, *FRONT[engine], *(word for word in words if word not in variables))
    pairs = zip((each.remedy for each in found if each.path), remedies, strict=True)
    assert all(given.startswith(wanted) for given, wanted in pairs)


def test_the_age_of_a_line_says_what_that_release_does_otherwise():
    """The oldest of its flags decides."""
    *_, age = problems("vllm", "m", "--cuda-graph-sizes", "8", "--use-v2-block-manager")
    assert age.message.startswith(
        "the line is for release 0.9.2 or older; by default 0.9.2 differs: the mode is PIECEWISE"
    )
