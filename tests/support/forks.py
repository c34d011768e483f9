"""Processes that are forked from this one, which has imported torch: each takes milliseconds to start."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import attrs
import torch

from capture_planner import cli


@attrs.define(eq=False)
class Fork:
    """One process: its exit code, below 0 for a signal, and what it wrote; None while it runs."""

    pid: int
    folder: tempfile.TemporaryDirectory[str]
    begun: float
    code: int | None = None
    seconds: float = 0.0
    out: str = ""
    err: str = ""

    def errors(self) -> str:
        """Return what it has written to its standard error so far."""
        return self.err if self.poll() else Path(self.folder.name, "err").read_text("utf-8")

    def poll(self) -> bool:
        """Return whether it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code, self.seconds = os.waitstatus_to_exitcode(status), monotonic() - self.begun
                self.out, self.err = (Path(self.folder.name, name).read_text("utf-8") for name in ("out", "err"))
                self.folder.cleanup()
        return self.code is not None

    def end(self) -> None:
        """Kill it, if it runs."""
        if not self.poll():
            os.kill(self.pid, signal.SIGKILL)
            while not self.poll():
                sleep(0.01)


def fork(work: Callable[[], int]) -> Fork:
    """Run ``work`` in a process of its own, whose exit code it returns."""
    folder = tempfile.TemporaryDirectory()
    files = [Path(folder.name, name) for name in ("out", "err")]
    for file in files:
        file.touch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return Fork(pid, folder, monotonic())
    gc.callbacks.clear()  # Hypothesis's: a signal that comes in a collection would be raised in it, and lost
    code = 99
    try:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def command(*arguments: str) -> Fork:
    """Call a command of ``capture-planner`` in a process of its own, which Ctrl-C interrupts."""

    def call() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["capture-planner", *arguments]
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return fork(call)


def wait(forks: list[Fork], seconds: float) -> bool:
    """Wait until all have ended, and return whether they have; kill those that have not."""
    until = monotonic() + seconds
    while sum(not each.poll() for each in forks) and monotonic() < until:
        sleep(0.02)
    in_time = all(each.code is not None for each in forks)
    for each in forks:
        each.end()
    return in_time


def free_port() -> int:
    """Return the number of a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
