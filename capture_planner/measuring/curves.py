"""Measured times as the curves of a profile, and the notes that belong to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from capture_planner.measuring.staircase import SPREAD, Timing, gaps
from capture_planner.modes import GraphMode
from capture_planner.planning.costs import Family
from capture_planner.records.profile import CostCurve, family_name
from capture_planner.records.text import counted

Times = Mapping[Family, Mapping[int, Timing]]
"""Timings by family, eager passes among them, and padded tokens."""


def curves_of(times: Times) -> tuple[CostCurve, ...]:
    """Return a curve for each family; no size takes less than a smaller one (a running maximum)."""
    return tuple(
        CostCurve(
            role=role,
            mode=mode,
            query_len=query_len,
            draft_steps=draft_steps,
            tokens=tuple(sizes),
            milliseconds=tuple(accumulate((round(timing.milliseconds, 6) for timing in sizes.values()), max)),
        )
        for (role, mode, query_len, draft_steps), sizes in _by_name(times)
    )


def _by_name(times: Times) -> Iterator[tuple[Family, dict[int, Timing]]]:
    """Yield the families that have times, by name, each with its sizes in order."""
    for family in sorted(times, key=lambda family: family_name(*family)):
        if times[family]:
            yield family, dict(sorted(times[family].items()))


def largest_spread(times: Times) -> float | None:
    """Return the largest spread over the repeats of a size; None without sizes."""
    spreads = [timing.spread for sizes in times.values() for timing in sizes.values()]
    return round(max(spreads), 4) if spreads else None


def time_notes(times: Times) -> Iterator[str]:
    """Yield what a reader of the curves must know: sizes that did not settle, and those that larger ones beat."""
    spreads = [timing.spread for sizes in times.values() for timing in sizes.values()]
    unsettled = [spread for spread in spreads if spread >= SPREAD]
    if unsettled:
        subject = f"{len(unsettled)} of {counted(len(spreads), 'size')}"
        yield f"the repeats of {subject} spread by {SPREAD:.0%} or more, {max(unsettled):.0%} at most"
    for family, sizes in _by_name(times):
        yield from _beaten(family_name(*family), {size: timing.milliseconds for size, timing in sizes.items()})


def _beaten(name: str, times: Mapping[int, float]) -> Iterator[str]:
    """Yield a note on the sizes that take longer than a larger one, beyond the noise."""
    sizes, slower = list(times), []
    for index, size in enumerate(sizes[:-1]):
        best = min(sizes[index + 1 :], key=times.__getitem__)
        if times[best] * (1 + SPREAD) < times[size]:
            slower.append(f"{size} tokens ({times[size]:.3f} ms) than {best} ({times[best]:.3f} ms)")
    if slower:
        yield f"{name}: slower {', '.join(slower[:4])}" + (f", and {len(slower) - 4} more" if len(slower) > 4 else "")


def in_tokens(times: Times) -> Times:
    """Return times by padded tokens, of times by size: requests of decodes, tokens of mixed batches."""
    return {
        family: {size * (family[2] or 1): timing for size, timing in by_size.items()}
        for family, by_size in times.items()
    }


def open_gaps(times: Times) -> Iterator[str]:
    """Yield a note for each family of graphs whose steps were not all found, of times by size."""
    plain = {family: {size: timing.milliseconds for size, timing in sizes.items()} for family, sizes in times.items()}
    plain = {family: sizes for family, sizes in plain.items() if family[1] is not GraphMode.NONE}
    by_family: dict[Family, list[tuple[int, int, float]]] = {}
    for gap in gaps(plain):
        by_family.setdefault(gap.key, []).append((gap.low, gap.high, gap.rise))
    for family, found in by_family.items():
        low, high, rise = found[0]
        unit = "requests" if family[2] else "tokens"
        yield (
            f"{family_name(*family)}: {counted(len(found), 'interval')} may have a step that was not found; the "
            f"largest rises by {rise:.0%} from {low} to {high} {unit}"
        )
