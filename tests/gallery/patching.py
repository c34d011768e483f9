"""What the mutants of the runner are made with: functions replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from capture_planner_runner.execution.role import RoleRun
from gallery.core import replaced

Change = tuple[object, str, Callable[[Any], Any]]
"""A function's owner, its name there, and what makes the wrong one of the right one."""

Patch = Callable[[], AbstractContextManager[None]]


def patched(*changes: Change) -> Patch:
    """Return a patch that makes all of these changes."""

    @contextmanager
    def patch() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, make in changes:
                stack.enter_context(replaced(owner, name, make))
            yield

    return patch


def nothing(original: Callable[..., object]) -> Callable[..., None]:
    """Make a function that does nothing in the place of another."""

    def done(*given: object, **named: object) -> None:
        return None

    return done


GUARDS_OFF: Change = (RoleRun, "check_guards", nothing)
"""As ``Options.trust``, which engines run with: nothing is compared before a replay."""
