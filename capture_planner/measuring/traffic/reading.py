"""From sources to traffic: finds the format of each by its content, reads it, and adds up the counts."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from capture_planner.codec import Document
from capture_planner.codec.documents import MAX_BYTES
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.measuring.traffic.fitting import summed
from capture_planner.measuring.traffic.forward_pass import FORWARD_PASSES
from capture_planner.measuring.traffic.lines import LineFormat, LineReader
from capture_planner.measuring.traffic.observed import observed_counts, read_document, read_run_report
from capture_planner.measuring.traffic.prometheus import RECOGNISED, read_prometheus
from capture_planner.measuring.traffic.request_trace import drafter_batches, is_trace, read_trace
from capture_planner.measuring.traffic.sglang_log import DECODES, PREFILLS
from capture_planner.measuring.traffic.source import (
    HEAD,
    MAX_WHOLE,
    Advance,
    SourceCounts,
    SourceOptions,
    TrafficSource,
)
from capture_planner.measuring.traffic.tensorrt_llm_log import ITERATION_LOG
from capture_planner.measuring.traffic.vllm_acceptance import ACCEPTANCE
from capture_planner.measuring.traffic.vllm_graph_table import GRAPH_TABLE
from capture_planner.measuring.traffic.vllm_iterations import ITERATIONS
from capture_planner.measuring.workers import read_workers
from capture_planner.modes import Role
from capture_planner.records.traffic import Traffic, TrafficCount

LINE_FORMATS: Sequence[LineFormat] = (
    ITERATIONS,
    GRAPH_TABLE,
    ACCEPTANCE,
    DECODES,
    PREFILLS,
    ITERATION_LOG,
    FORWARD_PASSES,
)
"""Formats that are read line by line; a log may have several, with other lines between them."""

OTHER_FORMATS = {
    "Prometheus text": 'vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 12.0',
    "trace of requests (CSV)": "t,in_len,out_len",
    "observation or traffic file": "engine: vllm",
    "run report": "the JSON of capture-planner run --format json",
}
"""Formats that are read as a whole, each with how it begins or what is in it."""

_OURS = re.compile(rb"(?:\s|#[^\n]*\n)*[a-z_]+:[ \n](?s:.*\n)?(?:engine|batches|sources):")
_PARTLESS = "has no order in time, so no part of it can be read"


def read_traffic(
    paths: Iterable[str], options: SourceOptions | None = None, advance: Advance = lambda _: None
) -> tuple[Traffic, tuple[str, ...]]:
    """Return the traffic of sources, and some of the lines that could not be read.

    Counts of several sources add up, and so do the times that they cover. ``fitting`` makes it small enough for a file.

    :param paths: files, plain or compressed by gzip; ``-`` is standard input.
    :param advance: called with the bytes that were read since its last call.
    Raises ``InvalidDocument`` where a source cannot be read, or has no batches of a known format.
    """
    options = options or SourceOptions()
    read = [
        (TrafficSource(path), counts) for path in paths for counts in read_source(TrafficSource(path), options, advance)
    ]
    read, left = _one_of_each(read)
    batches = summed(_completed(each, options) for _, counts in read for each in counts.batches)
    notes = [*left, *(note for _, counts in read for note in counts.notes)]
    target = [each for each in batches if each.role is Role.TARGET]
    deployment = options.deployment
    if deployment is not None and deployment.speculative is not None and len(target) == len(batches):
        batches = summed([*batches, *drafter_batches(target, deployment)])
        notes.append("passes of the drafter are not in the sources: they follow from the target's and the spec")
    formats = {(source.name, counts.format) for source, counts in read if not counts.format.startswith("trace")}
    if len(formats) > 1 and len({name for _, name in formats}) > 1:
        notes.append("the sources have several formats: if two are of the same run, its steps are counted twice")
    seconds = [counts.seconds for _, counts in read if counts.seconds is not None]
    traffic = Traffic(
        sources=tuple(f"{source.name}: {counts.format}" for source, counts in read),
        seconds=round(sum(seconds), 6) if seconds else None,
        batches=batches,
        skipped=sum(counts.skipped for _, counts in read),
        drafted=_positions(counts.drafted for _, counts in read),
        accepted=_positions(counts.accepted for _, counts in read),
        notes=tuple(dict.fromkeys([*notes, *_unknown(batches)])),
    )
    return traffic, tuple(sample for _, counts in read for sample in counts.samples)


def _one_of_each(
    read: Sequence[tuple[TrafficSource, SourceCounts]],
) -> tuple[list[tuple[TrafficSource, SourceCounts]], list[str]]:
    """Return the sources with the steps of one worker alone, of those that take the same; and what was left out."""
    lowest: dict[object, int] = {}
    for _, counts in read:
        if counts.worker is not None:
            place, rank = counts.worker
            lowest[place] = min(rank, lowest.get(place, rank))
    chosen, left = [], []
    for source, counts in read:
        if counts.worker is not None and counts.worker[1] != lowest[counts.worker[0]]:
            left.append(f"{source.name}: rank {counts.worker[1]} takes the steps of rank {lowest[counts.worker[0]]}")
            # Of the workers that take the same steps, one has the tokens.
            counts = attrs.evolve(counts, batches=(), seconds=None, notes=())
        chosen.append((source, counts))
    return chosen, left


def read_source(source: TrafficSource, options: SourceOptions, advance: Advance = lambda _: None) -> list[SourceCounts]:
    """Return what was counted in one source, in the format or the formats that it has.

    Raises ``InvalidDocument`` where it cannot be read, or has no batches of a known format.
    """
    if Path(source.path).is_dir():
        return [attrs.evolve(observed_counts(read_workers(source.path)), format="observations of an engine's workers")]
    blocks = source.blocks(advance=advance)
    first = next(blocks, b"")
    if not first.strip():
        raise InvalidDocument([Problem(file=source.name, message="the file is empty", remedy=_formats())])
    head = first[:HEAD]
    whole = _whole_format(head)
    if whole is not None:
        return [whole(_text(source, itertools.chain([first], blocks)), source.name, options)]
    if options.part != (0.0, 1.0):
        blocks.close()  # type: ignore[attr-defined]
        blocks = source.blocks(options.part, advance)
        first = b""
    reader = LineReader(source.name, LINE_FORMATS)
    for block in itertools.chain([first], blocks):
        reader.add(block)
    results = [counts for counts in reader.results(options) if counts.batches]
    if not results:
        skipped, samples = reader.skipped
        shown = f"; {skipped} lines could not be read: {'; '.join(samples)}" if skipped else ""
        if options.part != (0.0, 1.0):
            message = f"no steps in the part from {options.part[0]:.4g} to {options.part[1]:.4g} of its length{shown}"
            raise InvalidDocument([Problem(file=source.name, message=message, remedy="read a larger part, or all")])
        message = f"no batches in a known format{shown}"
        raise InvalidDocument([Problem(file=source.name, message=message, remedy=_formats())])
    return results


Whole = Callable[[str, str, SourceOptions], SourceCounts]


def _whole_format(head: bytes) -> Whole | None:
    """Return how to read a text that is not read line by line."""
    if is_trace(head):
        return read_trace
    if RECOGNISED.search(head):
        return _prometheus
    if _OURS.match(head):
        return _document
    first, _, rest = head.lstrip().partition(b"\n")
    if not first.startswith(b"{") or (rest.strip() and _is_json(first)):  # text, or JSON lines
        return None
    if b'"environment"' in head and b'"captured"' in head:
        return _report
    return _document if b'"version"' in head and (b'"engine"' in head or b'"sources"' in head) else None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _text(source: TrafficSource, blocks: Iterable[bytes]) -> str:
    """Return a whole file as text; raises ``InvalidDocument`` where it is too large, or no text."""
    parts: list[bytes] = []
    for block in blocks:
        parts.append(block)
        if sum(map(len, parts)) > MAX_WHOLE:
            message = f"larger than {MAX_WHOLE >> 20} MiB, and its format is not read line by line"
            raise InvalidDocument([Problem(file=source.name, message=message)])
    try:
        return b"".join(parts).decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text, at byte {error.start}"
        raise InvalidDocument([Problem(file=source.name, message=message)]) from error


def _document(text: str, name: str, options: SourceOptions) -> SourceCounts:
    _refuse_part(name, options)
    if len(text.encode()) > MAX_BYTES:
        raise InvalidDocument([Problem(file=name, message="the file is larger than 1 MiB")])
    return read_document(Document.parse(text, name), options)


def _prometheus(text: str, name: str, options: SourceOptions) -> SourceCounts:
    _refuse_part(name, options)
    return read_prometheus(text, name)


def _report(text: str, name: str, options: SourceOptions) -> SourceCounts:
    try:
        return read_run_report(json.loads(text), options)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        message = f"JSON, and no run report: {error!r}"
        raise InvalidDocument([Problem(file=name, message=message, remedy=_formats())]) from error


def _refuse_part(name: str, options: SourceOptions) -> None:
    if options.part != (0.0, 1.0):
        raise InvalidDocument([Problem(file=name, message=_PARTLESS, remedy="give a log or a trace")])


def _formats() -> str:
    known = {each.name: each.example for each in LINE_FORMATS if each.detail} | OTHER_FORMATS
    return "known formats, each with a line of it: " + "".join(f"\n  {name}: {line}" for name, line in known.items())


def _completed(batch: TrafficCount, options: SourceOptions) -> TrafficCount:
    """Fill in the query length of a decode where a source has only requests or only tokens."""
    each = options.query_len
    if each is None or batch.query_len is not None or not batch.past_prompt:
        return batch
    if batch.num_tokens is None and batch.num_reqs is not None:
        return attrs.evolve(batch, num_tokens=batch.num_reqs * each, query_len=each)
    if batch.num_reqs is None and batch.num_tokens is not None and batch.num_tokens % each == 0:
        return attrs.evolve(batch, num_reqs=batch.num_tokens // each, query_len=each)
    return batch


def _positions(listed: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(*listed, fillvalue=0)))


def _unknown(batches: Sequence[TrafficCount]) -> Iterator[str]:
    """Say what is not known of the batches, and what follows from it."""
    steps = sum(batch.count for batch in batches)
    missing: Counter[str] = Counter()
    for batch in batches:
        missing["requests"] += batch.count * (batch.num_reqs is None)
        missing["tokens"] += batch.count * (batch.num_tokens is None)
        missing["phase"] += batch.count * (batch.past_prompt is None)
    follows = {
        "requests": "the requests of {} of the steps are not known; --query-len gives those of decodes",
        "tokens": "the tokens of {} of the steps are not known: give --query-len, the tokens of each decode (1 + K)",
        "phase": "whether {} of the steps are decodes or have prompts is not known",
    }
    for name, text in follows.items():
        if missing[name]:
            yield text.format(f"{missing[name] / steps:.1%}")
