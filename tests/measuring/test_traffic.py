"""Traffic: what is logged of steps is read as those steps, whatever stands around the lines."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.engines import logs as engine_logs
from capture_planner.engines.logs import read_traffic
from capture_planner.errors import InvalidDocument
from capture_planner.measuring.traffic import SourceOptions, fitting
from capture_planner.measuring.traffic import lines as lines_module
from capture_planner.measuring.traffic import source as sources
from capture_planner.records.traffic import Traffic
from support import log_lines
from support.examples import at_most
from support.log_steps import batches_of, batches_of_iterations, read_batches
from support.traffic_shapes import file_of, shapes

RECORDED = json.loads((Path(__file__).parent / "data" / "log_lines.json").read_text("utf-8"))
LINE_FORMATS = [each for engine in engine_logs.log_formats() for each in engine.lines]
ALL = SourceOptions(decode_log_interval=1)

VLLM = "(APIServer pid=4242) INFO 11-22 05:51:30 [loggers.py:200] "
PREFIXES = (
    "",
    VLLM,
    "\x1b[0;36m(APIServer pid=4)\x1b[0;0m \x1b[32mINFO\x1b[0m \x1b[90m11-22 05:51:30\x1b[0m [loggers.py:2] ",
    "[2026-11-22 05:51:30 DP0 TP0] ",
    "[TRT-LLM] [I] [_torch][RANK 0] ",
    "2026-11-22T05:51:30.123456Z stdout F ",
    '{"levelname": "INFO", "message": "',
)
NOISE = (
    'INFO:     127.0.0.1:5432 - "POST /v1/completions HTTP/1.1" 200 OK',
    "",
    "Engine 000: Avg prompt throughput: 5.0 tokens/s, Running: 12 reqs",
    "{'a': 1}",
    "12 | 16",
    '{"message": "ready"}',
    "é ü 漢字",
)


@st.composite
def iterations(draw):
    """One step as context and generation, each with requests and tokens."""
    prompts = draw(st.integers(0, 3))
    decoding = draw(st.integers(0 if prompts else 1, 300))
    return (
        (prompts, sum(draw(st.lists(st.integers(1, 999), min_size=prompts, max_size=prompts)))),
        (decoding, decoding * draw(st.integers(1, 4)) + draw(st.sampled_from((0, 0, decoding and 1)))),
    )


@st.composite
def logs(draw, lines):
    """Return lines among noise, each with a prefix, in any order, with any ends."""
    decorated = [draw(st.sampled_from(PREFIXES)) + line for line in lines]
    decorated += draw(st.lists(st.sampled_from(NOISE), max_size=8))
    text = draw(st.permutations(decorated))
    return text, draw(st.sampled_from(("\n", "\r\n")))


FORMATS = {
    "vllm": lambda index, step: log_lines.vllm_iteration(index % 2, index, *step),
    "tensorrt_llm": lambda index, step: log_lines.tensorrt_llm(index, *step, newer=index % 2 == 0),
}


@pytest.mark.parametrize("engine", FORMATS)
@at_most(40)
@given(data=st.data())
def test_steps_are_read_back_from_lines(engine, tmp_path_factory, data):
    """Any prefix, noise, order, line ends and boundaries between blocks; compressed or not."""
    steps = data.draw(st.lists(iterations(), min_size=1, max_size=12))
    lines = [FORMATS[engine](index, step) for index, step in enumerate(steps)]
    text, ends = data.draw(logs(lines))
    folder = tmp_path_factory.mktemp("logs")
    path = file_of(folder, text, ends=ends)
    zipped = folder / "b.gz"
    zipped.write_bytes(gzip.compress(Path(path).read_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", data.draw(st.sampled_from((700, 1001, 1 << 22))))
        traffic, unreadable = read_traffic([path])
        assert shapes(read_traffic([str(zipped)])[0]) == shapes(traffic)
        assert shapes(read_traffic([path, path])[0]) == shapes(traffic) + shapes(traffic)
    assert shapes(traffic) == batches_of_iterations(steps)
    assert (traffic.skipped, unreadable) == (0, ())


@at_most(40)
@given(
    prefills=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 999), st.integers(0, 9)), max_size=6),
    decodes=st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=9),
    interval=st.integers(1, 40),
    data=st.data(),
)
def test_sglang_lines_are_read_back(prefills, decodes, interval, data, tmp_path_factory):
    """Decodes count once for each of an interval; under speculation their tokens are not known."""
    accept = "accept len: 2.40, accept rate: 0.47, "
    lines = [log_lines.sglang_prefill(*each) for each in prefills]
    lines += [log_lines.sglang_decode(reqs, accept if drafts else "") for reqs, drafts in decodes]
    text, ends = data.draw(logs(lines))
    path = file_of(tmp_path_factory.mktemp("logs"), text, ends=ends)
    expected = Counter({(seqs, tokens + again, None): 0 for seqs, tokens, again in prefills})
    for seqs, tokens, again in prefills:
        expected[seqs, tokens + again, None] += 1
    known, filled = Counter(expected), Counter(expected)
    for reqs, drafts in decodes:
        known[(reqs, None, None) if drafts else (reqs, reqs, 1)] += interval
        filled[(reqs, 4 * reqs, 4) if drafts else (reqs, reqs, 1)] += interval
    assert shapes(read_traffic([path], SourceOptions(decode_log_interval=interval))[0]) == known
    assert shapes(read_traffic([path], SourceOptions(decode_log_interval=interval, query_len=4))[0]) == filled


@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 99), st.integers(100, 128), st.sampled_from(("NONE", "PIECEWISE", "FULL")), st.integers(1, 9)
        ),
        min_size=1,
        max_size=6,
    ),
    prefix=st.sampled_from(PREFIXES[:3]),
)
def test_graph_tables_add_up(rows, prefix, tmp_path_factory):
    """A table is written every few seconds, and counts anew; a FULL graph of a separate mode serves decodes."""
    text = [prefix + line for _ in range(2) for line in log_lines.vllm_graph_table(rows)]
    traffic, _ = read_traffic([file_of(tmp_path_factory.mktemp("logs"), text, ends="\r\n")])
    expected = Counter()
    for tokens, _, mode, count in rows:
        expected[tokens, True if mode == "FULL" else None] += 2 * count
    assert Counter({(b.num_tokens, b.past_prompt): b.count for b in traffic.batches}) == expected
    assert {batch.num_reqs for batch in traffic.batches} == {None}


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 99), st.integers(0, 64)), min_size=1, max_size=9))
def test_forward_passes_are_read_back(steps, tmp_path_factory):
    """A decode's tokens are not in them; with a query length they follow."""
    steps = [(prompts, prompts * tokens, decodes or 1) for prompts, tokens, decodes in steps]
    path = file_of(tmp_path_factory.mktemp("logs"), [log_lines.forward_pass(*step) for step in steps])
    reqs = Counter(prompts + decodes for prompts, _, decodes in steps)
    counted = Counter()
    for batch in read_traffic([path])[0].batches:
        counted[batch.num_reqs] += batch.count
    assert counted == reqs
    expected = Counter(
        (prompts + decodes, tokens + 2 * decodes, None if prompts else 2) for prompts, tokens, decodes in steps
    )
    assert shapes(read_traffic([path], SourceOptions(query_len=2))[0]) == expected


class TestRecordedLines:
    """Lines that the engines' own functions wrote (``tests/engines/oracle/record_log_lines.py``)."""

    @pytest.fixture
    def read(self, tmp_path):
        def read(name, options=ALL):
            path = tmp_path / f"{name}.log"
            path.write_bytes(RECORDED[name]["text"].encode())
            return read_traffic([str(path)], options)[0]

        return read

    @pytest.mark.parametrize("name", ["vllm_iterations", "vllm_iterations_colored"])
    def test_vllm_iterations(self, read, name):
        """With and without colours; the dummy step of an idle rank is apart."""
        traffic = read(name)
        assert read_batches(name, traffic) == batches_of(name, RECORDED[name]["steps"])
        assert traffic.skipped == 0
        assert "1 dummy steps of idle data-parallel ranks are not counted" in traffic.notes

    @pytest.mark.parametrize("name", ["vllm_graph_tables", "sglang", "forward_passes"])
    def test_other_formats(self, read, name):
        """Every step of both tables; plain, hybrid and speculative lines; the requests of each pass."""
        assert read_batches(name, read(name)) == batches_of(name, RECORDED[name]["steps"])

    def test_lines_of_the_tests_are_those_of_vllm(self):
        """What the tests above write is what the engine writes."""
        recorded = RECORDED["vllm_iterations"]
        for step, line in zip(recorded["steps"], recorded["text"].splitlines(), strict=True):
            encoder = ", encoder inputs: 2, encoder output embeddings: 2392" if step["num_encoder_inputs"] else ""
            written = log_lines.vllm_iteration(
                step["engine"],
                step["iteration_index"],
                (step["num_ctx_requests"], step["num_ctx_tokens"]),
                (step["num_generation_requests"], step["num_generation_tokens"]),
                step["elapsed_ms"],
                step["is_dummy"],
                encoder,
            )
            assert line.endswith(written)

    def test_lines_of_the_tests_are_those_of_sglang(self):
        """All but the throughput, which is of the clock."""
        recorded = RECORDED["sglang"]
        for step, line in zip(recorded["steps"], recorded["text"].splitlines(), strict=True):
            if step["hybrid"]:
                assert "mamba usage: 0.20" in line
            elif "prefill" in step:
                written = log_lines.sglang_prefill(*step["prefill"])
                assert written.split("input throughput")[0] in line
            else:
                accept = "accept len: 2.40, accept rate: 0.47, " if step["decode"][1] else ""
                assert log_lines.sglang_decode(step["decode"][0], accept).split("gen throughput")[0] in line

    def test_tables_of_the_tests_are_those_of_vllm(self):
        """One table of those that were recorded, cell by cell."""
        steps = Counter(map(tuple, RECORDED["vllm_graph_tables"]["steps"][:60]))
        rows = [(*step, count) for step, count in sorted(steps.items(), key=lambda item: -item[1])]
        recorded = [line.split("] ", 1)[1] for line in RECORDED["vllm_graph_tables"]["text"].split("\r\n")]
        assert {line.rstrip() for line in log_lines.vllm_graph_table(rows)} <= {line.rstrip() for line in recorded}


def test_one_log_counts_the_same_steps_once(tmp_path):
    """Iteration lines say more than the table of graphs, which shows the same steps."""
    lines = [log_lines.vllm_iteration(0, 1, (0, 0), (12, 48))]
    lines += log_lines.vllm_graph_table([(48, 48, "FULL", 1)])
    traffic, _ = read_traffic([file_of(tmp_path, lines)])
    assert shapes(traffic) == {(12, 48, 4): 1}
    assert any("vLLM CUDA-graph tables show the same steps" in note for note in traffic.notes)


@pytest.mark.parametrize(
    "line",
    [
        b"Engine 000: Iteration(41): 1 context requests, 512 con",
        b"Engine 000: Iteration(41): 1 context requ\xff\xfeests, 512 context tokens",
        b"Decode batch, #running-req: 12, #token: 34",
        b"iter = 3, global_rank = 0, rank = 0, currank_total_requests = 0/12, host_",
        b"noise \xff\xfe",
        b'{"scheduled_requests": {"num_prefill_requests": 0, "sum_pr',
    ],
)
def test_a_broken_line_is_counted_and_shown(tmp_path, line):
    """With its file and line, and nothing else is lost."""
    good = log_lines.vllm_iteration(0, 1, (0, 0), (12, 48)).encode()
    path = tmp_path / "a.log"
    path.write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    traffic, unreadable = read_traffic([str(path)])
    assert shapes(traffic) == {(12, 48, 4): 2}
    assert traffic.skipped == 1
    assert unreadable[0].startswith(f"{path}:2: ")


ODD = ("-1", "", "1.5", "1e999", "NaN", "0x10", "\u0663", "9" * 9, "9" * 19, "9" * 400, "9" * 5000)


@pytest.mark.parametrize("line_format", [each for each in LINE_FORMATS if each.detail], ids=lambda each: each.name)
def test_an_odd_number_costs_its_line_alone(tmp_path, line_format):
    """Whichever number of a line it stands for; what no batch has is not read as one, and traffic fits its file."""
    line = line_format.example
    numbers = list(re.finditer(r"\d+", line))
    lines = [line[: at.start()] + odd + line[at.end() :] for at in numbers for odd in ODD]
    whole = read_traffic([file_of(tmp_path, [line])], ALL)[0]
    traffic = read_traffic([file_of(tmp_path, [line, *lines])], ALL)[0]
    assert set(shapes(whole)) <= set(shapes(traffic))
    assert traffic.skipped >= len(ODD)
    assert codec.loads(codec.dumps(fitting(traffic)), Traffic) == fitting(traffic)


def test_members_of_gzip_are_one_log(tmp_path):
    """However many they are, and however little each has."""
    line = log_lines.vllm_iteration(0, 1, (0, 0), (12, 12)).encode() + b"\n"
    path = tmp_path / "a.gz"
    path.write_bytes(b"".join(gzip.compress(line[at : at + 1]) + gzip.compress(b"") for at in range(len(line))) * 20)
    assert shapes(read_traffic([str(path)])[0]) == {(12, 12, 1): 20}


@pytest.mark.parametrize("kind", ["iterations", "tables"])
def test_shapes_without_prompts_are_bounded_too(tmp_path, kind, monkeypatch):
    """Decodes whose requests differ are rounded up and still differ; rows of a table are one for each size."""
    # Nine shapes in each of up to fifty blocks of time are 450.
    monkeypatch.setattr(lines_module, "MAX_SHAPES", 1 << (8 if kind == "iterations" else 9))
    if kind == "iterations":
        text = [log_lines.vllm_iteration(0, 1, (0, 0), (20, 700 + index)) for index in range(2000)]
    else:
        text = log_lines.vllm_graph_table([(index % 9 + 1, 16, "FULL", index + 1) for index in range(2000)])
    traffic = read_traffic([file_of(tmp_path, text)])[0]
    if kind == "tables":
        assert shapes(traffic).keys() == {(None, tokens, None) for tokens in range(1, 10)}
        assert traffic.steps == 2000 * 2001 // 2
    else:
        assert (traffic.steps, len(traffic.batches) <= 300) == (2000, True)
        even = {batch.num_tokens: batch.count for batch in traffic.batches if batch.query_len is not None}
        assert even == dict.fromkeys(range(700, 2700, 20), 1)


def test_two_processes_in_one_line(tmp_path):
    """What can be read of an interleaved line counts, and the line is shown."""
    first, second = (log_lines.vllm_iteration(rank, 1, (0, 0), (12, 12)) for rank in (0, 1))
    traffic, unreadable = read_traffic([file_of(tmp_path, [first[:40] + second])])
    assert (shapes(traffic), traffic.skipped, len(unreadable)) == ({(12, 12, 1): 1}, 1, 1)


def test_time_is_from_the_first_line_to_the_last(tmp_path):
    """By the clock of the lines where they have one, and else by the time of the steps of the busiest engine."""
    line = log_lines.vllm_iteration(0, 1, (0, 0), (1, 1))
    clocks = [VLLM, VLLM.replace("05:51:30", "06:52:31"), VLLM.replace("05:51:30", "05:55:30")]
    assert read_traffic([file_of(tmp_path, [clock + line for clock in clocks])])[0].seconds == 3661
    other = log_lines.vllm_iteration(1, 1, (0, 0), (1, 1), 5)
    assert read_traffic([file_of(tmp_path, [line, line, other])])[0].seconds == 0.01962


@pytest.mark.parametrize("text", [b"", b"\n\n", b"nothing of it\n", b"{}\n", b"\x00\xff\xfe"])
def test_an_unknown_format_lists_what_is_known(tmp_path, text):
    """Each format with a line that would match."""
    path = tmp_path / "a"
    path.write_bytes(text)
    with pytest.raises(InvalidDocument) as raised:
        read_traffic([str(path)])
    assert all(each.example in str(raised.value) for each in LINE_FORMATS if each.detail)


@pytest.mark.parametrize("line_format", [each for each in LINE_FORMATS if each.detail], ids=lambda each: each.name)
def test_the_example_of_a_format_is_of_it(line_format):
    """What an error shows would have been read."""
    assert line_format.find(line_format.example.encode())


@pytest.mark.parametrize(("rates", "accepted"), [("0.800, 0.500", (80, 50)), ("1.800, 0.500", (100, 50))])
def test_acceptance_is_read_from_vllm(tmp_path, rates, accepted):
    """Rates by position, and as many drafts at each position; no rate is above 1, whatever the line says."""
    lines = [
        log_lines.vllm_iteration(0, 1, (0, 0), (12, 36)),
        "SpecDecoding metrics: Mean acceptance length: 2.30, Accepted throughput: 1.00 tokens/s, Drafted throughput: "
        f"2.00 tokens/s, Accepted: 130 tokens, Drafted: 200 tokens, Per-position acceptance rate: {rates}, Avg "
        "Draft acceptance rate: 65.0%",
    ]
    traffic = read_traffic([file_of(tmp_path, lines)])[0]
    assert (traffic.drafted, traffic.accepted) == ((100, 100), accepted)


def test_log_of_an_engine_that_is_not_installed_says_what_to_install(monkeypatch, tmp_path):
    """Another engine's distribution cannot read it."""
    monkeypatch.setattr(engine_logs, "engines", dict)
    path = file_of(tmp_path, ["[2026-11-22 13:51:30] Decode batch, #running-req: 12, #token: 3456\n"])
    with pytest.raises(InvalidDocument, match=r"no batches in a known format.*pip install engines/NAME"):
        read_traffic([path])
