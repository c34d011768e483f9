"""``--ignore``: the codes of rules to leave out."""

from __future__ import annotations

import difflib

from capture_planner.analysis.lint import RULES, Severity
from capture_planner.cli.options import ParsedText
from capture_planner.engines.check import ENGINE_RULES
from capture_planner.engines.observed_check import OBSERVED_RULES


def _codes(text: str) -> tuple[str, ...]:
    codes = tuple(code.strip().upper() for code in text.split(","))
    rules = {**RULES, **ENGINE_RULES, **OBSERVED_RULES}
    for code in codes:
        if code not in rules:
            near = difflib.get_close_matches(code, rules, n=1)
            raise ValueError(f"no rule is called {code}" + (f"; did you mean {near[0]}?" if near else "."))
        if rules[code].severity is Severity.ERROR:
            raise ValueError(f"{code} ({rules[code].name}) is an error, and errors are not ignored.")
    return codes


IGNORED = ParsedText("CODE,...", _codes)
"""Codes of notes and warnings, separated by commas."""
