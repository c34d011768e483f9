"""Traces of requests: arrivals and lengths from CSV, text -> cells that know their places, or from JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import attrs

from capture_planner.codec import read
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.records.text import counted

MAX_LENGTH = 1 << 20
"""Most tokens of one prompt, and most that one request may ask for."""
MAX_SECONDS = 1 << 25
"""Latest arrival in a file: a year. Seconds since 1970 are a slip, and would never arrive."""
MAX_PROBLEMS = 100
"""Problems reported of one file."""

T = TypeVar("T")

ALIASES = {
    "arrival": ("t", "timestamp", "arrival", "arrival_time"),
    "prompt": ("in_len", "contexttokens", "input_tokens", "input_length", "prompt_tokens", "request tokens"),
    "output": ("out_len", "generatedtokens", "output_tokens", "output_length", "response tokens"),
}
"""The names of each column, in lower case: also those of the Azure traces and of BurstGPT."""

FAILING = "response tokens"
"""The column in which 0 is a request that failed, as BurstGPT has it."""

KEYS = {
    "arrival": ("timestamp",),
    "prompt": ("input_length", "input_tokens"),
    "output": ("output_length", "output_tokens"),
}
"""The keys of a JSON line, as Mooncake's traces have them; the timestamp is in milliseconds."""


@attrs.frozen
class TraceRow:
    """One row of a trace: seconds from the start, tokens, and its line in the file (from 1)."""

    arrival: float
    prompt: int
    output: int
    line: int


@attrs.frozen
class ParsedTrace:
    """The requests of a file, in its order."""

    rows: list[TraceRow]
    failed: int = 0
    """Requests that are left out, because they failed."""


def text_of(path: str | Path) -> str:
    """Read a text file with or without a byte-order mark, of any line ends; raises ``InvalidDocument``."""
    return read(path).removeprefix("\ufeff").replace("\r\n", "\n")


def read_trace(path: str | Path) -> list[TraceRow]:
    """Return the rows of a trace in the order of its file; raises ``InvalidDocument`` with all problems."""
    return trace_of(text_of(path), str(path)).rows


def has_requests(line: str) -> bool:
    """Say whether a line is a request of a trace in JSON lines."""
    found = _json_object(line)
    return all(any(name in found for name in names) for names in KEYS.values())


def trace_of(text: str, file: str) -> ParsedTrace:
    """Return the requests of a CSV, or of JSON lines; messages name it ``file``."""
    return ParsedTrace(_json_rows(text, file)) if text.lstrip().startswith("{") else _csv_rows(text, file)


def _json_object(line: str) -> dict[str, Any]:
    """Return the object in a line; an empty one where it is none."""
    try:
        found = json.loads(line)
    # JSON that is nested too deep ends in a RecursionError.
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _json_rows(text: str, file: str) -> list[TraceRow]:
    problems: list[Problem] = []
    read: list[tuple[float, int, int, int]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or len(problems) >= MAX_PROBLEMS:
            continue
        data = _json_object(line)
        try:
            moment, prompt, output = (_json_number(data, names) for names in KEYS.values())
            read.append((moment, _length(str(prompt)), _length(str(output)), number))
        except ValueError as error:
            problems.append(Problem(file=file, line=number, message=str(error)))
    start = min((moment for moment, *_ in read), default=0)
    start = start if start > MAX_SECONDS * 1000 else 0  # milliseconds since 1970
    late = (row for row in read if row[0] - start > MAX_SECONDS * 1000)
    problems += [
        Problem(file=file, line=row[3], message=f"later than {MAX_SECONDS} seconds after the start") for row in late
    ]
    if problems:
        raise InvalidDocument(problems[:MAX_PROBLEMS])
    return [TraceRow((moment - start) / 1000, *others) for moment, *others in read]


def _json_number(data: dict[str, Any], names: tuple[str, ...]) -> float:
    value: Any = next((data[name] for name in names if name in data), None)
    # A bool is an int for isinstance.
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"expected {names[0]}, a number from 0, got {_shown(json.dumps(value))}")
    return value  # type: ignore[no-any-return]


def _csv_rows(text: str, file: str) -> ParsedTrace:
    table = _table(text)
    header = next(table, None)
    if header is None:
        raise InvalidDocument([Problem(file=file, message="the file is empty", remedy=_REMEDY)])
    arrival, prompt, output = _columns(header, file)
    problems: list[Problem] = []
    may_fail, failed = header[output].text.lower() == FAILING, 0

    def note(cell: _Cell, message: str, *columns: int) -> None:
        names = tuple(header[column].text for column in columns)
        problems.append(Problem(file=file, line=cell.line, column=cell.column, path=names, message=message))

    def parsed(parse: Callable[[str], T], row: list[_Cell], column: int, otherwise: T) -> T:
        try:
            return parse(row[column].text)
        except ValueError as error:
            note(row[column], str(error), column)
            return otherwise

    times: list[tuple[_Cell, str, float]] = []
    lengths: list[tuple[int, int]] = []
    for row in table:
        if len(problems) >= MAX_PROBLEMS:
            break
        if len(row) != len(header):
            note(row[0], f"expected {counted(len(header), 'cell')}, as in the header, got {len(row)}")
            continue
        if may_fail and row[output].text == "0":
            failed += 1
            continue
        # Cells that cannot be read leave placeholders, so that all problems of a file are reported together.
        if (time := parsed(_time, row, arrival, None)) is not None:
            times.append((row[arrival], *time))
        lengths.append((parsed(_length, row, prompt, 0), parsed(_length, row, output, 0)))
    if not lengths and not problems:
        message = f"{failed} requests, which all failed" if failed else "a header and no rows under it"
        raise InvalidDocument([Problem(file=file, message=message)])
    kind = times[0][1] if times else ""
    same = [(cell, value) for cell, other, value in times if other == kind]
    for cell, other, _ in times:
        if other != kind:
            note(cell, f"expected {kind}, as in the first row, got {cell.text!r}", arrival)
    # Seconds count from the start already; dates begin with the earliest one.
    start = 0 if kind == _SECONDS else min((value for _, value in same), default=0)
    unit = 1 if kind == _SECONDS else 10**9
    for cell, value in same:
        if value - start > MAX_SECONDS * unit:
            note(cell, f"later than {MAX_SECONDS} seconds after the start", arrival)
    if problems:
        # Kinds and arrivals were checked after the rows, and a reader fixes a file from the top.
        problems.sort(key=lambda problem: (problem.line or 0, problem.column or 0))
        raise InvalidDocument(problems[:MAX_PROBLEMS])
    rows = [
        TraceRow((value - start) / unit, *tokens, cell.line)
        for (cell, value), tokens in zip(same, lengths, strict=True)
    ]
    return ParsedTrace(rows, failed)


_REMEDY = "its first line names a column of each: " + "; ".join(", ".join(names) for names in ALIASES.values())


def _columns(header: list[_Cell], file: str) -> list[int]:
    """Return where arrival, prompt and output stand."""
    columns = []
    problems = []
    for what, names in ALIASES.items():
        found = [index for index, cell in enumerate(header) if cell.text.lower() in names]
        if len(found) != 1:
            cell = header[found[1]] if found else header[0]
            message = f"a second column of the {what}" if found else f"no column of the {what}"
            remedy = f"name one of {', '.join(names)}"
            problems.append(Problem(file=file, line=cell.line, column=cell.column, message=message, remedy=remedy))
        columns.extend(found[:1])
    if problems:
        raise InvalidDocument(problems)
    return columns


@attrs.frozen
class _Cell:
    """The text of a cell without quotes and outer blanks, and where it begins (from 1)."""

    text: str
    line: int
    column: int


# Possessive quantifiers: a quote that nothing closes is scanned once, without backtracking.
_CELL = re.compile(r'[ \t]*+"([^"]*+(?:""[^"]*+)*+)"[ \t]*+(?=[,\n])|([^,\n]*+)')


def _table(text: str) -> Iterator[list[_Cell]]:
    """Yield the rows that are not blank: RFC 4180, each cell with its place."""
    # So that the last row ends as the others do.
    text += "\n"
    line, line_start, at = 1, 0, 0
    row: list[_Cell] = []
    while at < len(text):
        match = _CELL.match(text, at)
        assert match is not None  # the second alternative matches nothing, too
        quoted, plain = match.groups()
        content = plain if quoted is None else quoted.replace('""', '"')
        row.append(_Cell(content.strip(), line, at - line_start + 1))
        if newlines := match[0].count("\n"):
            line += newlines
            line_start = at + match[0].rindex("\n") + 1
        at = match.end() + 1
        if text[at - 1] == "\n":
            if len(row) > 1 or row[0].text:
                yield row
            row = []
            line, line_start = line + 1, at


_SECONDS = "a number of seconds from 0"
_NUMBER = re.compile(r"\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DATE = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?"
)


def _time(text: str) -> tuple[str, float] | None:
    """Return the kind of a time, and its seconds from the start; of a date, nanoseconds from 1970."""
    if _NUMBER.fullmatch(text):
        return _SECONDS, float(text)
    match = _DATE.fullmatch(text)
    if match is None:
        raise ValueError(f"expected {_SECONDS}, or a date and time, got {_shown(text)}")
    day, clock, fraction, zone = match.groups()
    moment = datetime.fromisoformat(f"{day} {clock}{zone or 'Z'}")
    seconds = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    # A date's fraction may have more digits than a datetime holds, and its seconds more than a float.
    nanoseconds = seconds * 10**9 + int((fraction or "").ljust(9, "0"))
    return f"a date and time with{'' if zone else 'out'} a zone", nanoseconds


def _length(text: str) -> int:
    # Eighteen digits at most: int() refuses very long numbers with a message of its own.
    if not re.fullmatch(r"[0-9]{1,18}", text) or not 1 <= int(text) <= MAX_LENGTH:
        raise ValueError(f"expected a whole number from 1 to {MAX_LENGTH}, got {_shown(text)}")
    return int(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
