"""The control plane of a rank: it meets the others on a board, exchanges values with them, and is watched by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from time import monotonic, sleep

from capture_planner.errors import RankError
from capture_planner_runner.ranks.board import Board
from capture_planner_runner.ranks.peers import Plain
from capture_planner_runner.ranks.watch import VERDICT, RankVerdict, RankWatch, WaitLimits, apart, listed

SHORTEST, LONGEST = 0.0005, 0.02
"""Seconds between two looks at a board that others have yet to write to: doubled from one to the other."""


def meet(
    board: Board,
    rank: int,
    size: int,
    card: dict[str, Plain],
    limits: WaitLimits,
    *,
    clock: Callable[[], float] = monotonic,
    pause: Callable[[float], None] = sleep,
) -> tuple[dict[str, Plain], ...]:
    """Show this rank's card, which has its ``host``, and return those of all ranks.

    Raises ``RankError`` on every rank that has come, with the ranks that have not within ``limits.start``.
    """
    keys = [f"card/{each}" for each in range(size)]
    begun, each = clock(), SHORTEST
    board.post(keys[rank], json.dumps(card))
    while None in (texts := board.read(keys)):
        (verdict,) = board.read([VERDICT])
        # The first rank to lose patience writes the verdict, so that all that have come name the same ranks.
        if not verdict and clock() - begun > limits.start:
            verdict = board.claim(VERDICT, json.dumps(_missing(texts, limits.start)))
        if verdict:
            fields = json.loads(verdict)
            raise RankError(fields["says"], fields["ranks"])
        pause(each)
        each = min(2 * each, LONGEST)
    return tuple(json.loads(text or "") for text in texts)


def _missing(texts: Sequence[str | None], seconds: float) -> dict[str, Plain]:
    missing = [rank for rank, text in enumerate(texts) if text is None]
    names = [f"rank {rank}" for rank in range(len(texts))]
    says = (
        f"{listed(names, missing)} of {len(texts)} {'has' if len(missing) == 1 else 'have'} not started within "
        f"{seconds:g} s of the others; see the output of its launcher (--rank-timeout waits longer)"
    )
    return {"says": says, "ranks": missing, "interrupted": False}


class ControlPlane:
    """Exchanges values with the other ranks, under a watch."""

    def __init__(
        self, board: Board, watch: RankWatch, rank: int, size: int, *, pause: Callable[[float], None] = sleep
    ) -> None:
        self._board, self.watch, self.rank, self.size, self._pause = board, watch, rank, size, pause
        self._last = 0

    def exchange(self, topic: str, value: Plain) -> tuple[Plain, ...]:
        """Return the values of all ranks, see ``Peers.exchange``."""
        number, pause = self.watch.begin(topic), SHORTEST
        keys = [f"exchange/{number}/{rank}" for rank in range(self.size)]
        self._board.post(keys[self.rank], json.dumps([topic, value]))
        while None in (texts := self._board.read(keys)):
            self.watch.check()
            self._pause(pause)
            pause = min(2 * pause, LONGEST)
        self.watch.done()
        pairs = [json.loads(text or "") for text in texts]
        if (wrong := apart(self.watch.names, {rank: at for rank, (at, _) in enumerate(pairs)})) is not None:
            self.watch.accuse(wrong)
            self.watch.check()
        # All have posted this value, and so have read all values of the exchange before.
        if self._last:
            self._board.erase(f"exchange/{self._last}/{self.rank}")
        self._last = number
        return tuple(value for _, value in pairs)

    def collect(self, topic: str, value: Plain, seconds: float | None = None) -> tuple[Plain, ...]:
        """Show a value to the first rank; there, return those of all ranks, None for a missing one.

        The last word of each rank, also of one that ends early: nothing is waited for once there is a verdict, or for
        longer than ``seconds``, and none is raised.
        """
        keys = [f"collect/{topic}/{rank}" for rank in range(self.size)]
        self._board.post(keys[self.rank], json.dumps(value))
        if self.rank:
            return (None,) * self.size
        waited = 0.0
        while None in (texts := self._board.read(keys)):
            if self.watch.verdict is not None if seconds is None else waited >= seconds:
                break
            self._pause(LONGEST)
            waited += LONGEST
        return tuple(None if text is None else json.loads(text) for text in texts)

    def raise_cause(self, error: BaseException, seconds: float) -> None:
        """Raise why a connection to another rank broke, if a verdict says so within ``seconds``."""
        verdict: RankVerdict | None = self.watch.cause(seconds)
        if verdict is not None:
            raise verdict.error() from error
