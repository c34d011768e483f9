"""Hypothesis settings of a search: random from a seed alone, silent, and without a database."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, Verbosity, settings


def search_settings(examples: int, *, steps: int = 50, shrink: bool = True) -> settings:
    """Return settings for so many examples; ``steps`` bounds a state machine's steps."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        stateful_step_count=steps,
    )
