"""The engine as a child process that behaves as if it had taken this process's place.

It has the same standard streams, terminal and process group. Signals that are sent to this process go on to it; those
that a terminal sends to the whole group (Ctrl-C) it gets by itself, once. Windows has no such signals, and none is sent
on there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from capture_planner.engines.launch import STARTED
from capture_planner.errors import EngineError

_FORWARDED = {
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
}
_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of prctl(2)."""
_POLLED = 0.5
"""Seconds between two looks at the engine while no signal comes in."""


_TOLD = {128 + getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
"""Exit codes of an engine that something outside ended on purpose."""


@attrs.frozen
class EngineEnd:
    """The end of an engine's run."""

    code: int
    """Its exit code; 128 and the signal's number where one ended it."""
    captured: bool
    """Whether it captured its graphs before."""
    interrupted: bool
    """Whether a signal from outside ended it, or came in."""


def run_marked(words: Sequence[str], environment: Mapping[str, str]) -> EngineEnd:
    """Run an engine's command to its end as ``run_engine`` does; the plugin inside it marks that it has captured.

    :param environment: the whole environment of the engine; a file of ``STARTED`` in it stays.
    :raises EngineError: the program cannot be started.
    """
    signals: list[int] = []
    with tempfile.TemporaryDirectory(prefix="capture-planner-", ignore_cleanup_errors=True) as folder:
        mark = Path(environment.get(STARTED, f"{folder}/captured"))
        try:
            code = run_engine(words, {**environment, STARTED: str(mark)}, signals.append)
        except OSError as error:
            failed = EngineError(f"{words[0]}: {error.strerror or error}; activate its environment first")
            failed.exit_code = 127 if isinstance(error, FileNotFoundError) else 126  # as a shell has them
            raise failed from None
        return EngineEnd(code, mark.exists(), bool(signals) or code in _TOLD)


def run_engine(
    words: Sequence[str], environment: Mapping[str, str], received: Callable[[int], object] | None = None
) -> int:
    """Run an engine's command to its end, and return its exit code; 128 and the signal's number where one ended it.

    To be called in the main thread: signals are taken here while the engine runs.

    :param words: the program and its arguments; the program is looked up in the environment's ``PATH``.
    :param environment: the whole environment of the engine.
    :param received: gets the number of each signal that came in while the engine ran.
    :raises OSError: the program cannot be started.
    """
    # Windows: the child gets the console's Ctrl-C by itself.
    if not hasattr(signal, "sigwaitinfo"):
        return subprocess.run(list(words), env=dict(environment), check=False).returncode
    # Blocked before the child is there: a signal in between waits, and is forwarded.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    try:
        child = subprocess.Popen(list(words), env=dict(environment), preexec_fn=_as_child(before, os.getpid()))
        while child.poll() is None:
            # A thread that does not block SIGCHLD may take it between poll and wait: the next poll sees the end.
            signalled = signal.sigtimedwait({*_FORWARDED, signal.SIGCHLD}, _POLLED)
            if signalled is None or signalled.si_signo == signal.SIGCHLD:
                continue
            if received is not None:
                received(signalled.si_signo)
            # The kernel's own signals (si_code above 0) come from the terminal, and went to the child too.
            if signalled.si_code <= 0:
                child.send_signal(signalled.si_signo)
        while signal.sigtimedwait(_FORWARDED, 0) is not None:
            pass  # the engine has ended; its Ctrl-C is not this process's
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _as_child(mask: set[int | signal.Signals], parent: int) -> Callable[[], None]:
    """Return what the child does before it becomes the engine: take signals again, and end with its parent."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if prctl is not None:
            prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))
            if os.getppid() != parent:  # it ended before prctl
                os._exit(128 + signal.SIGTERM)

    return prepare
