"""Rank processes: the launcher's variables, which ranks of this host have exited, and starting all ranks on one host.

They are forked from one process that has imported everything they need.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from time import monotonic, sleep

import attrs
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from capture_planner.errors import RunError
from capture_planner_runner.ranks.peers import Plain

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for each process; so do ``run --ranks`` and scripts for other launchers."""


@attrs.frozen(kw_only=True)
class RankProcess:
    """The launcher's values for one process of several."""

    rank: int
    size: int
    local_rank: int
    """Number on this machine, and of its GPU."""
    address: str
    port: int
    has_store: bool = False
    """True if the launcher has a store at the address, as torchrun does; else the first rank opens it."""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> RankProcess | None:
        """Read the variables that torchrun sets; None for a single process.

        Raises ``RunError`` where some are missing or are no numbers.
        """
        if variables.get("WORLD_SIZE", "1") in ("", "0", "1"):
            return None
        missing = [name for name in VARIABLES if not variables.get(name)]
        if missing:
            raise RunError(
                f"WORLD_SIZE is {variables['WORLD_SIZE']}, and {', '.join(missing)} is not set; start the ranks with "
                "torchrun or --ranks, or unset WORLD_SIZE"
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            if not re.fullmatch(r"\d{1,5}", variables[name]) or int(variables[name]) > 65_535:
                raise RunError(f"{name} is {variables[name]!r}; expected a whole number of at most 65,535")
            numbers[name] = int(variables[name])
        if numbers["RANK"] >= numbers["WORLD_SIZE"]:
            raise RunError(f"RANK is {numbers['RANK']}, and WORLD_SIZE {numbers['WORLD_SIZE']}; ranks count from 0")
        return cls(
            rank=numbers["RANK"],
            size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            address=variables["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
            has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @property
    def variables(self) -> dict[str, str]:
        """These values as environment variables."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.has_store),
        }


def card() -> dict[str, Plain]:
    """Return the facts of this process for other ranks: its host's name, and what a watch on the same host needs."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine()}


def machine() -> str:
    """Return an id that processes share if they see each other's pids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class LocalProcesses:
    """Ranks on this machine that have ended, as the kernel reports at once. Other ranks only go silent."""

    def __init__(self, rank: int, cards: Sequence[Mapping[str, Plain]]) -> None:
        here = cards[rank]["machine"]
        self._files: dict[int, int] = {}
        self._gone: set[int] = set()
        for other, each in enumerate(cards):
            if other != rank and here and each["machine"] == here and hasattr(os, "pidfd_open"):
                try:
                    self._files[os.pidfd_open(int(str(each["pid"])))] = other
                except ProcessLookupError:
                    self._gone.add(other)
                except OSError:
                    # A kernel without such files: silence tells.
                    continue

    def gone(self) -> Collection[int]:
        """Return the ranks whose processes have ended."""
        return [*self._gone, *(self._files[file] for file in select.select(list(self._files), [], [], 0)[0])]

    def close(self) -> None:
        """Close the files of the processes."""
        while self._files:
            os.close(self._files.popitem()[0])


PATIENCE = 12.0
"""Seconds for the other ranks to end once one has failed. By themselves they need 10, and say the reason."""

ADDRESS = "127.0.0.1"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell gives it."""

Say = Callable[[str], None]
"""Prints one line of an error."""

_FORK = multiprocessing.get_context("fork")


@attrs.define(eq=False)
class _Child:
    """The process of one rank."""

    rank: int
    process: ForkProcess
    errors: Connection
    output: int | None
    """Pipe of its standard error; None: it has that of this process."""
    lines: list[str] = attrs.Factory(list)
    code: int | None = None
    is_late: bool = False
    """True if it was killed because it did not end after the others."""

    def poll(self) -> None:
        """Read its errors, and its exit code once it has ended: 1, and a line, if a signal killed it."""
        # Before the pipe is read: if the process has ended by now, all that it sent is in there.
        code = self.process.exitcode
        with suppress(EOFError):
            while self.errors.poll():
                self.lines.append(self.errors.recv())
        if code is None or self.code is not None:
            return
        if code < 0 and not self.is_late:
            self.lines.append(f"rank {self.rank} was killed by {signal.Signals(-code).name}")
        self.code = 1 if code < 0 else code

    def kill(self) -> None:
        """End a rank that does not end by itself."""
        self.is_late = True
        self.lines.append(f"rank {self.rank} did not end within {PATIENCE:g} s, and was killed")
        self.process.kill()


def run_ranks(size: int, work: Callable[[RankProcess, Say], int], say: Say) -> int:
    """Run ``work`` in a process for each rank; return the exit code of the first that failed, or 0.

    The first rank has this process's output. Of the others, only their standard error is shown, each line once.
    ``work`` passes its error to its second argument; the errors of all ranks are shown once, when all have ended.
    Ctrl-C is passed on to all, and a second one kills them. Raises ``RunError`` where CUDA is in use in this process,
    which then cannot be forked.

    :param say: prints an error.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        raise RunError("CUDA is in use in this process, which cannot be divided into ranks; start them with torchrun")
    with closing(socket.socket()) as listening:
        # Before the forks, so that each rank is given a port that is open.
        listening.bind((ADDRESS, 0))
        listening.listen(size)
        port = listening.getsockname()[1]
        # Each rank freezes the collector's objects, and with them garbage, which it would keep for good.
        gc.collect()
        children = [
            _start(
                RankProcess(rank=rank, size=size, local_rank=rank, address=ADDRESS, port=port, has_store=True),
                work,
                listening,
            )
            for rank in range(size)
        ]
        # After all forks: no forked process may have the store's thread, or those that read.
        file, limit = listening.detach(), timedelta(seconds=PATIENCE)
        store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=file)
    readers = _show_output(children)
    code = _wait(children)
    for reader in readers:
        reader.join(PATIENCE)
    # Only now: the ranks exchange through it until they end.
    del store
    # Ranks that end because of one have the same sentence, which is shown once.
    for line in dict.fromkeys(line for child in children for line in child.lines):
        say(line)
    return code


def _start(me: RankProcess, work: Callable[[RankProcess, Say], int], listening: socket.socket) -> _Child:
    """Start the process of one rank, which ends with the exit code that ``work`` returns."""
    errors, sent = _FORK.Pipe(duplex=False)
    shown = os.pipe() if me.rank else None
    process = _FORK.Process(target=_run, args=(me, work, listening, sent, None if shown is None else shown[1]))
    with warnings.catch_warnings():
        # Python warns of threads that a fork does not have: those of numpy's BLAS, which can be forked.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    # Now only the child has the writing ends, so reading ends when it exits.
    sent.close()
    if shown is not None:
        os.close(shown[1])
    return _Child(me.rank, process, errors, None if shown is None else shown[0])


def _run(
    me: RankProcess,
    work: Callable[[RankProcess, Say], int],
    listening: socket.socket,
    errors: Connection,
    output: int | None,
) -> None:
    """Do the work of one rank, in its process."""
    # The collector skips imported objects from here on: looking at them would copy their memory.
    gc.freeze()
    code = 1
    try:
        # Ctrl-C goes to the process that waits, which passes it on once to each rank.
        os.setsid()
        listening.close()
        if output is not None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
        os.environ.update(me.variables)
        code = work(me, errors.send)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit, which waits for threads of collectives whose other end is gone.
        os._exit(code)


def _show_output(children: Sequence[_Child]) -> list[threading.Thread]:
    """Start to show what ranks write to standard error, each line once; return the threads that read."""
    seen: set[str] = set()

    def show(output: int) -> None:
        with os.fdopen(output, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line not in seen:
                    seen.add(line)
                    sys.stderr.write(line)

    outputs = [child.output for child in children if child.output is not None]
    threads = [threading.Thread(target=show, args=(output,), daemon=True) for output in outputs]
    for thread in threads:
        thread.start()
    return threads


def _wait(children: Sequence[_Child]) -> int:
    """Wait for all ranks; return the exit code of the first that failed, or 0."""
    first, interrupts = 0, 0
    until: float | None = None
    while running := [child for child in children if child.code is None]:
        try:
            for child in running:
                child.poll()
                if child.code and not first:
                    first, until = child.code, monotonic() + PATIENCE
            if until is not None and monotonic() > until:
                until = None
                for child in running:
                    if child.code is None:
                        child.kill()
            sleep(0.02)
        except KeyboardInterrupt:
            interrupts += 1
            first, until = first or INTERRUPTED, until or monotonic() + PATIENCE
            for child in running:
                if child.code is None and child.process.pid is not None:
                    os.kill(child.process.pid, signal.SIGINT if interrupts == 1 else signal.SIGKILL)
    return first
