"""How many examples a costly property takes."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def at_most(examples: int, **options: Any) -> settings:
    """Return settings with so many examples, or those of the profile where they are fewer."""
    return settings(max_examples=min(examples, settings().max_examples), **options)
