"""Prometheus text: vLLM's histogram of tokens per step, and accepted drafts by position (0.33.0, v1/metrics)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

from capture_planner.errors import InvalidDocument, Problem
from capture_planner.measuring.traffic.source import SourceCounts
from capture_planner.modes import Role
from capture_planner.records.traffic import TrafficCount

RECOGNISED = re.compile(rb"(?m)^(?:# (?:HELP|TYPE) )?(?:vllm|sglang):\w+[ {]")

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})? +([-+.\w]+)(?: +-?\d+)?")
_LABEL = re.compile(r"(\w+)=\"((?:[^\"\\]|\\.)*)\"")
_TOKENS = "vllm:iteration_tokens_total_bucket"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"

BUCKETS = (*range(1, 17), *range(24, 257, 8), *range(272, 513, 16), 1024, 2048, 4096, 8192, 16384)
"""Bounds for ``--custom-histogram-buckets`` of vLLM that are as fine as its list of capture sizes."""

Labels = tuple[tuple[str, str], ...]


def read_prometheus(text: str, name: str) -> SourceCounts:
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
    steps, above = _histogram(samples)
    if not steps:
        passes = any(metric.startswith("sglang:cuda_graph_passes_total") for metric, _ in samples)
        reason = "SGLang counts passes by mode, which are no batch shapes" if passes else "no histogram of batch shapes"
        remedy = f"scrape a vLLM that ran steps ({_TOKENS}), or give the engine's log"
        raise InvalidDocument([Problem(file=name, message=f"Prometheus text: {reason}", remedy=remedy)])
    drafted, accepted = _acceptance(samples)
    setting = json.dumps({"iteration_tokens": BUCKETS}, separators=(",", ":"))
    notes = [
        "the histogram has tokens only, and counts accepted tokens: under speculation a step runs more than it shows",
        f"its buckets are coarse: each step counts as the upper bound of its bucket, one of "
        f"{', '.join(map(str, steps))}; finer ones: vllm serve --custom-histogram-buckets '{setting}'",
    ]
    if above:
        notes.append(f"{above} steps above the last bucket are not counted")
    return SourceCounts(
        format="Prometheus text",
        batches=tuple(
            TrafficCount(role=Role.TARGET, num_tokens=tokens, count=count) for tokens, count in steps.items()
        ),
        skipped=len(skipped),
        samples=tuple(skipped[:5]),
        drafted=drafted,
        accepted=accepted,
        notes=tuple(notes),
    )


def _sample(line: str) -> tuple[tuple[str, Labels], float] | None:
    """Return name, labels and value of a line of the text format; None where it is none."""
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return None
    name, labels, value = match.groups()
    try:
        return (name, tuple(_LABEL.findall(labels or ""))), float(value)
    except ValueError:
        return None


def _histogram(samples: dict[tuple[str, Labels], float]) -> tuple[dict[int, int], int]:
    """Return how many steps each bucket has, over all engines, and how many are above the last."""
    series: dict[Labels, dict[float, float]] = {}
    for (metric, labels), value in samples.items():
        if metric == _TOKENS:
            bound = float(dict(labels).get("le", "nan"))
            series.setdefault(tuple(label for label in labels if label[0] != "le"), {})[bound] = value
    steps: Counter[int] = Counter()
    above = 0
    for buckets in series.values():
        before = 0.0
        for bound, value in sorted(buckets.items()):
            count, before = round(value - before), value
            if bound == float("inf"):
                above += count
            elif count > 0 and bound >= 1:
                steps[int(bound)] += count
    return dict(sorted(steps.items())), above


def _acceptance(samples: dict[tuple[str, Labels], float]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    drafts = round(sum(value for (metric, _), value in samples.items() if metric == _DRAFTS))
    accepted: Counter[int] = Counter()
    for position, value in _positions(samples):
        accepted[position] += round(value)
    most = max(accepted, default=-1) + 1
    return (drafts,) * most, tuple(accepted[position] for position in range(most))


def _positions(samples: dict[tuple[str, Labels], float]) -> Iterator[tuple[int, float]]:
    for (metric, labels), value in samples.items():
        position = dict(labels).get("position", "")
        if metric == _ACCEPTED and position.isdecimal() and int(position) < 64:
            yield int(position), value
