"""Prometheus text: the last scrape in it, read by the engine that has metrics of such names."""

from __future__ import annotations

import re

import attrs

from capture_planner.errors import InvalidDocument, InvalidValue
from capture_planner.measuring.traffic.formats import Labels, MetricFormat
from capture_planner.measuring.traffic.source import MAX_SAMPLES, SourceCounts

NAME = "Prometheus text"
MOST = 1e18
"""What no counter reaches; a value may also be NaN."""

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})? +([-+.\w]+)(?: +-?\d+)?")
_LABEL = re.compile(r"(?<!\w)(\w+)=\"((?:[^\"\\]|\\.)*)\"")


def read_prometheus(text: str, name: str, metrics: MetricFormat) -> SourceCounts:
    """Return the counts of the last scrape in a text; raises ``InvalidDocument`` where it has no batch shapes."""
    samples: dict[tuple[str, Labels], float] = {}
    skipped: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            sample = _sample(line.strip())
            if sample is None:
                skipped.append(f"{name}:{number}: {line[:160]!a}")
            else:
                samples[sample[0]] = sample[1]
    try:
        counts = metrics.count(samples)
    except InvalidValue as error:
        raise InvalidDocument(
            attrs.evolve(problem, file=name, message=f"{NAME}: {problem.message}") for problem in error.problems
        ) from None
    return SourceCounts(
        format=NAME,
        batches=tuple(counts.batches),
        skipped=len(skipped),
        samples=tuple(skipped[:MAX_SAMPLES]),
        drafted=counts.drafted,
        accepted=counts.accepted,
        notes=counts.notes,
    )


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
