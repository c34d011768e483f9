"""From sources to traffic: finds the format of each by its content, reads it, and adds up the counts."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from capture_planner.analysis.arrivals import MOST_BLOCKS
from capture_planner.codec import Document
from capture_planner.codec.documents import MAX_BYTES
from capture_planner.errors import InvalidDocument, InvalidValue, Problem
from capture_planner.measuring.traffic.fitting import summed
from capture_planner.measuring.traffic.formats import Labels, LogFormats, MetricFormat
from capture_planner.measuring.traffic.lines import LineReader
from capture_planner.measuring.traffic.request_trace import drafter_batches, is_trace, read_trace, traffic_count
from capture_planner.measuring.traffic.source import (
    HEAD,
    MAX_SAMPLES,
    MAX_WHOLE,
    Advance,
    RequestTrace,
    SourceCounts,
    SourceOptions,
    TrafficSource,
)
from capture_planner.measuring.workers import drafts_of, read_workers, speaker
from capture_planner.modes import Role
from capture_planner.records._base import grouped
from capture_planner.records.observation import Observation
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount

OTHER_FORMATS = {
    "trace of requests (CSV)": "t,in_len,out_len",
    "trace of requests (JSON lines)": '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0]}',
    "observation or traffic file": "engine: vllm",
    "run report": "the JSON of capture-planner run --format json",
}
"""Formats of no engine, each with how it begins or what is in it."""

_OURS = re.compile(rb"(?:\s|#[^\n]*\n)*[a-z_]+:[ \n](?s:.*\n)?(?:engine|batches|sources):")
NO_PROMPTS = "the traffic has no prompts: it does not say which sizes mixed batches need, nor that they need none"
"""The note about traffic of decodes alone, such as SGLang's without its prefill lines."""


@attrs.frozen(kw_only=True)
class TrafficReading:
    """Traffic of sources, with the order of its steps."""

    traffic: Traffic
    unreadable: tuple[str, ...]
    """Some of the lines that could not be read."""
    blocks: tuple[tuple[TrafficCount, ...], ...]
    """The target's batches in stretches of time, to judge noise by; rare shapes may be larger. Empty: no order."""
    traces: tuple[RequestTrace, ...]
    """The traces of requests among the sources."""


def read_sources(
    sources: Iterable[str | TrafficSource],
    options: SourceOptions | None = None,
    advance: Advance = lambda _: None,
    *,
    formats: Sequence[LogFormats] = (),
) -> TrafficReading:
    """Return the traffic of sources, and the order of its steps.

    Counts of several sources add up, and so do the times that they cover. ``fitting`` makes it small enough for a file.

    :param sources: files, plain or compressed by gzip; ``-`` is standard input.
    :param advance: called with the bytes that were read since its last call.
    :param formats: what each of the installed engines writes.
    :raises InvalidDocument: a source cannot be read, or has no batches of a known format.
    """
    options = options or SourceOptions()
    read = [
        (source, counts)
        for source in (TrafficSource(each) if isinstance(each, str) else each for each in sources)
        for counts in _read_source(source, options, advance, formats)
    ]
    read, left = _one_of_each(read)
    batches = summed(_completed(each, options) for _, counts in read for each in counts.batches)
    notes = [*left, *(note for _, counts in read for note in counts.notes)]
    target = [each for each in batches if each.role is Role.TARGET]
    deployment = options.deployment
    # Sources with passes of the drafter need none computed.
    if deployment is not None and deployment.speculative is not None and len(target) == len(batches):
        batches = summed([*batches, *drafter_batches(target, deployment)])
        notes.append("passes of the drafter are not in the sources: they follow from the target's and the spec")
    # Steps of a trace are simulated, so that no other source has them too.
    met = {(source.name, counts.format) for source, counts in read if not counts.format.startswith("trace")}
    if len(met) > 1 and len({name for _, name in met}) > 1:
        notes.append("the sources have several formats: if two are of the same run, its steps are counted twice")
        steps: Counter[str] = Counter()
        for _, counts in read:
            steps[counts.format] += _steps_of_target(counts)
        weights = (f"{name} {count:,} ({count / max(steps.total(), 1):.1%})" for name, count in steps.items())
        notes.append(f"steps of each: {', '.join(weights)}; each step counts alike")
    seconds = [counts.seconds for _, counts in read if counts.seconds is not None]
    lines = [_steps_of_target(counts) if counts.lines is None else counts.lines for _, counts in read]
    traffic = Traffic(
        sources=tuple(f"{source.name}: {counts.format}" for source, counts in read),
        seconds=round(sum(seconds), 6) if seconds else None,
        batches=batches,
        lines=None if all(counts.lines is None for _, counts in read) else sum(lines),
        skipped=sum(counts.skipped for _, counts in read),
        **drafts_of([counts for _, counts in read]),
        # One source may have the prompts that another lacks, so this is said of the sum.
        notes=tuple(dict.fromkeys([*(note for note in notes if note != NO_PROMPTS), *_unknown(batches)])),
    )
    return TrafficReading(
        traffic=traffic,
        unreadable=tuple(sample for _, counts in read for sample in counts.samples),
        blocks=_in_order([counts for _, counts in read], options),
        traces=tuple(counts.trace for _, counts in read if counts.trace is not None),
    )


def _steps_of_target(counts: SourceCounts) -> int:
    return sum(batch.count for batch in counts.batches if batch.role is Role.TARGET)


def _in_order(read: Sequence[SourceCounts], options: SourceOptions) -> tuple[tuple[TrafficCount, ...], ...]:
    """Return the blocks of all sources, neighbours as one where they are many."""
    read = [counts for counts in read if counts.batches]
    # Where one source has no order, that of all steps is not known.
    if not read or not all(counts.blocks for counts in read):
        return ()
    blocks = [block for counts in read for block in counts.blocks]
    width = math.ceil(len(blocks) / MOST_BLOCKS)
    return tuple(
        summed(_completed(each, options) for block in blocks[index : index + width] for each in block)
        for index in range(0, len(blocks), width)
    )


def _one_of_each(
    read: Sequence[tuple[TrafficSource, SourceCounts]],
) -> tuple[list[tuple[TrafficSource, SourceCounts]], list[str]]:
    """Return the sources with the steps of one worker alone, of those that take the same; and what was left out."""
    workers = [counts.worker for _, counts in read if counts.worker is not None]
    lowest = {place: min(rank for _, rank in alike) for place, alike in grouped(workers, lambda each: each[0]).items()}
    chosen, left = [], []
    for source, counts in read:
        if counts.worker is not None and counts.worker[1] != lowest[counts.worker[0]]:
            left.append(f"{source.name}: rank {counts.worker[1]} takes the steps of rank {lowest[counts.worker[0]]}")
            # Of the workers that take the same steps, one has the tokens.
            counts = attrs.evolve(counts, batches=(), seconds=None, notes=())
        chosen.append((source, counts))
    return chosen, left


def _read_source(
    source: TrafficSource, options: SourceOptions, advance: Advance, formats: Sequence[LogFormats]
) -> list[SourceCounts]:
    """Return what was counted in one source, by format; raises ``InvalidDocument``, as ``read_sources`` does."""
    is_part, is_folder = options.part != (0.0, 1.0), Path(source.path).is_dir()
    if is_folder or source.observation is not None:
        if is_part:
            raise _unordered(source.name)
        counts = observed_counts(source.observation or read_workers(source.path))
        return [attrs.evolve(counts, format="observations of an engine's workers") if is_folder else counts]
    said: dict[str, None] = {}
    blocks = source.blocks(advance=advance, note=lambda note: said.update({note: None}))
    first = next(blocks, b"")
    if not first.strip():
        empty = "standard input is empty, or was read before" if source.path == "-" else "the file is empty"
        raise _refusal(source.name, empty, _listed(formats))
    head = first[:HEAD]
    whole = _whole_format(head, formats)
    if whole is not None:
        # Traces have times, and reports list their steps in order; others have totals alone.
        if is_part and whole not in (read_trace, _report):
            raise _unordered(source.name)
        counts = whole(_text(source, itertools.chain([first], blocks)), source.name, options)
        return [attrs.evolve(counts, notes=(*counts.notes, *said))]
    if is_part:
        # The format is known by the head of the file, and the part may lie elsewhere.
        blocks.close()  # type: ignore[attr-defined]
        blocks = source.blocks(options.part, advance, lambda note: said.update({note: None}))
        first = b""
    reader = LineReader(source.name, [each for engine in formats for each in engine.lines])
    for block in itertools.chain([first], blocks):
        reader.add(block)
    results = [counts for counts in reader.results(options) if counts.batches]
    if not results:
        skipped, samples = reader.skipped
        shown = f"; {skipped} lines could not be read: {'; '.join(samples)}" if skipped else ""
        # Samples of binary lines say nothing.
        if b"\0" in head:
            shown = "; it is binary, not text"
        if is_part:
            message = f"no steps in the part from {options.part[0]:.4g} to {options.part[1]:.4g} of its length{shown}"
            raise _refusal(source.name, message, "read a larger part, or all")
        raise _refusal(source.name, f"no batches in a known format{shown}", _listed(formats))
    return [attrs.evolve(results[0], notes=(*results[0].notes, *said)), *results[1:]]


Whole = Callable[[str, str, SourceOptions], SourceCounts]


def _whole_format(head: bytes, formats: Sequence[LogFormats]) -> Whole | None:
    """Return how to read a text that is not read line by line."""
    if is_trace(head):
        return read_trace
    for engine in formats:
        if engine.metrics is not None and engine.metrics.is_in(head):
            return lambda text, name, options, metrics=engine.metrics: read_prometheus(text, name, metrics)  # type: ignore[misc]
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
    except (ValueError, RecursionError):
        return False
    return True


def _text(source: TrafficSource, blocks: Iterable[bytes]) -> str:
    """Return a whole file as text; raises ``InvalidDocument`` where it is too large, or no text."""
    parts: list[bytes] = []
    for block in blocks:
        parts.append(block)
        # The size of compressed text is known only as it is read.
        if sum(map(len, parts)) > MAX_WHOLE:
            raise _refusal(source.name, f"larger than {MAX_WHOLE >> 20} MiB, and its format is not read line by line")
    try:
        return b"".join(parts).decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise _refusal(source.name, f"not UTF-8 text, at byte {error.start}") from error


def _document(text: str, name: str, options: SourceOptions) -> SourceCounts:
    if len(text.encode()) > MAX_BYTES:
        raise _refusal(name, "the file is larger than 1 MiB")
    return read_document(Document.parse(text, name), options)


def _report(text: str, name: str, options: SourceOptions) -> SourceCounts:
    try:
        return read_run_report(json.loads(text), options)
    # Any JSON may have these keys, with anything behind them.
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, OverflowError, RecursionError) as error:
        raise _refusal(name, f"JSON, and no run report: {error!r}", "write one with run --format json") from error


def _refusal(name: str, message: str, remedy: str = "") -> InvalidDocument:
    return InvalidDocument([Problem(file=name, message=message, remedy=remedy)])


def _unordered(name: str) -> InvalidDocument:
    return _refusal(name, "has no order in time, so no part of it can be read", "give a log or a trace")


def _listed(formats: Sequence[LogFormats]) -> str:
    """Return all formats as a remedy, each with an example."""
    lines = [each for engine in formats for each in engine.lines]
    metrics = [engine.metrics for engine in formats if engine.metrics is not None and engine.metrics.example]
    known = {each.name: each.example for each in lines if each.detail}
    known |= {f"{NAME} ({each.prefix})": each.example for each in metrics} | OTHER_FORMATS
    rows = "".join(f"\n  {name}: {line}" for name, line in known.items())
    install = "an engine's log is read by its distribution: python -m pip install engines/NAME, from a clone"
    return f"{install}; known formats, each with a line of it: {rows}"


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


def _unknown(batches: Sequence[TrafficCount]) -> Iterator[str]:
    """Say what is not known of the batches, and what follows from it."""
    target = [batch for batch in batches if batch.role is Role.TARGET]
    if target and all(batch.past_prompt for batch in target):
        yield NO_PROMPTS
    steps = sum(batch.count for batch in batches)
    follows = {
        "num_reqs": "the requests of {} of the steps are not known; --query-len gives those of decodes",
        "num_tokens": "the tokens of {} of the steps are not known: give --query-len, the tokens of each decode "
        "(1 + K)",
        "past_prompt": "whether {} of the steps are decodes or have prompts is not known",
    }
    for name, text in follows.items():
        missing = sum(batch.count for batch in batches if getattr(batch, name) is None)
        if missing:
            yield text.format(f"{missing / steps:.1%}")


# Prometheus text ---------------------------------------------------------------------------------


NAME = "Prometheus text"
MOST = 1e18
"""What no counter reaches; a value may also be NaN, or below 0, which no counter is."""

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})? +([-+.\w]+)(?: +-?\d+)?")
_LABEL = re.compile(r"(?<!\w)(\w+)=\"((?:[^\"\\]|\\.)*)\"")


def read_prometheus(text: str, name: str, metrics: MetricFormat) -> SourceCounts:
    """Return the counts of the last scrape in a text; raises ``InvalidDocument`` where it has no batch shapes."""
    samples: dict[tuple[str, Labels], float] = {}
    skipped: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            sample = _sample(line.strip())
            if sample is None or (sample[1] < 0 and sample[0][0].startswith(metrics.prefix)):
                skipped.append(f"{name}:{number}: {line[:160]!a}")
            else:
                samples[sample[0]] = sample[1]  # of several scrapes the last one counts
    try:
        counts = metrics.count(samples)
    except InvalidValue as error:
        raise InvalidDocument(
            attrs.evolve(problem, file=name, message=f"{NAME}: {problem.message}") for problem in error.problems
        ) from None
    return attrs.evolve(counts, format=NAME, skipped=len(skipped), samples=tuple(skipped[:MAX_SAMPLES]))


def _sample(line: str) -> tuple[tuple[str, Labels], float] | None:
    """Return name, labels and value of a line of the text format; None where it is none, or no number."""
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return None
    name, labels, value = match.groups()
    try:
        number = float(value)
    except ValueError:
        return None
    return ((name, tuple(_LABEL.findall(labels or ""))), number) if abs(number) < MOST else None


# Files of ours -----------------------------------------------------------------------------------


def read_document(document: Document, options: SourceOptions) -> SourceCounts:
    """Return the counts of an observation or of a traffic file; raises ``InvalidDocument``."""
    if document.is_traffic:
        traffic = document.load(Traffic)
        return SourceCounts(
            format="traffic file",
            batches=traffic.batches,
            lines=traffic.lines,
            seconds=traffic.seconds,
            skipped=traffic.skipped,
            drafted=traffic.drafted,
            accepted=traffic.accepted,
            notes=traffic.notes,
        )
    return observed_counts(document.load(Observation))


def observed_counts(observation: Observation) -> SourceCounts:
    """Return the counts of an observation."""
    others = sum(role.other_batches for role in observation.roles)
    rounded = sum(role.rounded_batches for role in observation.roles)
    notes = {
        f"{counted(rounded, 'step')} of rare shapes are listed as larger ones: an observation is bounded": rounded,
        f"{counted(others, 'step')} of shapes that the observation does not list are not counted": others,
    }
    return SourceCounts(
        format="observation",
        batches=tuple(
            traffic_count(batch.batch(role.role), batch.steps)
            for role in observation.roles
            for batch in role.batches
            if batch.steps and batch.num_reqs and batch.num_tokens
        ),
        seconds=observation.seconds or None,
        drafted=observation.drafted,
        accepted=observation.accepted,
        notes=tuple(note for note, steps in notes.items() if steps),
        worker=(
            (observation.engine, observation.model, observation.world_size, *speaker(observation)),
            observation.rank,
        ),
    )


def read_run_report(data: dict[str, object], options: SourceOptions) -> SourceCounts:
    """Return the forwards that ``run --format json`` printed; raises ``KeyError``, ``TypeError`` or ``ValueError``."""
    forwards, steps = data["forwards"], data["steps"]
    assert isinstance(forwards, list) and isinstance(steps, list)
    first, last = (round(share * len(steps)) for share in options.part)
    chosen = {step["index"] for step in steps[first:last]}
    batches = []
    for forward in forwards:
        if forward["step"] in chosen:
            query_len = forward["query_len"]
            batch = TrafficCount(
                role=Role(forward["role"]),
                num_reqs=int(forward["num_reqs"]),
                num_tokens=int(forward["num_tokens"]),
                query_len=query_len,
                past_prompt=query_len is not None,
                count=int(forward["repeats"]),
            )
            batches.append(batch)
    seconds = sum(float(step["seconds"]) for step in steps[first:last])
    return SourceCounts(
        format="run report",
        batches=tuple(batches),
        seconds=round(seconds, 6) or None,
        notes=("accepted drafts by position are not in a run report",) if any(s["drafted"] for s in steps) else (),
    )
