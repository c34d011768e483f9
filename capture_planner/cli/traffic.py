"""The command traffic: logs, metrics, observations and traces become a traffic file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import emit, emit_file, progress_bars, refuse_outputs
from capture_planner.cli.options import FILE, POSITIVE, ParsedText, option
from capture_planner.measuring.traffic import SourceOptions, TraceLimits, TrafficSource, fitting, read_traffic
from capture_planner.measuring.traffic.source import BLOCK, Advance
from capture_planner.records.batch_space import Deployment
from capture_planner.records.spec import Limits
from capture_planner.report.traffic import traffic_json, traffic_tables


def _part(text: str) -> tuple[float, float]:
    try:
        first, last = (float(word) for word in text.split(":"))
    except ValueError:
        raise ValueError(f"{text!r} is not FIRST:LAST.") from None
    if not 0 <= first < last <= 1:
        raise ValueError(f"{text!r}: expected two shares from 0 to 1, the first one below the second.")
    return first, last


@contextmanager
def reading_bar(sources: Sequence[str], visible: bool | None, times: int = 1) -> Iterator[Advance]:
    """Show how much of the sources is read; yields what counts bytes. Each is read so many ``times``."""
    total = times * sum(TrafficSource(path).size() for path in sources) // BLOCK + 1
    bytes_read = 0
    with progress_bars(visible)("reading", total) as advance:

        def count(read: int) -> None:
            nonlocal bytes_read
            for _ in range((bytes_read + read) // BLOCK - bytes_read // BLOCK):
                advance("")
            bytes_read += read

        yield count


@click.command(short_help="Count the batches of logs, metrics, observations or traces.")
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the traffic to FILE.")
@click.option("--query-len", type=POSITIVE, help="Tokens of each decode (1 + K), where a source does not have them.")
@option("--decode-log-interval", type=POSITIVE, default=40, help="SGLang's own option: decodes for one line.")
@click.option("--spec", metavar="SPEC", help="Limits and speculation from this spec: for traces, and for drafters.")
@click.option("--max-num-reqs", type=POSITIVE, help="For traces without --spec: most requests in a batch.")
@click.option("--max-num-tokens", type=POSITIVE, help="For traces without --spec: most tokens in a batch.")
@option("--step-ms", type=click.FloatRange(0.001), default=20.0, help="For traces: time of a step.")
@click.option(
    "--part",
    type=ParsedText("FIRST:LAST", _part),
    default="0:1",
    help="Read a part of each source, as shares of a log's length or of a trace's time: 0:0.667.",
)
@options.progress
@options.formats()
def traffic(
    sources: tuple[str, ...],
    output: Path | None,
    query_len: int | None,
    decode_log_interval: int,
    spec: str | None,
    max_num_reqs: int | None,
    max_num_tokens: int | None,
    step_ms: float,
    part: tuple[float, float],
    progress: bool | None,
    form: str,
) -> None:
    """Count how often each batch shape ran, by role, and write it as a traffic file.

    SOURCE is recognised by its content: logs of vLLM (iteration lines, CUDA-graph tables), SGLang and TensorRT-LLM,
    forward-pass metrics as JSON lines, Prometheus text, observations, run reports, traffic files, and CSV traces of
    requests. It may be compressed by gzip; - is standard input. The counts of several sources add up.

    JSON is {"steps", "seconds", "skipped", "batches": [{"role", "num_reqs", "num_tokens", "query_len", "count"}]},
    with null for what the sources do not say.
    """
    if output is not None:
        for source in sources:
            refuse_outputs(source, {"--output": output}, "a source")
    chosen = SourceOptions(
        query_len=query_len,
        decode_log_interval=decode_log_interval,
        deployment=_deployment(spec, max_num_reqs, max_num_tokens),
        step_seconds=step_ms / 1000,
        part=part,
    )
    with reading_bar(sources, progress) as advance:
        counted, unreadable = read_traffic(sources, chosen, advance)
    for line in unreadable:
        click.echo(f"skipped: {line}", err=True)
    written = counted if output is None else fitting(counted)
    notes = written.notes[len(counted.notes) :]
    emit(form, lambda: traffic_json(counted, unreadable, notes), partial(traffic_tables, written))
    emit_file(form, output, lambda: codec.dumps(written))


def _deployment(spec: str | None, max_num_reqs: int | None, max_num_tokens: int | None) -> Deployment | None:
    """Return the limits that were given, or None."""
    if spec is not None:
        if max_num_reqs is not None or max_num_tokens is not None:
            raise click.UsageError("--spec has the limits; omit --max-num-reqs and --max-num-tokens.")
        return codec.load_spec(spec)
    if max_num_reqs is None and max_num_tokens is None:
        return None
    if max_num_reqs is None or max_num_tokens is None:
        raise click.UsageError("Give both --max-num-reqs and --max-num-tokens, or --spec.")
    return TraceLimits(limits=Limits(max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens))
