"""Processes of ranks: the launcher's variables, and the processes on this machine that have ended."""

from __future__ import annotations

import os
import re
import select
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import attrs

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
