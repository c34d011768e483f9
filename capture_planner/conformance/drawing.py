"""How examples are drawn: from a seed alone, without a word, and nothing kept."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, Verbosity, settings


def drawn(examples: int, *, steps: int = 50, shrink: bool = True) -> settings:
    """Return the settings of a search for so many examples, those of a state machine of at most ``steps``.

    ``shrink``: a failing one is made small.
    """
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
