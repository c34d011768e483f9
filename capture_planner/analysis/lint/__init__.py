"""Lint: rules CP001 and on, over plans (and over specs, by planning them first).

Each rule comes from a bug reported in public, and names the threads. Importing this package registers
them all; ``lint`` runs them.
"""

from capture_planner.analysis.lint import coverage_rules, mode_rules, resource_rules, shape_rules
from capture_planner.analysis.lint.core import RULES, BugClass, Diagnostic, Finding, Rule, Severity, lint

for _code in sorted(RULES):  # modules register in the order of import
    RULES[_code] = RULES.pop(_code)

__all__ = [
    "RULES",
    "BugClass",
    "Diagnostic",
    "Finding",
    "Rule",
    "Severity",
    "coverage_rules",
    "lint",
    "mode_rules",
    "resource_rules",
    "shape_rules",
]
