"""The targets that the figures are held against.

They are stated for a model of 0.6 billion parameters on an H100; on anything else they are a ruler.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.bench.record import BenchReport, Chain, Preparation, Verdict
from capture_planner.modes import Role
from capture_planner.records.text import counted

STEP_OF_BARE = 1.08
"""Most that a decode step may take of its bare graphs."""
OF_TRANSFORMERS = 5.0
"""Least throughput by that of transformers."""
OF_STOCK = 0.5
"""Most host time of a preparation by the library's own plan call."""
PREPARATION = 60e-6
"""Most host seconds of a preparation where nothing is planned on the host, at ``MANY`` requests."""
MANY = 256
OVER_SINGLE, OVER_EAGER = 1.3, 4.0
"""Least gain of a draft chain in one graph."""
OF_BARE_LOOP = 1.1
"""Most seconds and bytes of a capture by those of a bare loop."""


def verdicts(report: BenchReport) -> tuple[Verdict, ...]:
    """Return each target for which there is a figure."""
    return (
        *_decode(report),
        *_throughput(report),
        *_preparation(report.preparation),
        *(verdict for chain in report.chain for verdict in _chain(chain)),
        *_capture(report),
    )


def _decode(report: BenchReport) -> Iterator[Verdict]:
    for row in report.decode:
        yield Verdict(
            figure="decode",
            what=f"step of {counted(row.num_reqs, 'request')} by its bare graphs",
            wanted=STEP_OF_BARE,
            reached=row.overhead,
            at_most=True,
        )


def _throughput(report: BenchReport) -> Iterator[Verdict]:
    if report.throughput is not None and report.throughput.gain is not None:
        yield Verdict(
            figure="throughput",
            what="tokens per second by those of transformers",
            wanted=OF_TRANSFORMERS,
            reached=report.throughput.gain,
            at_most=False,
        )


def _preparation(rows: tuple[Preparation, ...]) -> Iterator[Verdict]:
    for row in rows:
        if row.role is not Role.TARGET:
            continue
        if row.of_stock is not None:
            yield Verdict(
                figure="preparation",
                what=f"preparation of {counted(row.num_reqs, 'request')} by a stock plan call",
                wanted=OF_STOCK,
                reached=row.of_stock,
                at_most=True,
            )
        elif row.num_reqs == MANY:
            yield Verdict(
                figure="preparation",
                what=f"preparation of {MANY} requests",
                wanted=PREPARATION * 1e6,
                reached=row.step * 1e6,
                at_most=True,
                unit="us",
            )


def _chain(row: Chain) -> Iterator[Verdict]:
    if row.over_single is not None:
        for name, wanted, reached in (
            ("single steps replayed", OVER_SINGLE, row.over_single),
            ("eager", OVER_EAGER, row.over_eager),
        ):
            yield Verdict(
                figure="chain",
                what=f"chain of {counted(row.steps, 'draft decode')}, {counted(row.num_reqs, 'request')}: "
                f"times faster than {name}",
                wanted=wanted,
                reached=reached,
                at_most=False,
            )


def _capture(report: BenchReport) -> Iterator[Verdict]:
    found = report.capture
    if found is None:
        return
    for name, reached in (("seconds", found.of_seconds), ("MiB per graph", found.of_memory)):
        if reached is not None:
            yield Verdict(
                figure="capture",
                what=f"{name} by a bare torch.cuda.graph loop",
                wanted=OF_BARE_LOOP,
                reached=reached,
                at_most=True,
            )
