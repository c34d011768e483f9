"""Verdict: whether what a plan gains is more than noise."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import attrs

from capture_planner.engines.tuning.judgement import Pricing, SideFigures, judged
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.text import counted

LEAST_STEPS = 1000
"""Fewer steps to judge on promise nothing."""

SPREAD = 0.02
"""Spread of measured times where a profile does not state its own: ``profile`` repeats until it is below that."""

SLOWER = 0.005
"""Steps that take longer by more than this share are too high a price for memory or start-up time."""

MEMORY_ERROR, SECONDS_ERROR = 0.10, 0.15
"""How far predictions of memory and of capture time may be off: smaller savings are none."""

SUBJECTS = {"mean": "mean step", "regret": "worst step, against a graph of its own size,"}
"""What an objective is about; a percentile goes by its name."""

REST = "memory and start-up stay about the same"

_NORMAL = 1.96
"""Standard errors on each side of a mean that hold 95 % of all cases."""


class TuneVerdict(enum.StrEnum):
    """What to do."""

    CHANGE = "change"
    KEEP = "keep"
    TOO_LITTLE_DATA = "too_little_data"


@attrs.frozen(kw_only=True)
class Noise:
    """By how much the difference of two mean step times may be wrong, in milliseconds."""

    measuring: float
    """From the spread of the profile, over the steps that run on different graphs."""
    sampling: float
    """From the number of steps: the half width of a 95 % interval, as if steps were independent."""

    @property
    def total(self) -> float:
        """Both: they have nothing to do with each other."""
        return math.hypot(self.measuring, self.sampling)


def noise_between(
    today: Pricing, proposed: Pricing, steps: Mapping[Batch, int], spread: float, objective: str = "mean"
) -> Noise:
    """Return the noise in the difference between two sides that are judged on the same steps.

    Where both run a batch on the same graphs, an error of the profile is in both, and cancels out. Of an objective that
    is one step's, such as a percentile, that step may be off by the whole spread.
    """
    total = sum(steps.values())
    if objective != "mean":
        return Noise(measuring=spread * judged(today, steps, objective=objective).objective, sampling=0.0)
    different = sums = squares = 0.0
    for batch, count in steps.items():
        before, after = today.step(batch), proposed.step(batch)
        gain = before.milliseconds - after.milliseconds
        sums += gain * count
        squares += gain * gain * count
        if any(_shape(before.answers[role]) != _shape(after.answers.get(role)) for role in before.answers):
            different += max(before.milliseconds, after.milliseconds) * count
    mean = sums / total
    variance = max(squares / total - mean * mean, 0.0)
    return Noise(measuring=spread * different / total, sampling=_NORMAL * math.sqrt(variance / total))


def _shape(entry: Entry | None) -> object:
    """Return what of a graph decides its time."""
    return entry and (entry.mode, entry.num_tokens, entry.query_len, entry.draft_steps)


def verdict_on(
    today: SideFigures, proposed: SideFigures, noise: Noise, objective: str = "mean"
) -> tuple[TuneVerdict, str]:
    """Return the verdict, and why, in a sentence."""
    gain = today.objective - proposed.objective
    share, error = gain / today.objective, noise.total / today.objective
    savings = _savings(today, proposed)
    parts = (noise.measuring / today.objective, noise.sampling / today.objective)
    bound = f"noise of {error:.1%} (profile {parts[0]:.1%}, number of steps {parts[1]:.1%})"
    subject = f"the {subject_of(objective)} takes"
    slower = proposed.mean_step_ms / today.mean_step_ms - 1
    if gain > noise.total:
        more = f"; the plan also saves {', '.join(savings)}" if savings else ""
        costs = _savings(proposed, today)
        more += f"; it takes {', '.join(costs)} more" if costs else ""
        more += f"; the mean step takes {slower:.1%} more time" if slower > SLOWER else ""
        return TuneVerdict.CHANGE, f"{subject} {share:.1%} less time, more than the {bound}{more}"
    if share < -SLOWER:
        return TuneVerdict.KEEP, f"{subject.replace('takes', 'would take')} {-share:.1%} more time"
    if slower > SLOWER:
        return TuneVerdict.KEEP, f"{subject} the same time within the {bound}, and the mean step {slower:.1%} more"
    if savings:
        same = f"{subject} the same time within the {bound}"
        return TuneVerdict.CHANGE, f"the plan saves {', '.join(savings)}, and {same}"
    if share >= 0.0005:
        return (TuneVerdict.KEEP, f"the gain of {share:.1%} is within the {bound}; {REST}")
    return TuneVerdict.KEEP, f"no table of sizes is faster; {REST}"


def subject_of(objective: str) -> str:
    """Return what an objective is about, in words."""
    return SUBJECTS.get(objective, f"{objective} step")


def _savings(today: SideFigures, proposed: SideFigures) -> list[str]:
    """Return the savings that are larger than the error of their prediction, in words."""
    words = []
    if today.memory_mib - proposed.memory_mib > MEMORY_ERROR * today.memory_mib:
        words.append(f"{today.memory_mib - proposed.memory_mib:,.0f} MiB")
    if today.seconds - proposed.seconds > SECONDS_ERROR * today.seconds:
        words.append(f"{today.seconds - proposed.seconds:.1f} s of start-up")
    if words and today.graphs > proposed.graphs:
        words.insert(0, counted(today.graphs - proposed.graphs, "graph"))
    return words
