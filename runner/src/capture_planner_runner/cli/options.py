"""Options of the commands that execute, and the values that they take."""

from __future__ import annotations

from collections.abc import Iterable

import click

from capture_planner.cli.options import SHARES, ParsedText

compiling = click.option(
    "--compile/--no-compile", default=None, help="Compile the layers, once for all sizes. Default: on a GPU only."
)
proposals = click.option(
    "--proposals",
    type=SHARES,
    help="Synthetic draft lengths, by --seed: the share of steps in which the drafter proposes drafts 0 to i, for each "
    "i; what it makes beyond is not verified. Default: all.",
)
acceptance = click.option(
    "--acceptance",
    type=SHARES,
    help="Synthetic acceptance, by --seed: the probability that drafts 0 to i are all accepted, for each i, as vLLM's "
    "synthetic_acceptance_rates. It ignores what the target says: the tokens are then not the model's.",
)


def whole_numbers(text: str, parts: Iterable[str], expected: str) -> tuple[int, ...]:
    """Return the parts of a text as numbers; raises ``ValueError`` with what was ``expected``."""
    try:
        return tuple(map(int, parts))
    except ValueError:
        raise ValueError(f"{text!r} is not {expected}.") from None


def _numbers(text: str) -> tuple[int, ...]:
    numbers = whole_numbers(text, text.split(","), "a comma-separated list of whole numbers")
    if min(numbers) < 1 or max(numbers) > 1 << 20:
        raise ValueError(f"{text!r}: each number must be from 1 to {1 << 20}.")
    return tuple(sorted(set(numbers)))


def _range(text: str) -> tuple[int, ...]:
    low, colon, high = text.partition(":")
    ends = whole_numbers(text, (low, high if colon else low), "a whole number or LOW:HIGH")
    if not 1 <= ends[0] <= ends[1]:
        raise ValueError(f"{text!r}: LOW must be at least 1 and at most HIGH.")
    return ends


NUMBERS = ParsedText("N,...", _numbers)
"""Comma-separated whole numbers of at least 1: each once, in ascending order."""

RANGE = ParsedText("N|LOW:HIGH", _range)
"""Two bounds, whole numbers of at least 1."""
