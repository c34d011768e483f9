"""Fixes of ``check``: followed word for word, each removes its finding, and what costs graphs says how many."""

import random
import re
import shlex
from collections import Counter
from pathlib import Path
from tempfile import NamedTemporaryFile

import attrs
import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from capture_planner.analysis.lint import Severity
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import find_engine
from capture_planner.engines.check import NOTHING, ChangeTrials, check, fixed_together
from capture_planner.engines.engine import FlagChange
from capture_planner.errors import FlagError
from capture_planner.modes import Role
from capture_planner_tensorrt_llm.flags import read_flags
from capture_planner_tensorrt_llm.values import Problems
from engines.generators import sglang, tensorrt_llm, vllm

PRICED = re.compile(r"give (?P<words>.+) \((?P<price>(?:\d+ (?:more|fewer) graphs?, |as many graphs, )[^()]+)\)")
IN_FILE = re.compile(r"(?P<name>\w+): (?P<value>.+) in the file of --config")
H100 = find_environment("h100")
FEW = settings(max_examples=max(settings.default.max_examples // 2, 3))
ABOUT_A_MODEL = "EN007"
"""Its fix names a folder, which no word of the command line can stand for."""


def changes_in(fix):
    """Return the changes that a fix names, read from its words, each with its price."""
    found = []
    for part in fix.split("; or "):
        match = PRICED.fullmatch(part)
        assert match is not None, fix
        key = IN_FILE.fullmatch(match["words"])
        if key is not None:
            found.append((FlagChange(((key["name"], (key["value"],)),)), match["price"]))
            continue
        flags: list[tuple[str, tuple[str, ...]]] = []
        for word in shlex.split(match["words"]):
            if word.startswith("-"):
                flags.append((word, ()))
            elif word != "and":
                flags[-1] = (flags[-1][0], (*flags[-1][1], word))
        found.append((FlagChange(tuple(flags)), match["price"]))
    return found


def followed_by(engine, command, change):
    """Return the command line with a change; one of a file's key is made in a file, as a person would."""
    (name, values), *_ = change.flags
    if name.startswith("-"):
        return engine.fixes.applied(command, change)
    line = read_flags(command, Problems())
    options = {} if line.file is None else yaml.safe_load(Path(line.file).read_text()) or {}
    with NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        yaml.safe_dump({**options, name: yaml.safe_load(values[0])}, file)
    return [*command, "--config", file.name]


def follow(name, command, environment):
    """Follow every fix of a command line's findings; return how many were followed."""
    engine, followed = find_engine(name), 0
    before, trials = engine.emulate(command, environment), ChangeTrials(engine, environment)
    for each in check(before, engine, trials):
        if each.fix.startswith(NOTHING):
            assert each.severity is Severity.NOTE
            continue
        if each.rule.code == ABOUT_A_MODEL:
            continue
        for change, price in changes_in(each.fix):
            after = engine.emulate(followed_by(engine, command, change), environment)
            left = trials.unchanged(after).diagnoses(each.rule)
            assert [found for found in left if found.role is each.diagnosis.role] == [], each.fix
            assert f"{len(after.graphs) + sum(len(one.budgets) for one in after.encoders)}" in price
            followed += 1
    return followed


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    vllm.write_models(folder)
    return folder


@FEW
@given(seed=st.integers(0, 2**32))
def test_fix_of_vllm_followed_word_for_word_removes_its_finding(models, seed):
    """Random command lines of the oracle's generator, with every spelling, JSON, files and dotted parts."""
    case = next(vllm.cases(1, seed, wild=0))
    command = [f"{name}={value}" for name, value in case.variables] + case.command_in(models)
    environment = find_environment(case.environment)
    try:
        find_engine("vllm").emulate(command, environment)
    except FlagError:
        assume(False)
    follow("vllm", command, environment)


@FEW
@given(seed=st.integers(0, 2**32))
@example(seed=676509)  # full graphs of prefills have room for 8 requests, and nothing else has graphs
def test_fix_of_sglang_followed_word_for_word_removes_its_finding(seed, tmp_path_factory):
    case = sglang.case(random.Random(seed))
    command, environment = sglang.written(case, tmp_path_factory.mktemp("sglang")), case.environment
    try:
        before = find_engine("sglang").emulate(command, environment)
    except FlagError:
        assume(False)
    # With many adapters and long prompts there are a hundred thousand batches.
    assume(before.limits.max_num_tokens * (1 + (before.lora.max_active if before.lora else 0)) <= 10_000)
    follow("sglang", command, environment)


@FEW
@given(seed=st.integers(0, 2**32))
def test_fix_of_tensorrt_llm_followed_word_for_word_removes_its_finding(seed, tmp_path_factory):
    """Keys of its file are changed in a file."""
    case = next(tensorrt_llm.cases(seed))
    file = tmp_path_factory.mktemp("tensorrt_llm") / "options.yaml"
    file.write_text(yaml.safe_dump(case.config))
    command = [*case.flags, "--config", str(file)]
    try:
        find_engine("tensorrt-llm").emulate(command, H100)
    except FlagError:
        assume(False)
    follow("tensorrt-llm", command, H100)


SPECULATIVE = '{"method": "eagle3", "model": "x/y", "num_speculative_tokens": %d}'
LINES = {
    "largest-decodes": ("vllm", "--max-num-seqs 700"),
    "listed-sizes": ("vllm", "--max-num-seqs 64 --cudagraph-capture-sizes 1 2 4 8"),
    "sizes-in-json": ("vllm", """--max-num-seqs 64 -cc '{"cudagraph_capture_sizes": [1, 2, 8], "mode": 3}'"""),
    "three-drafts": ("vllm", f"--max-num-seqs 512 -sc '{SPECULATIVE % 3}'"),
    "sizes-beyond-tokens": (
        "vllm",
        "--max-num-batched-tokens 512 --max-num-seqs 256 --cudagraph-capture-sizes 256 1024",
    ),
    "encoder-of-none": ("vllm", "Qwen/Qwen3-8B -cc.cudagraph_mm_encoder=true"),
    "encoder-beyond-budgets": (
        "vllm",
        "Qwen/Qwen2.5-VL-7B-Instruct -cc.cudagraph_mm_encoder=true -cc.encoder_cudagraph_token_budgets=[512]",
    ),
    "requests-beyond-graphs": ("tensorrt-llm", "Qwen/Qwen3-8B --max_batch_size 300"),
    "wide-gaps": ("vllm", "--max-num-seqs 256 --cudagraph-capture-sizes 8 256"),
    "running-requests": ("sglang", "--model-path Qwen/Qwen3-8B --max-running-requests 600 --chunked-prefill-size 1024"),
    "few-decode-sizes": (
        "sglang",
        "--model-path Qwen/Qwen3-8B --max-running-requests 256 --cuda-graph-bs-decode 1 256 --chunked-prefill-size 512",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_fix_names_a_price_and_removes_its_finding(name):
    """Lines with one fault each: at least one fix can be followed."""
    engine, line = LINES[name]
    assert follow(engine, shlex.split(line), H100) >= 1


@pytest.mark.parametrize(
    "line",
    [
        "vllm --max-num-seqs 700",
        "sglang --model-path Qwen/Qwen3-8B --max-running-requests 600 --chunked-prefill-size 1024",
        "tensorrt-llm Qwen/Qwen3-8B --max_batch_size 300",
    ],
)
def test_cheaper_fix_of_uncovered_decodes_is_fewer_requests(line):
    """The fix names a larger maximum, with more graphs, or fewer requests, with no more graphs than now."""
    name, *command = shlex.split(line)
    engine = find_engine(name)
    before = engine.emulate(command, H100)
    fix = next(each.fix for each in check(before, engine, ChangeTrials(engine, H100)) if each.rule.code == "EN001")
    (_, dear), (change, cheap) = changes_in(fix)
    assert "more graphs" in dear
    assert "more graphs" not in cheap
    assert change.flags[0][0] == engine.limits[0]


@pytest.mark.parametrize(
    "line",
    [
        "vllm --max-num-seqs 700 --cudagraph-capture-sizes 8 512",
        """vllm --max-num-seqs 600 --speculative-config '{"method":"ngram","num_speculative_tokens":2}'""",
        "sglang --model-path Qwen/Qwen3-8B --max-running-requests 600 --cuda-graph-bs-decode 1 "
        "--chunked-prefill-size 512",
    ],
)
def test_fixes_alone_and_together_emulate_each_command_line_once(line):
    name, *command = shlex.split(line)
    emulated = Counter()

    def counting(words, machine):
        found = engine.emulate(words, machine)
        emulated[tuple(words)] += 1
        return found

    engine = find_engine(name)
    counted = attrs.evolve(engine, emulate=counting)
    before, trials = counted.emulate(command, H100), ChangeTrials(counted, H100)
    fixed_together(before, check(before, counted, trials), trials)
    assert len(emulated) > 1
    assert set(emulated.values()) == {1}


def test_a_drafter_gets_graphs_by_a_size_of_the_target():
    """Each of its own decodes has a size, but vLLM captures nothing while the target has no graph."""
    drafts = """--speculative-config '{"method":"eagle3","model":"org/drafter","num_speculative_tokens":3}'"""
    sizes = "--cudagraph-capture-sizes 1 2 --compilation-config.cudagraph_mode FULL_DECODE_ONLY"
    engine = find_engine("vllm")
    before = engine.emulate(shlex.split(f"Qwen/Qwen3-8B --max-num-seqs 2 {sizes} {drafts}"), H100)
    found = check(before, engine, ChangeTrials(engine, H100))
    (each,) = [each for each in found if each.diagnosis.role is Role.DRAFT_DECODE]
    assert each.severity is Severity.WARNING
    ((change, _),) = changes_in(each.fix)
    assert dict(change.flags)["--cudagraph-capture-sizes"] == ("1", "2", "4")


@pytest.mark.parametrize("code", ["EN001", "EN004"])
def test_fixes_together_leave_what_is_not_given(code):
    """A finding that is ignored, or that no load reaches, costs no graph and keeps no fix out."""
    drafts = """--speculative-config '{"method":"ngram","num_speculative_tokens":3}'"""
    command = shlex.split(f"--max-num-seqs 300 --cudagraph-capture-sizes 8 250 {drafts}")
    engine = find_engine("vllm")
    before, trials = engine.emulate(command, H100), ChangeTrials(engine, H100)
    given = [each for each in check(before, engine, trials) if each.rule.code != code]
    assert fixed_together(before, given, trials).left == (code,)


MACHINES = ("h100", "h200", "b200", "a100", "l40s")


@pytest.mark.parametrize("line", ["vllm --model Qwen/Qwen3-8B", "sglang --model-path Qwen/Qwen3-8B"])
@pytest.mark.parametrize("machine", MACHINES if settings.default.max_examples >= 100 else MACHINES[::4])
def test_sound_default_deployment_has_notes_alone(call, line, machine):
    """Nothing that a default deployment does by design is a warning; the exit code is 0."""
    assert call("check", "--engine", *line.split(), "--environment", machine).code == 0


MODEL = ("org/model",)
PIECES = {
    "vllm": {
        "--enforce-eager": [("--enforce-eager",), ("--enforce_eager",)],
        "--enable-lora": [("--enable-lora",), ("--no-enable-lora",)],
        "--headless": [("--headless",)],
        "--max-num-seqs": [("--max-num-seqs", "64"), ("--max_num_seqs=64",)],
        "--cudagraph-capture-sizes": [("--cudagraph-capture-sizes", "1", "2", "4")],
        "--tensor-parallel-size": [("-tp", "2"), ("-tp=2",), ("--tensor-parallel-size", "2")],
        "--compilation-config": [("-cc.cudagraph_mode=NONE",), ("--compilation-config", '{"cudagraph_mode": "NONE"}')],
    },
    "sglang": {
        "--disable-cuda-graph": [("--disable-cuda-graph",)],
        "--chunked-prefill-size": [("--chunked-prefill-size", "-1")],
        "--cuda-graph-bs": [("--cuda-graph-bs", "1", "2"), ("--cuda_graph_bs=1",)],
        "--model-path": [("--model-path", *MODEL), (f"--model-path={MODEL[0]}",)],
    },
}
"""Spellings of some flags with their values."""


@pytest.mark.parametrize("name", PIECES)
@given(data=st.data())
def test_command_without_some_flags_keeps_every_other_word(name, data):
    """A model stays where it stands, behind a switch or a value too."""
    pieces = PIECES[name]
    chosen = data.draw(st.permutations(sorted(pieces)))
    words = [(flag, data.draw(st.sampled_from(pieces[flag]))) for flag in chosen]
    if name == "vllm":
        # Behind a list, argparse takes the model for one of its values.
        places = [0, *(at + 1 for at, (flag, _) in enumerate(words) if flag != "--cudagraph-capture-sizes")]
        words.insert(data.draw(st.sampled_from(places)), ("", MODEL))
    dropped = data.draw(st.sets(st.sampled_from(sorted(pieces))))
    command = [word for _, piece in words for word in piece]
    kept = [word for flag, piece in words if flag not in dropped for word in piece]
    assert find_engine(name).fixes.without(command, dropped) == kept
