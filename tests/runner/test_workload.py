"""Where requests come from: generated and from traces; and which of them are admitted."""

import collections
import contextlib
import csv
import io
import itertools
import math
import re
import statistics
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.analysis import trace as trace_module
from capture_planner.errors import InvalidDocument, InvalidValue, RunError
from capture_planner_runner.serving.workload import Request, admit, from_trace, generated

TRAFFIC = Path(__file__).parents[2] / "plans" / "traffic"
HEADERS = [
    ["t", "timestamp", "arrival", "arrival_time"],
    ["in_len", "ContextTokens", "input_tokens", "input_length", "prompt_tokens"],
    ["out_len", "GeneratedTokens", "output_tokens", "output_length"],
]
ROWS = st.lists(st.tuples(st.floats(0, 1 << 20), st.integers(1, 50), st.integers(1, 1 << 20)), min_size=1, max_size=8)
EXTRA = st.text(st.sampled_from('a7", \n\t;é'), max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for the file that a test writes anew for each example."""
    return tmp_path_factory.mktemp("workload")


@st.composite
def traces(draw, rows=ROWS):
    """The text of a trace and its rows, however a program may write it."""
    rows = draw(rows)
    columns = [draw(st.sampled_from(names)) for names in HEADERS]
    columns = [draw(st.sampled_from([name, name.lower(), name.upper(), f" {name}"])) for name in columns]
    table = [columns, *([repr(row[0]) if isinstance(row[0], float) else row[0], *row[1:]] for row in rows)]
    for index in range(draw(st.integers(0, 2))):
        extra = [f"extra{index}", *(draw(EXTRA) for _ in rows)]
        table = [[*row, cell] for row, cell in zip(table, extra, strict=True)]
    order = draw(st.permutations(range(len(table[0]))))
    file = io.StringIO(newline="")
    quoting = draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]))
    writer = csv.writer(file, quoting=quoting, lineterminator=draw(st.sampled_from(["\n", "\r\n", "\n \n"])))
    writer.writerows([row[column] for column in order] for row in table)
    text = draw(st.sampled_from(["", "\ufeff"])) + file.getvalue()
    return text.rstrip("\r\n") if draw(st.booleans()) else text, rows


def lengths(requests):
    """What a trace says of requests."""
    return [(r.arrival, len(r.prompt), r.max_new_tokens) for r in requests]


def read(folder, text, **options):
    """Read a trace from its text."""
    path = folder / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return from_trace(path, **{"vocab_size": 9, "seed": 0} | options)


def problems(folder, text):
    """The problems of a trace."""
    with pytest.raises(InvalidDocument) as caught:
        read(folder, text)
    return caught.value.problems


@given(traces())
def test_a_trace_is_read_as_it_was_written(folder, trace):
    """Whatever the names, the order and the quotes; the first to arrive comes first."""
    requests = read(folder, trace[0])
    assert lengths(requests) == sorted(trace[1], key=lambda row: row[0])
    assert all(0 <= token < 9 for request in requests for token in request.prompt)


@given(st.lists(st.lists(EXTRA, min_size=2, max_size=4), min_size=1, max_size=5))
def test_cells_are_those_of_the_csv_module(rows):
    """Apart from blanks around them; and each begins where its place says."""
    csv.writer(file := io.StringIO(newline=""), lineterminator="\n").writerows(rows)
    table = list(trace_module._table(file.getvalue()))
    assert [[cell.text for cell in row] for row in table] == [[cell.strip() for cell in row] for row in rows]
    lines = file.getvalue().split("\n")
    for cell in (cell for row in table for cell in row if cell.text):
        there = "\n".join([lines[cell.line - 1][cell.column - 1 :], *lines[cell.line :]])
        assert there.lstrip(" \t\n").removeprefix('"').lstrip().replace('""', '"').startswith(cell.text)


@given(traces(), st.data())
def test_a_limit_keeps_the_first_and_speed_divides(folder, trace, data):
    """A limited workload is the beginning of the whole one, token for token."""
    whole = read(folder, trace[0])
    limit = data.draw(st.integers(1, len(whole) + 1))
    speed = data.draw(st.sampled_from([0.5, 2.0, 1e-6, float("inf")]))
    part = read(folder, trace[0], limit=limit, speed=speed)
    assert part == tuple(attrs.evolve(request, arrival=request.arrival / speed) for request in whole[:limit])


@given(traces())
def test_seeds_decide_the_tokens_and_nothing_else(folder, trace):
    """The same seed gives the same requests, another one other tokens."""
    one, same, other = (read(folder, trace[0], seed=seed, vocab_size=1 << 16) for seed in (7, 7, 8))
    assert one == same
    assert lengths(one) == lengths(other)
    assert [request.prompt for request in one] != [request.prompt for request in other]


MOMENTS = st.lists(st.integers(0, 10**15), min_size=1, max_size=5)


@given(MOMENTS, st.datetimes(datetime(2, 1, 1), datetime(9000, 1, 1)), st.integers(7, 9), st.data())
def test_dates_count_from_the_earliest(folder, moments, first, digits, data):
    """To the last digit, in whatever zone, if it is said."""
    first = first.replace(microsecond=0, tzinfo=UTC)
    moments = [moment // 10 ** (9 - digits) * 10 ** (9 - digits) for moment in moments]
    zoned = data.draw(st.booleans())
    cells = []
    for moment in moments:
        hours = data.draw(st.integers(-12, 14)) if zoned else 0
        at = (first + timedelta(seconds=moment // 10**9)).astimezone(timezone(timedelta(hours=hours)))
        day, clock = at.replace(tzinfo=None).isoformat(data.draw(st.sampled_from("T "))), at.isoformat()[19:]
        fraction = f"{moment % 10**9:09d}"[:digits]
        cells.append(f"{day}.{fraction}{clock if zoned else ''}")
    text = "t,in_len,out_len\n" + "".join(f"{cell},{index + 1},1\n" for index, cell in enumerate(cells))
    expected = sorted((moment - min(moments)) / 10**9 for moment in moments)
    assert [request.arrival for request in read(folder, text)] == expected


BAD_CELLS = [
    ["nan", "inf", "-1", "-0.5", "1_0", "1e9", "1,5", "", "x", "2023-13-01 00:00:00", "2023-01-01", "٣"],
    ["0", "-3", "1.0", "8.7", "", "1e3", "x", "1048577", "9" * 5000, "٣", "1 2", "+1"],
]


@given(traces(), st.data())
def test_a_bad_cell_is_named_with_its_place(folder, trace, data):
    """Each of them, with line, column and the name in the header; the others are not."""
    _, rows = trace
    where = data.draw(st.lists(st.tuples(st.integers(0, len(rows) - 1), st.integers(0, 2)), min_size=1, unique=True))
    bad = {place: data.draw(st.sampled_from(BAD_CELLS[place[1] > 0])) for place in where}
    table = [["é\nà", "T", "In_len", "out_len"], *(["é\nà", *map(str, row)] for row in rows)]
    for (row, column), cell in bad.items():
        table[row + 1][column + 1] = cell
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(table)
    found = problems(folder, file.getvalue())
    assert [(p.line, p.path) for p in found] == [(4 + 2 * r, (table[0][c + 1],)) for r, c in sorted(bad)]
    assert {problem.file for problem in found} == {str(folder / "trace.csv")}
    for problem, place in zip(found, sorted(bad), strict=True):
        line = file.getvalue().split("\n")[problem.line - 1]
        written = next(csv.reader([line[problem.column - 1 :] + ","]))[0]
        assert written == bad[place]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("\ufeff\r\n \n", "the file is empty"),
        ("t,in_len,out_len\n", "a header and no rows"),
        ("a,in_len,out_len\n1,1,1\n", "1:1: no column of the arrival; name one of t, timestamp"),
        ("t,in_len,T,out_len\n1,1,1,1\n", "1:10: .*a second column of the arrival"),
        ("t;in_len;out_len\n1;1;1\n", "no column of the output"),
        ("t,in_len,out_len\n1,1\n", "2:1: expected 3 cells, as in the header, got 2"),
        ('t,in_len,out_len\n1,"1,1\n', "got '\"1'"),
        ("t,in_len,out_len\n1,1,1\n2023-01-01 00:00:00,1,1\n", "3:1: t: expected a number of seconds"),
        ("t,in_len,out_len\n2023-01-01 00:00:00,1,1\n2023-01-01 00:00:00Z,1,1\n", "without a zone"),
        ("t,in_len,out_len\n2023-01-01 00:00:00,1,1\n2021-01-01 00:00:00,1,1\n", "2:1: t: later than 33554432"),
        ("t,in_len,out_len\n1700000000,1,1\n", "2:1: t: later than 33554432 seconds"),
        (b"t,in_len,out_len\n\xff,1,1\n", "not UTF-8 text"),
        ("t,in_len,out_len\n" + " " * (1 << 20), "larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_trace(folder, text, says):
    """What is wrong, where, and what would be right."""
    assert any(re.search(says, str(problem)) for problem in problems(folder, text))


def test_problems_are_in_the_order_of_the_file(folder):
    """And have an end: a file of another kind is not a hundred thousand lines of complaint."""
    header, date = "t,in_len,out_len\n0,1,1\n", "2023-01-01 00:00:00,1,1\n"
    assert [problem.line for problem in problems(folder, header + date + "0,x,1\n" + date)] == [3, 4, 5]
    assert len(problems(folder, header + "x,x,x\n" * 1000)) == 100
    assert len(problems(folder, header + date * 1000)) == 100


def test_a_workload_larger_than_memory_is_refused(folder):
    """Before it is made; its beginning is not."""
    text = "t,in_len,out_len\n" + "0,1048576,1\n" * 257
    assert "limit the requests" in str(problems(folder, text)[0])
    assert len(read(folder, text, limit=1)[0].prompt) == 1 << 20


@st.composite
def mutated(draw, contents):
    """Bytes with a few of them replaced, left out or put in."""
    content = bytearray(draw(contents))
    pieces = st.sampled_from([b'"', b",", b"\n", b"\r", b"-", b"\0", b"\xff", b"{", b"}", b"NaN", b"1e999", b"9" * 20])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        content[at : at + draw(st.integers(0, 3))] = draw(pieces | st.binary(max_size=2))
    return bytes(content)


@given(mutated(traces().map(lambda trace: trace[0].encode())) | st.binary(max_size=60))
def test_a_mutated_trace_is_read_or_refused(folder, content):
    """And what is read is a workload."""
    with contextlib.suppress(InvalidDocument):
        requests = read(folder, content)
        assert requests
        assert list(requests) == sorted(requests, key=lambda request: request.arrival)
        assert all(request.prompt for request in requests)


GENERATED = {"seed": 1, "rate": 4.0, "prompt_tokens": (1, 9), "output_tokens": (2, 5), "vocab_size": 50}


@given(st.integers(0, 20), st.integers(0, 1 << 70), st.none() | st.floats(1e-6), st.integers(1, 300), st.data())
def test_a_seed_generates_the_same_requests(count, seed, rate, vocab_size, data):
    """Fewer of them are the first of more, and the rate changes arrivals only."""
    low, most = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    tokens = {"prompt_tokens": (low, low + 3), "output_tokens": (most, most)}
    options = {"seed": seed, "vocab_size": vocab_size} | tokens
    requests = generated(count, rate=rate, **options)
    assert generated(count + 3, rate=rate, **options)[:count] == requests
    at_once = tuple(attrs.evolve(request, arrival=0.0) for request in requests)
    assert at_once == generated(count, rate=None, **options) == generated(count, rate=math.inf, **options)
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    for request in requests:
        assert low <= len(request.prompt) <= low + 3
        assert request.max_new_tokens == most
        assert all(type(token) is int and 0 <= token < vocab_size for token in request.prompt)
    assert len({request.name for request in requests}) == count


def test_generated_requests_have_the_distributions_that_were_asked_for():
    """Gaps are exponential, lengths and tokens uniform with both ends."""
    requests = generated(4000, **GENERATED)
    arrivals = [0.0, *(request.arrival for request in requests)]
    gaps = [later - sooner for sooner, later in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.15)
    for values, low, high in [
        ([len(request.prompt) for request in requests], 1, 9),
        ([request.max_new_tokens for request in requests], 2, 5),
        ([token for request in requests for token in request.prompt], 0, 49),
    ]:
        counts = collections.Counter(values)
        assert set(counts) == set(range(low, high + 1))
        assert max(counts.values()) < 1.5 * min(counts.values())
    assert generated(9, **GENERATED | {"seed": 2}) != generated(9, **GENERATED)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"seed": -1}, "seed"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"prompt_tokens": (0, 4)}, "prompt_tokens"),
        ({"output_tokens": (5, 4)}, "output_tokens"),
        ({"output_tokens": (1, 1 << 21)}, "output_tokens"),
        ({"count": -1}, "count"),
        ({"count": 1 << 20, "prompt_tokens": (1, 1024)}, "count"),
    ],
)
def test_numbers_that_make_no_workload(changes, field):
    """Each is named."""
    with pytest.raises(InvalidValue) as caught:
        generated(**{"count": 3} | GENERATED | changes)
    assert [problem.path for problem in caught.value.problems] == [(field,)]


@pytest.mark.parametrize(
    "changes", [{"speed": 0.0}, {"speed": float("nan")}, {"limit": 0}, {"seed": -1}, {"vocab_size": 0}]
)
def test_arguments_of_a_trace_are_checked(folder, changes):
    """The error names the argument, not the file."""
    with pytest.raises(InvalidValue) as caught:
        read(folder, "t,in_len,out_len\n1,1,1\n", **changes)
    assert [problem.path for problem in caught.value.problems] == [tuple(changes)]


@pytest.mark.parametrize("arrival", [float("nan"), float("inf"), -0.1])
def test_a_request_has_a_time_and_an_output(arrival):
    """Or there is none."""
    with pytest.raises(InvalidValue, match=r"max_new_tokens: .*\narrival: "):
        Request(name="r", arrival=arrival, prompt=(1,), max_new_tokens=0)


REQUESTS = st.lists(
    st.builds(
        Request,
        name=st.text("abc", min_size=1, max_size=3),
        arrival=st.just(0.0),
        prompt=st.lists(st.integers(0, 9), min_size=1, max_size=20).map(tuple),
        max_new_tokens=st.integers(1, 20),
        stop=st.frozensets(st.integers(0, 9), max_size=2),
    ),
    min_size=1,
    max_size=30,
)


@given(REQUESTS, st.integers(2, 41))
def test_clipped_requests_always_fit(requests, most):
    """What fits stays as it is; the rest fills the length, keeps its end and its proportions."""
    admitted = admit(requests, max_model_len=most, vocab_size=10, clip=True)
    for before, after in zip(requests, admitted, strict=True):
        if len(before.prompt) + before.max_new_tokens <= most:
            assert after == before
            continue
        assert len(after.prompt) + after.max_new_tokens == most
        assert 1 <= len(after.prompt) <= len(before.prompt)
        assert before.prompt[-len(after.prompt) :] == after.prompt
        assert 1 <= after.max_new_tokens <= before.max_new_tokens
        share = most * before.max_new_tokens / (before.max_new_tokens + len(before.prompt))
        assert after.max_new_tokens == 1 or 0 <= share - after.max_new_tokens < 1
        assert attrs.evolve(before, prompt=after.prompt, max_new_tokens=after.max_new_tokens) == after
    assert admit(admitted, max_model_len=most, vocab_size=10, clip=False) == admitted


@given(REQUESTS, st.integers(0, 41), st.integers(1, 11), st.sets(st.integers(0, 29), max_size=2), st.booleans())
def test_exactly_what_cannot_be_served_is_refused(requests, most, vocab_size, empty, clip):
    """With a line for each thing that is wrong, ten of them at most, and a count of the rest."""
    requests = [attrs.evolve(r, prompt=() if i in empty else r.prompt) for i, r in enumerate(requests)]
    wrong = []
    for request in requests:
        wrong += [request.name] * (request.prompt == ())
        wrong += [request.name] * any(token >= vocab_size for token in {*request.prompt, *request.stop})
        too_long = len(request.prompt) + request.max_new_tokens > most
        wrong += [request.name] * (too_long and not (clip and most >= 2))
    if not wrong:
        assert admit(requests, max_model_len=most, vocab_size=vocab_size, clip=clip) == tuple(requests) or clip
    else:
        with pytest.raises(RunError) as caught:
            admit(requests, max_model_len=most, vocab_size=vocab_size, clip=clip)
        lines = str(caught.value).split("\n")
        assert [line.split(":")[0] for line in lines[: min(10, len(wrong))]] == wrong[:10]
        assert (f"and {len(wrong) - 10} more" in lines[10:11]) is (len(wrong) > 10)
        too_long = any(r.length > most for r in requests) and not (clip and most >= 2)
        assert lines[-1].startswith("name a larger max_model_len in the spec") is too_long


def test_a_refusal_names_what_to_do():
    """The request, the numbers, and the remedy."""
    request = Request(name="chat.csv:7", arrival=0.0, prompt=(1, -1), max_new_tokens=7)
    with pytest.raises(RunError) as caught:
        admit([request], max_model_len=8, vocab_size=5, clip=False)
    assert str(caught.value).split("\n") == [
        "chat.csv:7: token -1 is not in the model's vocabulary of 5; take the tokenizer of the model",
        "chat.csv:7: 2 prompt tokens and 7 output tokens are more than max_model_len, 8",
        "name a larger max_model_len in the spec, or shorten requests with --clip",
    ]
    with pytest.raises(RunError, match="no requests"):
        admit([], max_model_len=8, vocab_size=5, clip=True)


def test_the_shipped_traces_are_what_their_description_prints(capsys):
    """And the short one fits into what it says it does."""
    text = (TRAFFIC / "README.md").read_text("utf-8")
    for name, code in re.findall(r"## (\S+\.csv)\n.*?```python\n(.*?)```", text, re.DOTALL):
        exec(code, {})
        assert capsys.readouterr().out == (TRAFFIC / name).read_text("utf-8")
    requests = from_trace(TRAFFIC / "short_chat.csv", vocab_size=100, seed=0)
    assert (len(requests), requests[-1].arrival < 20) == (40, True)
    assert admit(requests, max_model_len=180, vocab_size=100, clip=False) == requests


def test_workloads_need_no_torch():
    """Nor a tokenizer, until there are prompts."""
    code = "import sys, capture_planner_runner.serving.workload; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "tokenizers"} & set(ran.stdout.split())
