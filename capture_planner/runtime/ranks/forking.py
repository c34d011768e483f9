"""Starting the ranks of one host: one process each, forked from one that has imported all they need."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from time import monotonic, sleep

import attrs
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from capture_planner.errors import RunError
from capture_planner.runtime.ranks.processes import RankProcess

PATIENCE = 12.0
"""Seconds that ranks have to end once one has failed: they do by themselves, with the reason, in 10."""

ADDRESS = "127.0.0.1"
INTERRUPTED = 130
"""The exit code after Ctrl-C, as a shell gives it."""

Say = Callable[[str], None]
"""Prints one line of an error."""


@attrs.define(eq=False)
class _Child:
    """The process of one rank."""

    rank: int
    pid: int
    errors: int
    """The pipe that its errors come from."""
    output: int | None
    """The pipe of its standard error; None: it has that of this process."""
    lines: list[str] = attrs.Factory(list)
    code: int | None = None
    is_late: bool = False
    """Whether it was killed, as it did not end after the others."""


def run_ranks(size: int, work: Callable[[RankProcess, Say], int], say: Say) -> int:
    """Run ``work`` in a process for each rank; return the exit code of the first that failed, or 0.

    The first rank has this process's output. Of the others, only what they write to standard error is shown, each line
    once. ``work`` passes its error to its second argument; the errors of all ranks are shown once, when all have ended.
    Ctrl-C is passed on to all, and once more ends them. Raises ``RunError`` where the process cannot be forked, as CUDA
    is in use in it.

    :param say: prints an error.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        raise RunError("CUDA is in use in this process, which cannot be divided into ranks; start them with torchrun")
    with closing(socket.socket()) as listening:
        listening.bind((ADDRESS, 0))
        listening.listen(size)
        port = listening.getsockname()[1]
        children = []
        gc.collect()
        for rank in range(size):
            me = RankProcess(rank=rank, size=size, local_rank=rank, address=ADDRESS, port=port, has_store=True)
            children.append(_fork(me, work, listening))
        # After all forks: neither its thread nor those that read can be in a process that is forked.
        file, limit = listening.detach(), timedelta(seconds=PATIENCE)
        store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=file)
    readers = [*map(_reader, children), *_shown(children)]
    code = _wait(children)
    for reader in readers:
        reader.join(PATIENCE)
    del store
    for line in dict.fromkeys(line for child in children for line in child.lines):
        say(line)
    return code


def _fork(me: RankProcess, work: Callable[[RankProcess, Say], int], listening: socket.socket) -> _Child:
    """Start the process of one rank, which ends with what ``work`` returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    shown = os.pipe() if me.rank else None
    with warnings.catch_warnings():
        # Python warns of threads that a fork does not have: those of numpy's BLAS, which knows how to be forked.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(write)
        if shown is not None:
            os.close(shown[1])
        return _Child(me.rank, pid, read, None if shown is None else shown[0])
    # What has been imported is garbage for no rank: none looks at it, which would copy its memory.
    gc.freeze()
    code = 1
    try:
        # Ctrl-C reaches the process that waits, which passes it on: to all ranks, once.
        os.setsid()
        listening.close()
        if shown is not None:
            _replace_output(shown[1])
        os.environ.update(me.variables)
        code = work(me, lambda line: _write(write, line))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reader(child: _Child) -> threading.Thread:
    """Start to read the errors of a rank."""

    def read() -> None:
        with os.fdopen(child.errors, encoding="utf-8", errors="replace") as lines:
            child.lines.extend(json.loads(line) for line in lines)

    return _started(read)


def _shown(children: Sequence[_Child]) -> Iterator[threading.Thread]:
    """Start to show what ranks write to standard error, each line once."""
    seen: set[str] = set()

    def show(output: int) -> None:
        with os.fdopen(output, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line not in seen:
                    seen.add(line)
                    sys.stderr.write(line)

    for child in children:
        if child.output is not None:
            yield _started(partial(show, child.output))


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _wait(children: Sequence[_Child]) -> int:
    """Wait for all ranks; return the exit code of the first that failed, or 0."""
    first = 0
    until: float | None = None
    interrupts = 0
    while left := [child for child in children if child.code is None]:
        try:
            for child in left:
                _reap(child)
                if child.code and not first:
                    first, until = child.code, monotonic() + PATIENCE
            if until is not None and monotonic() > until:
                until = None
                for child in left:
                    if child.code is None:
                        child.is_late = True
                        child.lines.append(f"rank {child.rank} did not end within {PATIENCE:g} s, and was killed")
                        os.kill(child.pid, signal.SIGKILL)
            sleep(0.02)
        except KeyboardInterrupt:
            interrupts += 1
            first, until = first or INTERRUPTED, until or monotonic() + PATIENCE
            for child in left:
                if child.code is None:
                    os.kill(child.pid, signal.SIGINT if interrupts == 1 else signal.SIGKILL)
    return first


def _reap(child: _Child) -> None:
    """Note the exit code of a rank that has ended; 1, and a line, for one that a signal has killed."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if not pid:
        return
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and not child.is_late:
        child.lines.append(f"rank {child.rank} was killed by {signal.Signals(-code).name}")
    child.code = 1 if code < 0 else code


def _write(file: int, line: str) -> None:
    os.write(file, f"{json.dumps(line)}\n".encode())


def _replace_output(errors: int) -> None:
    """Give this process nothing to write to but a pipe for standard error."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(errors, 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
