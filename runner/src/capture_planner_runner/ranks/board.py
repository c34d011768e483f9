"""The board: texts by key that all ranks read and write. Everything that ranks tell each other outside of a step."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined, unused-ignore]

from capture_planner.errors import RankError

PART = 4 << 20
"""Most bytes of one value: the server of a TCPStore closes the connection for more than 8 MiB (torch 2.11 to 2.13)."""


class Board:
    """Texts by key, in a store of torch. No method waits for another rank, so that any may be called at any time.

    Raises ``RankError`` where the store does not answer, with its address.

    :param address: of the store, for messages.
    :param host_rank: the rank whose process the store is in; None: a launcher's.
    """

    def __init__(self, store: Store, address: str, host_rank: int | None = None) -> None:
        self._store, self.address, self._host_rank = store, address, host_rank

    def post(self, key: str, text: str) -> None:
        """Write a text, over the one that was there."""
        data = text.encode()
        parts = [data[start : start + PART] for start in range(0, len(data), PART)]
        try:
            for number, part in enumerate(parts[1:], 1):
                self._store.set(f"{key}.{number}", part)  # type: ignore[arg-type, unused-ignore]
            self._store.set(key, f"{len(parts)} ".encode() + (parts or [b""])[0])  # type: ignore[arg-type, unused-ignore]
        except RuntimeError as error:
            raise self._broken(error) from error

    def read(self, keys: Sequence[str]) -> tuple[str | None, ...]:
        """Return the texts of some keys; None for a missing one."""
        try:
            if self._store.check(list(keys)):
                found: list[bytes | None] = list(self._store.multi_get(list(keys)))
            else:
                found = [self._store.get(key) if self._store.check([key]) else None for key in keys]
            return tuple(
                None if data is None else self._whole(key, data) for key, data in zip(keys, found, strict=True)
            )
        except RuntimeError as error:
            raise self._broken(error) from error

    def _whole(self, key: str, data: bytes) -> str:
        count, _, first = data.partition(b" ")
        rest = [self._store.get(f"{key}.{number}") for number in range(1, int(count or 0))]
        return b"".join([first, *rest]).decode()

    def claim(self, key: str, text: str) -> str:
        """Write a text unless there is one that is not empty; return the text that is there then."""
        try:
            # Unlike in other stores, an expected value of nothing is also that of a key that is missing.
            found: bytes = self._store.compare_set(key, "", f"1 {text}")
        except RuntimeError as error:
            raise self._broken(error) from error
        return found.partition(b" ")[2].decode()

    def erase(self, key: str) -> None:
        """Remove a key."""
        try:
            self._store.delete_key(key)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> RankError:
        where = "the launcher" if self._host_rank is None else f"rank {self._host_rank}"
        reason = str(error).partition("\n")[0]
        return RankError(
            f"{where}, whose store at {self.address} the ranks meet in, has ended or cannot be reached: {reason}",
            () if self._host_rank is None else (self._host_rank,),
        )


def open_store(host: str, port: int, *, hosts: bool, seconds: float) -> TCPStore:
    """Connect to the store at an address, or open it there. Raises ``RuntimeError`` where that takes longer."""
    limit = timedelta(seconds=seconds)
    return TCPStore(host, port, is_master=hosts, timeout=limit, wait_for_workers=False, multi_tenant=True)
