"""Targets for the figures of a bench.

They are stated for a model of 0.6 billion parameters on an H100; elsewhere they are a yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.bench.record import BenchReport, TargetVerdict
from capture_planner.modes import Role
from capture_planner.records.text import counted

STEP_OF_BARE = 1.08
"""Most that a decode step may take, relative to its bare graphs."""
OF_TRANSFORMERS = 5.0
"""Least throughput, relative to transformers."""
OF_STOCK = 0.5
"""Most host time of a preparation, relative to the library's own plan call."""
PREPARATION = 60e-6
"""Most host seconds of a preparation without a plan on the host, at ``MANY`` requests."""
MANY = 256
OVER_SINGLE, OVER_EAGER = 1.3, 4.0
"""Least speed-up of a draft chain in one graph."""
OF_BARE_LOOP = 1.1
"""Most seconds and bytes of a capture, relative to a bare loop."""


def verdicts(report: BenchReport) -> Iterator[TargetVerdict]:
    """Yield a verdict for each target whose figure was measured."""
    for decode in report.decode:
        subject = f"step of {counted(decode.num_reqs, 'request')} by its bare graphs"
        yield _at_most("decode", subject, STEP_OF_BARE, decode.overhead)
    if report.throughput is not None and report.throughput.gain is not None:
        subject = "tokens per second by those of transformers"
        yield _at_least("throughput", subject, OF_TRANSFORMERS, report.throughput.gain)
    for row in report.preparation:
        if row.role is Role.TARGET and row.of_stock is not None:
            subject = f"preparation of {counted(row.num_reqs, 'request')} by a stock plan call"
            yield _at_most("preparation", subject, OF_STOCK, row.of_stock)
        elif row.role is Role.TARGET and row.num_reqs == MANY:
            subject = f"preparation of {MANY} requests"
            yield _at_most("preparation", subject, PREPARATION * 1e6, row.step * 1e6, unit="us")
    for chain in report.chain:
        if chain.over_single is not None:
            subject = f"chain of {counted(chain.steps, 'draft decode')}, {counted(chain.num_reqs, 'request')}"
            yield _at_least(
                "chain", f"{subject}: times faster than single steps replayed", OVER_SINGLE, chain.over_single
            )
            yield _at_least("chain", f"{subject}: times faster than eager", OVER_EAGER, chain.over_eager)
    if report.capture is not None:
        ratios = {"seconds": report.capture.of_seconds, "MiB per graph": report.capture.of_memory}
        for unit, ratio in ratios.items():
            if ratio is not None:
                yield _at_most("capture", f"{unit} by a bare torch.cuda.graph loop", OF_BARE_LOOP, ratio)


def _at_most(figure: str, subject: str, target: float, reached: float, unit: str = "") -> TargetVerdict:
    return TargetVerdict(figure=figure, what=subject, wanted=target, reached=reached, at_most=True, unit=unit)


def _at_least(figure: str, subject: str, target: float, reached: float) -> TargetVerdict:
    return TargetVerdict(figure=figure, what=subject, wanted=target, reached=reached, at_most=False)
