"""``traffic``: logs, metrics, observations and traces become a traffic file; and the options about such sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from capture_planner import codec
from capture_planner.analysis.arrivals import STEP_MS, Pace
from capture_planner.cli import options
from capture_planner.cli.common import Output, progress_bars, record_text
from capture_planner.cli.options import POSITIVE, SHARES, F, FiniteRange, ParsedText, option
from capture_planner.engines.logs import read_traffic
from capture_planner.measuring.traffic import SourceOptions, TraceLimits, TrafficSource, fitting
from capture_planner.measuring.traffic.source import BLOCK, Advance
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import every_size
from capture_planner.records.batch_space import Deployment
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Limits
from capture_planner.report.traffic import traffic_json, traffic_report


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


def load_options(command: F) -> F:
    """Declare what sources of traffic may not say."""
    options = (
        click.option("--query-len", type=POSITIVE, help="Tokens of each decode (1 + K), where a source has none."),
        option("--decode-log-interval", type=POSITIVE, default=40, help="SGLang's own option: decodes for one line."),
        click.option(
            "--step-ms",
            type=FiniteRange(0.001, 1e6),
            help=f"For traces of requests: time of each step. Default: by the profile, or without one {STEP_MS:g}.",
        ),
        click.option(
            "--acceptance",
            type=SHARES,
            help="For traces of requests: the share of steps in which drafts 0 to i are all accepted, for each i. "
            "Default: the spec's or the profile's, or none.",
        ),
    )
    # The decorator that is applied last is listed first.
    for declare in reversed(options):
        command = declare(command)
    return command


def source_options(values: Mapping[str, Any], part: tuple[float, float] = (0.0, 1.0)) -> SourceOptions:
    """Return what the options of ``load_options`` say."""
    return SourceOptions(
        query_len=values["query_len"],
        decode_log_interval=values["decode_log_interval"],
        pace=None if values["step_ms"] is None else Pace.constant(values["step_ms"]),
        acceptance=values["acceptance"],
        part=part,
    )


@click.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@options.output("Write the traffic to FILE.")
@load_options
@click.option("--spec", metavar="SPEC", help="Limits and speculation from this spec: for traces, and for drafters.")
@click.option("--max-num-reqs", type=POSITIVE, help="For traces without --spec: most requests in a batch.")
@click.option("--max-num-tokens", type=POSITIVE, help="For traces without --spec: most tokens in a batch.")
@click.option("--profile", "profile_file", metavar="FILE", help="For traces: time of each step, with every size.")
@click.option(
    "--part",
    type=ParsedText("FIRST:LAST", _part),
    default="0:1",
    help="Read a part of each source, as shares of a log's length or of a trace's time: 0:0.667.",
)
@options.progress
@options.reports()
def traffic(
    sources: tuple[str, ...],
    output: Path | None,
    spec: str | None,
    max_num_reqs: int | None,
    max_num_tokens: int | None,
    profile_file: str | None,
    part: tuple[float, float],
    progress: bool | None,
    to: Output,
    **values: Any,
) -> None:
    """Count how often each batch shape ran, by role, and write it as a traffic file.

    SOURCE is recognised by its content: logs of vLLM (iteration lines, CUDA-graph tables), SGLang and TensorRT-LLM,
    forward-pass metrics as JSON lines, Prometheus text, observations, run reports, traffic files, and traces of
    requests: CSV as of Azure or BurstGPT, JSON lines as of Mooncake. It may be compressed by gzip; - is standard
    input. The counts of several sources add up.

    JSON is {"steps", "seconds", "skipped", "batches": [{"role", "num_reqs", "num_tokens", "query_len", "count"}]},
    with null for what the sources do not say.
    """
    profile = None if profile_file is None else codec.load_profile(profile_file)
    deployment = _deployment(spec, max_num_reqs, max_num_tokens, profile)
    pace = None
    if profile is not None:
        step_time = every_size(Costs(profile), deployment or TraceLimits())
        pace = Pace(step_time, f"each step takes what {profile_file} says of graphs of every size")
    chosen = source_options(values, part).completed(deployment, pace, profile)
    with reading_bar(sources, progress) as advance:
        counted, unreadable = read_traffic(sources, chosen, advance)
    for line in unreadable:
        click.echo(f"skipped: {line}", err=True)
    written = counted if output is None else fitting(counted)
    # What the file leaves out is noted; the report has all of it.
    notes = written.notes[len(counted.notes) :]
    to.show(lambda: traffic_json(counted, unreadable, notes), partial(traffic_report, written))
    if output is not None:
        to.write(output, lambda: record_text(output, written))


def _deployment(
    spec: str | None, max_num_reqs: int | None, max_num_tokens: int | None, profile: Profile | None
) -> Deployment | None:
    """Return the spec, or the limits that were given with the profile's speculation; None without any."""
    if spec is not None:
        if max_num_reqs is not None or max_num_tokens is not None:
            raise click.UsageError("--spec has the limits; omit --max-num-reqs and --max-num-tokens.")
        return codec.load_spec(spec)
    if max_num_reqs is None and max_num_tokens is None:
        return None
    if max_num_reqs is None or max_num_tokens is None:
        raise click.UsageError("Give both --max-num-reqs and --max-num-tokens, or --spec.")
    limits = Limits(max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens)
    return TraceLimits(limits=limits, speculative=None if profile is None else profile.speculative)
