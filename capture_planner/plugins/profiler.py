"""What measures a profile: the seam between the tuner's command ``profile`` and the runner, which has torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

import attrs

from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile


class Progress(Protocol):
    """Shows how far a run is."""

    def __call__(self, task: str, total: int) -> AbstractContextManager[Callable[[str], None]]:
        """Show a task of ``total`` parts; what it yields is called after each, with its name."""


@attrs.frozen(kw_only=True)
class ProfileSettings:
    """Options of a profile."""

    model: Path | None = None
    """Folder or configuration; None: a Llama of the plan's numbers with random weights."""
    seed: int = 0
    seconds: float = 60.0
    """For measuring; loading and compiling the model is apart. A size that was begun is finished."""
    context: int = 512
    """Tokens in the KV cache of each request."""
    page_size: int | None = None
    """Tokens per KV-cache page; None: 64 on a GPU, 16 on a CPU."""
    pages: int | None = None
    """Pages of the KV cache; None: enough for every request, within memory."""
    entries: bool = False
    """True to measure the sizes of the plan's graphs in any case, besides those that are looked for."""
    # These two admit a plan that would be refused, as the options of the same names do.
    any_environment: bool = False
    any_plan: bool = False
    threads: int = 1
    """CPU threads per operator."""
    command: str = ""
    """The command line, for the file."""


@runtime_checkable
class Profiler(Protocol):
    """Measures on this machine."""

    def machine(self) -> Environment | None:
        """Return this machine where it has a GPU; None: without one, a spec is planned for the processor."""

    def profile(self, plan: Plan, settings: ProfileSettings, progress: Progress) -> Profile:
        """Measure what passes and graphs of each size cost, at the plan's sizes and at others, with installed backends.

        An interruption ends in a profile of what was measured before it; its notes say so, from ``interrupted`` on.
        Raises ``RunError`` or ``BackendError`` where the plan cannot be executed here.
        """
