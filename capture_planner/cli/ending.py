"""How a program of ours ends: every error a user can make as text and exit code 1, an interruption with 130 or 143.

SIGTERM, which a scheduler or ``docker stop`` sends, ends a run as Ctrl-C does, with its report.
"""

from __future__ import annotations

import _thread
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from capture_planner.errors import CapturePlannerError, InvalidValue
from capture_planner.report.printable import printable, printable_lines

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell gives it."""

TERMINATED = 143
"""Exit code after SIGTERM, as a shell gives it."""


class Interruption:
    """Which signal interrupted the program."""

    code = INTERRUPTED
    """The exit code that belongs to it."""

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """Raise ``KeyboardInterrupt``; a second signal ends the process at once, with a line."""
        self.code = TERMINATED
        # The thread below acts on the next one; without a handler it would not reach the pipe.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        # Handlers run in the main thread, which may hang in a library; the pipe gets a signal's number in any case.
        reads, writes = os.pipe()
        # set_wakeup_fd takes no descriptor that blocks.
        os.set_blocking(writes, False)
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        threading.Thread(target=_end_at_once, args=(reads,), daemon=True).start()
        raise KeyboardInterrupt


def _end_at_once(signals: int) -> None:
    """Wait for SIGTERM, and end the process."""
    while number := os.read(signals, 1):
        if number[0] == signal.SIGTERM:
            os.write(2, b"terminated\n")
            # Nothing is cleaned up: the main thread may hang.
            os._exit(TERMINATED)


def _interrupt_again() -> None:
    time.sleep(0.01)
    # A signal, not _thread.interrupt_main(), which would not wake the main thread from a system call.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextmanager
def terminable() -> Iterator[Interruption]:
    """Let SIGTERM interrupt what runs inside the context."""
    interruption = Interruption()
    before, hook = signal.signal(signal.SIGTERM, interruption.terminate), sys.unraisablehook

    def deliver(ignored: sys.UnraisableHookArgs) -> None:
        # Python ignores what is raised in a destructor, as torch has them: a single Ctrl-C would be lost.
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(_interrupt_again, ())
        else:
            hook(ignored)

    sys.unraisablehook = deliver
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.unraisablehook = hook


def exit_interrupted() -> None:
    """End a command that was interrupted, once its report is out."""
    context = click.get_current_context()
    context.exit(context.ensure_object(Interruption).code)


Say = Callable[[str], None]
"""Shows one line of an error."""


def say_error(line: str) -> None:
    """Show one line of an error on standard error."""
    click.echo(f"error: {printable_lines(line)}", err=True)


def exit_code_of(
    work: Callable[[], object], *, as_json: bool, say: Say = say_error, interruption: Interruption | None = None
) -> int:
    """Return the exit code of what ``work`` returns or raises, once its error is shown.

    :param as_json: whether an error is printed as JSON, too.
    """
    code: object = 1
    interruption = interruption or Interruption()
    try:
        code = work()
    except click.exceptions.Exit as end:
        code = end.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = interruption.code
    except click.ClickException as error:
        # click repeats arguments as they are, control characters included.
        error.show(file=(text := io.StringIO()))
        click.echo(printable_lines(text.getvalue()), nl=False, err=True)
    except CapturePlannerError as error:
        _show(error, as_json=as_json, say=say)
        code = error.exit_code
    except BrokenPipeError:
        # The reader has gone, as ``head`` does; Python would complain again when it flushes at exit.
        sys.stderr.close()
    except OSError as error:
        say(f"{printable(str(error.filename or 'standard output'))}: {error.strerror or error}")
    # click returns what a command returned, or the code of ``ctx.exit``.
    return code if isinstance(code, int) else 0


def _show(error: CapturePlannerError, *, as_json: bool, say: Say) -> None:
    problems = error.problems if isinstance(error, InvalidValue) else ()
    for line in [str(problem) for problem in problems] or [str(error)]:
        say(line)
    if as_json:
        # Not at the top: every start imports this module, and only an error needs the codec.
        from capture_planner.codec import dumps_json

        keep = ("message", "remedy", "file", "line", "column")
        listed: list[dict[str, Any]] = [
            {"path": list(p.path)} | {name: getattr(p, name) for name in keep} for p in problems
        ]
        click.echo(dumps_json({"errors": listed or [{"message": str(error)}]}))
