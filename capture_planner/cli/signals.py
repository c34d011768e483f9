"""SIGTERM as an interruption: what a scheduler or ``docker stop`` sends ends a run as Ctrl-C does, with its report."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell gives it."""

TERMINATED = 143
"""Exit code after SIGTERM, as a shell gives it."""


class Interruption:
    """Which signal interrupted the program."""

    code = INTERRUPTED
    """The exit code that belongs to it."""

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """Raise ``KeyboardInterrupt``; a second signal ends the process at once."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.code = TERMINATED
        raise KeyboardInterrupt


@contextmanager
def terminable() -> Iterator[Interruption]:
    """Let SIGTERM interrupt what runs inside the context."""
    interruption = Interruption()
    before = signal.signal(signal.SIGTERM, interruption.terminate)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_interrupted() -> None:
    """End a command that was interrupted, once its report is out."""
    context = click.get_current_context()
    context.exit(context.ensure_object(Interruption).code)
