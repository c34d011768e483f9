"""The order of traffic, what it rests on, and sources as they lie on disks: cut short, in UTF-16, of two engines."""

import gzip
import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.analysis.arrivals import MOST_BLOCKS, Pace, simulate
from capture_planner.engines.logs import read_sources, read_traffic
from capture_planner.errors import InvalidDocument
from capture_planner.measuring.traffic import SourceOptions, TraceLimits, fitting, lines
from capture_planner.measuring.traffic.reading import NO_PROMPTS
from capture_planner.modes import Role
from capture_planner.planning.measured.steps import steps_of
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits
from capture_planner.records.traffic import Traffic
from support import log_lines
from support.examples import at_most
from support.traffic_shapes import file_of, shapes

LIMITS = TraceLimits(limits=Limits(max_num_reqs=512, max_num_tokens=8192))


def by_shape(blocks):
    """Return the steps of blocks by shape."""
    return sum((Counter({each.shape: each.count}) for block in blocks for each in block), Counter())


@at_most(30)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300)), min_size=1, max_size=300),
    engine=st.sampled_from(("vllm", "tensorrt_llm", "sglang")),
)
def test_blocks_of_a_log_are_its_steps_in_order(steps, engine, tmp_path_factory):
    """The first block has the first lines, the last one the last, and all together each step once."""
    write = {
        "vllm": lambda index, prompts, reqs: log_lines.vllm_iteration(0, index, (prompts, 9 * prompts), (reqs, reqs)),
        "tensorrt_llm": lambda index, prompts, reqs: log_lines.tensorrt_llm(
            index, (prompts, 9 * prompts), (reqs, reqs), newer=True
        ),
        "sglang": lambda index, prompts, reqs: (
            log_lines.sglang_prefill(prompts, 9 * prompts, 0) if prompts else log_lines.sglang_decode(reqs, "")
        ),
    }[engine]
    path = file_of(tmp_path_factory.mktemp("logs"), [write(index, *step) for index, step in enumerate(steps)])
    found = read_sources([path], SourceOptions(decode_log_interval=1))
    assert by_shape(found.blocks) == Counter({each.shape: each.count for each in found.traffic.batches})
    assert len(found.blocks) <= MOST_BLOCKS
    at = 0
    for block in found.blocks:
        count = sum(each.count for each in block)
        whole = file_of(
            tmp_path_factory.mktemp("part"), [write(index, *steps[index]) for index in range(at, at + count)]
        )
        assert shapes(read_traffic([whole], SourceOptions(decode_log_interval=1))[0]) == shapes(
            Traffic(sources=(), batches=block)
        )
        at += count
    assert at == len(steps)


def test_blocks_of_a_long_log_are_many_and_bounded(tmp_path, monkeypatch):
    """Where shapes are too many, those with prompts are rounded up in blocks; steps and decodes stay exact."""
    monkeypatch.setattr(lines, "MAX_SHAPES", 1 << 10)
    draw = random.Random(0)
    text = [
        log_lines.vllm_iteration(0, index, (1, draw.randint(1, 8000)) if index % 2 else (0, 0), (index % 7 + 1,) * 2)
        for index in range(6000)
    ]
    found = read_sources([file_of(tmp_path, text)])
    assert MOST_BLOCKS // 2 <= len(found.blocks) <= MOST_BLOCKS
    assert sum(map(len, found.blocks)) <= 1 << 10
    counts = [sum(each.count for each in block) for block in found.blocks]
    assert sum(counts) == 6000
    assert max(counts[:-1]) < 1.5 * min(counts[:-1])
    decodes = by_shape([[each for each in block if each.past_prompt] for block in found.blocks])
    assert decodes == Counter({each.shape: each.count for each in found.traffic.batches if each.past_prompt})


def test_ranks_that_show_the_same_steps_are_counted_once_in_each_block(tmp_path):
    """Even where a block ends between the lines of two ranks."""
    text = [
        log_lines.tensorrt_llm(index, (0, 0), (index % 9 + 1,) * 2, newer=True).replace("rank = 0", f"rank = {rank}")
        for index in range(200)
        for rank in (0, 1)
    ]
    found = read_sources([file_of(tmp_path, text)])
    assert found.traffic.steps == 200
    assert by_shape(found.blocks) == Counter({each.shape: each.count for each in found.traffic.batches})


def test_lines_are_what_steps_rest_on(tmp_path):
    """Of SGLang one decode in forty is a line; a file keeps the number, and steps within limits their share of it."""
    text = [log_lines.sglang_decode(index % 4 + 1, "") for index in range(90)]
    found = read_traffic([file_of(tmp_path, text)])[0]
    assert (found.steps, found.lines) == (3600, 90)
    assert steps_of(found, LIMITS).lines == 90
    half = TraceLimits(limits=Limits(max_num_reqs=2, max_num_tokens=64))
    assert steps_of(found, half).lines == round(90 * steps_of(found, half).total / 3600)
    path = tmp_path / "a.yaml"
    path.write_text(codec.dumps(fitting(found)))
    assert read_traffic([str(path)])[0].lines == 90
    assert read_traffic([str(path), file_of(tmp_path, text)])[0].lines == 180
    every = read_traffic([file_of(tmp_path, text)], SourceOptions(decode_log_interval=1))[0]
    assert every.lines is None
    assert steps_of(every, LIMITS).lines == 90


def test_traffic_without_prompts_says_so(tmp_path):
    """A log of decodes alone, until another has prompts."""
    decodes = file_of(tmp_path, [log_lines.sglang_decode(3, "")], "a.log")
    prompts = file_of(tmp_path, [log_lines.sglang_prefill(1, 9, 0)], "b.log")
    alone, both = (read_traffic(paths)[0] for paths in ([decodes], [decodes, prompts]))
    assert (alone.has_prompts, steps_of(alone, LIMITS).has_prompts, NO_PROMPTS in alone.notes) == (False, False, True)
    assert (both.has_prompts, steps_of(both, LIMITS).has_prompts, NO_PROMPTS in both.notes) == (True, True, False)
    path = tmp_path / "a.yaml"
    path.write_text(codec.dumps(alone))
    assert NO_PROMPTS not in read_traffic([str(path), prompts])[0].notes


def test_traffic_without_an_order_has_no_blocks(tmp_path):
    """A traffic file, alone or next to a log."""
    log = file_of(tmp_path, [log_lines.vllm_iteration(0, 1, (0, 0), (1, 1))])
    path = tmp_path / "a.yaml"
    path.write_text(codec.dumps(read_traffic([log])[0]))
    assert read_sources([str(path)]).blocks == ()
    assert read_sources([str(path), log]).blocks == ()
    assert len(read_sources([log, log]).blocks) == 2


@at_most(30)
@given(cut=st.integers(0, 400), members=st.integers(1, 3), padded=st.booleans())
def test_a_compressed_log_that_is_cut_short_is_read_as_far_as_it_goes(cut, members, padded, tmp_path_factory):
    """Cut anywhere, with members and padding before: what zlib gives of it, with a note."""
    draw = random.Random(1)
    parts = [
        "".join(log_lines.vllm_iteration(0, i, (0, 0), (draw.randint(1, 200),) * 2) + "\n" for i in range(400))
        for _ in range(members)
    ]
    data = (b"\0" * 7 * padded).join(gzip.compress(part.encode()) for part in parts)
    path = tmp_path_factory.mktemp("logs") / "a.log.gz"
    path.write_bytes(data)
    whole = read_traffic([str(path)])[0]
    assert whole.steps == 400 * members
    assert not any("cut short" in note for note in whole.notes)
    path.write_bytes(data[: -cut - 1])
    found = read_traffic([str(path)])[0]
    assert any("cut short" in note for note in found.notes)
    assert 400 * members - 400 < found.steps <= whole.steps
    assert not shapes(found) - shapes(whole)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("compressed", [False, True])
def test_utf_16_is_read(encoding, compressed, tmp_path):
    """As PowerShell writes what it redirects: a log, and a trace."""
    log = "".join(log_lines.vllm_iteration(0, index, (0, 0), (7, 7)) + " é\r\n" for index in range(50))
    for text, steps in ((log, 50), ("t,in_len,out_len\r\n0,5,5\r\n", 5)):
        data = ("\ufeff" + text).encode(encoding)
        path = tmp_path / "a"
        path.write_bytes(gzip.compress(data) if compressed else data)
        found, unreadable = read_traffic([str(path)])
        assert (found.steps, found.skipped, unreadable) == (steps, 0, ())


def test_two_engines_in_one_log_are_weighed(tmp_path):
    """Each step counts alike, whatever a line stands for."""
    text = [log_lines.vllm_iteration(0, 1, (0, 0), (7, 7))] * 30 + [log_lines.sglang_decode(3, "")] * 3
    notes = read_traffic([file_of(tmp_path, text)])[0].notes
    assert (
        "steps of each: SGLang decode lines 120 (80.0%), vLLM iteration lines 30 (20.0%); each step counts alike"
        in (notes)
    )


def test_binary_files_are_refused_in_a_few_words(tmp_path):
    """No bytes of it are shown."""
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(256)) * 2000)
    with pytest.raises(InvalidDocument) as raised:
        read_traffic([str(path)])
    message = raised.value.problems[0].message
    assert message == "no batches in a known format; it is binary, not text"


BURST_GPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,3.5,ChatGPT,47,18,65,Conversation log
45,,2.5,ChatGPT,17,0,17,Conversation log
5000000,,0.0,GPT-4,0,0,0,API log
5000001,b,1,GPT-4,31,1,32,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 47, "output_length": 18, "hash_ids": [0, 1]}
{"timestamp": 27482, "input_length": 31, "output_length": 1, "hash_ids": []}
"""


@pytest.mark.parametrize("text", [BURST_GPT, MOONCAKE, MOONCAKE.replace("27482", "1763849490000")])
def test_public_traces_are_read(text, tmp_path):
    """Requests that failed are left out, and said; milliseconds are that, since the start or since 1970."""
    text = text.replace('"timestamp": 0', '"timestamp": 1763849480000') if "1763849490000" in text else text
    path = tmp_path / "trace"
    path.write_text(text)
    found = read_traffic([str(path)])[0]
    assert shapes(found) == {(1, 47, None): 1, (1, 1, 1): 17, (1, 31, None): 1}
    assert any("2 requests that failed are left out" in note for note in found.notes) is (text == BURST_GPT)
    if "1763849490000" in text:
        assert found.seconds == pytest.approx(10, abs=1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "expected timestamp, a number from 0, got '-1'"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "expected a whole number from 1"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "expected input_length, a number from 0"),
        ('{"timestamp": 1, "input_length": 1}', "expected output_length, a number from 0, got 'null'"),
        ("[1]", "expected timestamp"),
        ('{"timestamp": 1, "inp', "expected timestamp"),
        ('{"timestamp": 1e999, "input_length": 1, "output_length": 1}', "expected timestamp"),
        ('{"timestamp": 1e14, "input_length": 1, "output_length": 1}', "later than"),
    ],
)
def test_wrong_lines_of_a_trace_are_named(line, says, tmp_path):
    """With their line."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{MOONCAKE}\n{line}\n")
    with pytest.raises(InvalidDocument) as raised:
        read_traffic([str(path)])
    assert [(problem.line, says in problem.message) for problem in raised.value.problems] == [(4, True)]


def test_a_request_is_a_line_whatever_its_text(tmp_path):
    """JSON may have the separators of lines and paragraphs in a string as they are."""
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE.replace("{", '{"note": "one\u2028two\u0085", ', 1), "utf-8")
    (tmp_path / "plain.jsonl").write_text(MOONCAKE, "utf-8")
    assert shapes(read_traffic([str(path)])[0]) == shapes(read_traffic([str(tmp_path / "plain.jsonl")])[0])


def test_traces_run_at_the_given_pace_with_accepted_drafts(tmp_path):
    """The time of each batch is asked for, acceptance goes into traffic, and what is assumed is said."""
    draw = random.Random(2)
    path = tmp_path / "trace.csv"
    rows = [(draw.uniform(0, 9), draw.randint(1, 400), draw.randint(1, 90)) for _ in range(80)]
    path.write_text("t,in_len,out_len\n" + "".join(f"{at:.4f},{prompt},{output}\n" for at, prompt, output in rows))
    drafts = Speculative(method=Method.EAGLE3, num_tokens=3)
    deployment = TraceLimits(limits=Limits(max_num_reqs=32, max_num_tokens=512), speculative=drafts)
    pace = Pace(lambda batch: 2 + batch.num_tokens / 64, "each step takes what is drawn")
    options = SourceOptions(deployment=deployment, pace=pace, acceptance=(0.75, 0.5, 0.25))
    found = read_sources([str(path)], options)
    (trace,) = found.traces
    again = simulate(
        trace.arrivals, deployment.limits, drafts, pace.step_time, acceptance=options.acceptance, window=trace.window
    )
    target = {each.shape: each.count for each in found.traffic.batches if each.role is Role.TARGET}
    assert sum(target.values()) == again.counts.total() == sum(each.count for block in found.blocks for each in block)
    assert [accepted / drafted for accepted, drafted in zip(found.traffic.accepted, found.traffic.drafted, strict=True)]
    assert any(
        "each step takes what is drawn, and a decode gets 1.50 drafts accepted" in n for n in found.traffic.notes
    )
    none = read_traffic([str(path)], SourceOptions(deployment=deployment))[0]
    assert any("no draft is accepted, because nothing says how many are" in note for note in none.notes)
    assert none.drafted == ()
    slow = read_traffic([str(path)], SourceOptions(deployment=deployment, pace=Pace.constant(2000)))[0]
    assert any("more arrive than such steps serve" in note for note in slow.notes)


@pytest.mark.parametrize("start", [0, 4, 20_000])
def test_a_later_part_of_a_trace_begins_with_what_runs(start, tmp_path):
    """A request that decodes over the boundary is in both parts, each of its steps once; a slice is a trace."""
    path = tmp_path / "trace.csv"
    path.write_text(f"t,in_len,out_len\n{start},10,100\n{start + 1.5},20,1\n{start + 3},30,1\n")
    whole, *parts = (
        read_traffic([str(path)], SourceOptions(part=part))[0] for part in ((0, 1), (0, 2 / 3), (2 / 3, 1))
    )
    assert shapes(whole) == shapes(parts[0]) + shapes(parts[1])
    assert shapes(parts[0])[1, 1, 1] == 98
    assert shapes(parts[1]) == {(1, 30, None): 1}
    assert json.loads(json.dumps(whole.notes)) == list(whole.notes)
